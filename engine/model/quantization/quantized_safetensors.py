"""Directories whose config.json has a `quantization_config`: its methods and variants, and their tensors as weights.

Knows the fields of that configuration; layouts are in packed_integers.py and small_floats.py. The idea: the
configuration is checked for whatever would change the result, and the tensors themselves say which layers are
quantised; a layer that is not is read as floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.loader import FLOATS, Json, SafetensorsWeights
from engine.model.quantization.packed_integers import awq, bitsandbytes_int8, gptq, int_quantized, pack_quantized
from engine.model.quantization.quantized_weight import AffineWeight
from engine.model.quantization.small_floats import bitsandbytes_4bit, float8, mxfp4
from engine.model.quantization.stored_parts import StoredParts

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4", "bitsandbytes")
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")  # of compressed-tensors

# Scales of activations and of K/V, which are kept in 16 or 32 bits here.
_UNUSED = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point", ".k_scale",
    ".v_scale", ".q_scale", ".activation_scale",
)  # fmt: skip

_Read = Callable[[StoredParts], AffineWeight | Tensor | None]  # None: the layer is not quantised


@dataclass(frozen=True, slots=True)
class Scheme:
    """A method's reader, and the weights in each element of the parts that hold them, by the ends of their names."""

    read: _Read
    elements: Mapping[str, int]


class QuantizedSafetensors(SafetensorsWeights):
    """The tensors of a directory with a quantization_config, under the names and shapes of the unquantised checkpoint.

    Raises:
        CheckpointError: as `SafetensorsWeights`, or the method or variant is not supported.
    """

    def __init__(self, directory: Path, settings: Json) -> None:
        self._scheme = scheme_of(directory, settings)
        super().__init__(directory)

    def names(self) -> Iterable[str]:
        return [name for name in super().names() if not name.endswith(_UNUSED) and not self._is_empty_bias(name)]

    def parameters(self) -> int:
        total = 0
        for name in super().names():
            part = name.rpartition(".")[2]
            shape, kind = self.describe(name)
            if kind not in FLOATS and part in self._scheme.elements:
                total += math.prod(shape) * self._scheme.elements[part]
            elif name.endswith("_blocks"):  # of MXFP4
                total += math.prod(shape) * 2
            elif part in ("weight", "bias") or part.endswith("_bias"):
                total += math.prod(shape)
        return total

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if f"{name}_blocks" in self:
            return self._take_mxfp4(name, shape)
        found = self._quantized(name, shape)
        if found is None:
            return super().take(name, shape)
        return found.dequantize() if isinstance(found, AffineWeight) else found

    def take_quantized(self, name: str, shape: tuple[int, ...]) -> AffineWeight | None:
        found = self._quantized(name, shape)
        return found if isinstance(found, AffineWeight) else None

    def _quantized(self, name: str, shape: tuple[int, ...]) -> AffineWeight | Tensor | None:
        stem, _, part = name.rpartition(".")
        return self._scheme.read(StoredParts(self, stem, shape)) if part == "weight" and len(shape) == 2 else None

    def _take_mxfp4(self, name: str, shape: tuple[int, ...]) -> Tensor:
        *outer, width, out = shape
        blocks, kind = self.describe(f"{name}_blocks")
        scales, scales_kind = self.describe(f"{name}_scales")
        wanted = (*outer, out, width // 32, 16)
        if (blocks, scales, kind, scales_kind) != (wanted, wanted[:-1], "U8", "U8") or width % 32:
            raise CheckpointError(
                f"{self.place}: tensor {name!r} has blocks {blocks} {kind} and scales {scales} {scales_kind}; "
                f"accepted: {wanted} and {wanted[:-1]} U8, as config.json asks for {shape}."
            )
        parts = zip(self.stored(f"{name}_blocks"), self.stored(f"{name}_scales"), strict=True)
        # bfloat16 holds the values exactly; an expert at a time, as the work takes several times its memory
        return torch.stack([mxfp4(*each).bfloat16() for each in parts]).transpose(-1, -2)

    def _is_empty_bias(self, name: str) -> bool:
        """Returns whether a quantised layer has a bias of zeros, which AutoGPTQ writes where the model has none."""
        stem, _, part = name.rpartition(".")
        if part != "bias" or name in self._taken or f"{stem}.qweight" not in self:
            return False
        empty = not self.stored(name).any()
        self._taken.discard(name)  # it was only looked at
        return empty


def scheme_of(directory: Path, settings: Json) -> Scheme:
    """Returns the scheme of a quantization_config.

    Raises:
        CheckpointError: its method or variant is not supported.
    """
    method = settings.get("quant_method")
    made = _SCHEMES.get(str(method))
    if made is None:
        raise _refuse(directory, "quant_method", method, ", ".join(METHODS))
    return made(directory, settings)


def _gptq(directory: Path, settings: Json) -> Scheme:
    _check(directory, settings, "bits", (4, 8))
    bits, form = int(settings["bits"]), settings.get("checkpoint_format", "gptq")
    _check(directory, settings, "checkpoint_format", ("gptq", "gptq_v2", None))
    for pattern, changes in _objects(directory, settings, "dynamic").items():
        if changes.get("bits", bits) != bits:
            raise _refuse(directory, f"dynamic[{pattern!r}].bits", changes["bits"], f"{bits}, as of all layers")
    return Scheme(partial(gptq, bits=bits, zero_offset=form != "gptq_v2"), {"qweight": 32 // bits})


def _awq(directory: Path, settings: Json) -> Scheme:
    _check(directory, settings, "bits", (4,), alias="w_bit")
    version = settings.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise _refuse(directory, "version", version, "gemm")
    return Scheme(awq, {"qweight": 8})


def _compressed_tensors(directory: Path, settings: Json) -> Scheme:
    _check(directory, settings, "format", _FORMATS)
    if settings.get("transform_config"):
        raise _refuse(directory, "transform_config", "given", "none: weights that are not rotated")
    sparsity = settings.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise _refuse(directory, "sparsity_config", sparsity, "format dense, or none")
    bits, block = 8, None
    for name, group in _objects(directory, settings, "config_groups").items():
        field, form = f"config_groups[{name!r}]", group.get("format") or settings["format"]
        if form not in _FORMATS:
            raise _refuse(directory, f"{field}.format", form, ", ".join(_FORMATS))
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise _refuse(directory, f"{field}.weights", weights, "an object")
        kind = (weights.get("type"), weights.get("num_bits"))
        if kind not in (("int", 4), ("int", 8), ("float", 8)):
            raise _refuse(directory, f"{field}.weights", f"{kind[0]} of {kind[1]} bits", "int of 4 or 8, float of 8")
        if weights.get("strategy") == "block":
            block = _block(directory, f"{field}.weights.block_structure", weights.get("block_structure"))
        bits = min(bits, int(weights["num_bits"]))

    def read(parts: StoredParts) -> AffineWeight | Tensor | None:
        for each in (pack_quantized, int_quantized):
            if (found := each(parts)) is not None:
                return found
        return float8(parts, block)

    return Scheme(read, {"weight_packed": 32 // bits, "weight": 1})


def _fp8(directory: Path, settings: Json) -> Scheme:
    block = settings.get("weight_block_size")
    if str(settings.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refuse(directory, "fmt", settings["fmt"], "e4m3")
    return Scheme(
        partial(float8, block=None if block is None else _block(directory, "weight_block_size", block)), {"weight": 1}
    )


def _mxfp4(directory: Path, settings: Json) -> Scheme:
    return Scheme(lambda parts: None, {})


def _bitsandbytes(directory: Path, settings: Json) -> Scheme:
    if settings.get("load_in_8bit"):
        return Scheme(bitsandbytes_int8, {"weight": 1})
    if not settings.get("load_in_4bit"):
        raise _refuse(directory, "load_in_4bit", settings.get("load_in_4bit"), "true, or load_in_8bit true")
    _check(directory, settings, "bnb_4bit_quant_type", ("nf4", "fp4"))
    return Scheme(bitsandbytes_4bit, {"weight": 2})


_SCHEMES: Mapping[str, Callable[[Path, Json], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}


def _objects(directory: Path, settings: Json, field: str) -> Json:
    """Returns an object of objects; an empty one where the field is not there."""
    value = settings.get(field) or {}
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        raise _refuse(directory, field, value, "an object of objects")
    return value


def _block(directory: Path, field: str, value: Any) -> tuple[int, int]:  # Any: JSON
    if isinstance(value, str):  # "128x128", as early versions wrote it
        value = [int(side) for side in value.split("x") if side.isdigit()]
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(each, int) and each > 0 for each in value):
        raise _refuse(directory, field, value, "two positive numbers, such as [128, 128]")
    return value[0], value[1]


def _check(directory: Path, settings: Json, field: str, accepted: tuple[Any, ...], alias: str = "") -> None:
    value = settings.get(field, settings.get(alias, accepted[0] if None in accepted else None))
    if value not in accepted:
        shown = ", ".join(str(each) for each in accepted if each is not None)
        raise _refuse(directory, field, value, shown)


def _refuse(directory: Path, field: str, value: object, accepted: str) -> CheckpointError:
    return CheckpointError(
        f"{directory / 'config.json'}: quantization_config.{field} is {value!r}; supported: {accepted}."
    )
