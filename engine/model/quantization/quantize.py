"""Quantises a checkpoint, layer by layer, into a directory in compressed-tensors' format.

Knows texts as token ids. The idea: a layer's inputs come from those before it as they were written, so errors that
have been made already are calibrated for, and a run that was killed goes on with the same bits. Embeddings, the logits'
matrix and norms stay as they are.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from engine.errors import CheckpointError, InvalidParameter
from engine.kv_cache.snapshot import fingerprint
from engine.model.loader import Json, SafetensorsWeights, is_gguf, read_json
from engine.model.quantization import compressed_tensors
from engine.model.quantization.checkpoint import quantization_of
from engine.model.quantization.equalization import Tensors, awq_scales, fold, preceding, smoothquant_scales
from engine.model.quantization.gptq import gptq, nearest
from engine.model.quantization.input_statistics import InputStatistics
from engine.model.quantization.layerwise import LayerwiseModel, LinearName, Projection, Tokens, projections
from engine.model.quantization.output_directory import OutputDirectory
from engine.model.quantization.quantized_safetensors import QuantizedSafetensors
from engine.model.quantization.quantized_weight import AffineWeight

Form = Literal["int8", "int4"]
Method = Literal["rtn", "gptq", "awq", "smoothquant"]
METHODS: tuple[Method, ...] = get_args(Method)
GROUPS = (32, 64, 128)
MIN_TOKENS = 2048  # to calibrate on
VERSION = 1  # of the algorithms: others give other bits
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # that scales are stored in


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to quantise: int4 has a scale for each `group` columns, int8 one for each row.

    Raises:
        InvalidParameter: a combination that there is not; the message names those accepted.
    """

    to: Form
    method: Method
    group: int | None = None  # None: of int8
    act_order: bool = False  # of gptq

    def __post_init__(self) -> None:
        if self.to == "int8" and self.group is not None:
            raise InvalidParameter("group", f"group is {self.group}, but int8 has a scale a row; leave it out.")
        if self.to == "int4" and self.group not in GROUPS:
            raise InvalidParameter("group", f"group is {self.group}; accepted for int4: {', '.join(map(str, GROUPS))}.")
        if self.method == "smoothquant" and self.to != "int8":
            raise InvalidParameter("method", "method smoothquant is for int8; accepted for int4: rtn, gptq, awq.")
        if self.act_order and self.method != "gptq":
            raise InvalidParameter("act_order", f"act_order is for gptq, and method is {self.method}; leave it out.")

    @property
    def bits(self) -> int:
        return 4 if self.to == "int4" else 8


@dataclass(frozen=True, slots=True)
class LayerDone:
    """A layer that is on disk: its number from 0, of how many, and the seconds that are left for the others.

    `scales` has the exponent that was best for each linear whose scales were searched; -1 where none was better.
    """

    index: int
    layers: int
    seconds_left: float
    resumed: bool
    scales: dict[LinearName, float]


def quantize(
    source: Path,
    target: Path,
    recipe: Recipe,
    texts: Tokens,
    *,
    resume: bool = False,
    overwrite: bool = False,
    done: Callable[[LayerDone], None] = lambda layer: None,
) -> None:
    """Writes the checkpoint `source`, which `loader.resolve` gave, to `target`, calibrated on `texts`.

    Raises:
        UnsupportedArchitecture, CheckpointError: the source cannot be read or is quantised already, or the target is
            refused (see `OutputDirectory`).
        InvalidParameter: the recipe does not fit the model's widths, or its norms.
    """
    model = open_source(source, recipe)
    if target.resolve() == source.resolve():
        raise CheckpointError(f"{target} is the model itself; give another directory to write to.")
    _check_texts(model, recipe, texts)
    layers = model.spec.layers
    record = _record(source, recipe, texts)
    directory = OutputDirectory(target, layers + 1, record, resume=resume, overwrite=overwrite)
    settings = quantization_config(recipe, model)
    calibration = _Calibration(model, recipe)
    if not directory.has(layers):
        directory.add(layers, calibration.rest())
    states, spent, made = model.embed(texts), 0.0, 0
    for index in range(layers):
        began, resumed, scales = time.monotonic(), directory.has(index), dict[LinearName, float]()
        if not resumed:
            tensors, scales = calibration.quantized(index, states)
            directory.add(index, tensors)
        if recipe.method != "rtn" and index + 1 < layers:
            layer = model.layer(index, QuantizedSafetensors(target, settings))
            states = list(model.outputs(index, layer, states))
        if not resumed:
            spent, made = spent + time.monotonic() - began, made + 1
        left = spent / made * (layers - index - 1) if made else 0.0
        done(LayerDone(index, layers, left, resumed, scales))
    directory.finish(source, {**read_json(source / "config.json"), "quantization_config": settings})


def open_source(source: Path, recipe: Recipe) -> LayerwiseModel:
    """Opens a checkpoint that the recipe is good for.

    Raises:
        UnsupportedArchitecture, CheckpointError, InvalidParameter: see `quantize`.
    """
    if is_gguf(source):
        raise CheckpointError(f"{source} is a GGUF file; give the model's directory of 16-bit safetensors.")
    if (found := quantization_of(source)) is not None:
        kind = found.get("quant_method")
        raise CheckpointError(f"{source} is quantised already ({kind}); give the checkpoint that it was made from.")
    model = LayerwiseModel(source)
    assert isinstance(model.weights, SafetensorsWeights)
    if model.spec.experts is not None:
        raise CheckpointError(f"{source} has experts, which are not quantised yet; accepted: models without.")
    if model.spec.recurrent_layers:
        raise CheckpointError(f"{source} has recurrent layers, which are not quantised yet; accepted: models without.")
    if model.spec.uneven_kv:
        why = "has layers that differ in their keys and values"
        raise CheckpointError(f"{source} {why}, which are not quantised yet; accepted: models without.")
    widths = {part.columns for parts in projections(model.spec, model.names, 0).values() for part in parts}
    if recipe.group is not None and (odd := sorted(width for width in widths if width % recipe.group)):
        accepted = [str(group) for group in GROUPS if not any(width % group for width in widths)]
        raise InvalidParameter(
            "group",
            f"group is {recipe.group}, but the model has linears of {odd[0]} inputs; accepted: "
            f"{', '.join(accepted) or 'none, so int8 alone'}.",
        )
    if recipe.method == "smoothquant" and (model.spec.parallel or not model.spec.pre_norm):
        has = "one for attention and MLP together" if model.spec.parallel else "none"
        raise InvalidParameter(
            "method",
            f"method smoothquant scales by the norms before linears, and this model has {has}; "
            "accepted: rtn, gptq, awq.",
        )
    return model


def _check_texts(model: LayerwiseModel, recipe: Recipe, texts: Tokens) -> None:
    longest, tokens = max(map(len, texts), default=0), sum(map(len, texts))
    if longest > model.spec.max_position_embeddings:
        raise InvalidParameter(
            "length",
            f"a text has {longest} tokens; the model takes at most {model.spec.max_position_embeddings}.",
        )
    widest = max(part.columns for parts in projections(model.spec, model.names, 0).values() for part in parts)
    needed = max(MIN_TOKENS, widest)
    if recipe.method != "rtn" and tokens < needed:
        raise InvalidParameter(
            "text",
            f"there are {tokens:,} tokens to calibrate on, and {recipe.method} needs {needed:,}, one for each input of "
            "the widest linear at least; give more text, or method rtn, which needs none.",
        )


def _record(source: Path, recipe: Recipe, texts: Tokens) -> Json:
    digest = hashlib.sha256(repr([list(text) for text in texts]).encode()).hexdigest()
    text = "" if recipe.method == "rtn" else digest[:32]
    return {**asdict(recipe), "model": fingerprint(source).hex(), "text": text, "version": VERSION}


def quantization_config(recipe: Recipe, model: LayerwiseModel) -> Json:
    """Returns the `quantization_config` of a model that is rounded by the recipe."""
    ignored = [model.names.lm_head.removesuffix(".weight")]
    ignored += [f"re:{prefix.replace('.', '[.]')}.*" for prefix in model.names.ignored]
    return compressed_tensors.configuration(
        recipe.bits, recipe.group, activations=recipe.method == "smoothquant", ignored=ignored
    )


class _Calibration:
    """Quantises single layers of a model by a recipe."""

    def __init__(self, model: LayerwiseModel, recipe: Recipe) -> None:
        assert isinstance(model.weights, SafetensorsWeights)
        self._model, self._recipe, self._weights = model, recipe, model.weights

    def rest(self) -> Tensors:
        """Returns the tensors of no layer, as they are stored."""
        layers = tuple(f"{self._model.names.root}layers.{index}." for index in range(self._model.spec.layers))
        return {name: self._weights.stored(name) for name in self._weights.names() if not name.startswith(layers)}

    def quantized(self, index: int, states: Sequence[Tensor]) -> tuple[Tensors, dict[LinearName, float]]:
        """Returns the tensors of layer `index` as they are to be stored, and the exponents of their scales."""
        recipe, parts = self._recipe, projections(self._model.spec, self._model.names, index)
        prefix = f"{self._model.names.root}layers.{index}."
        tensors = {name: self._weights.stored(name) for name in self._weights.names() if name.startswith(prefix)}
        dtypes = {name: _scale_dtype(tensors, each[0]) for name, each in parts.items()}
        inputs = self._inputs(index, states) if recipe.method != "rtn" else {}
        scales = self._equalized(index, tensors, parts, inputs) if recipe.method in ("awq", "smoothquant") else {}
        for name, each in parts.items():
            weights = [tensors.pop(f"{part.name}.weight") for part in each]
            rounded = self._rounded(torch.cat(weights), inputs.get(name), dtypes[name])
            write = compressed_tensors.plain if recipe.method == "smoothquant" else compressed_tensors.pack
            row = 0
            for part in each:
                rows = torch.arange(row, row := row + part.rows)
                stored = write(rounded.rows(rows), dtypes[name])
                tensors |= {f"{part.name}.{end}": tensor for end, tensor in stored.items()}
        return tensors, scales

    def _inputs(self, index: int, states: Sequence[Tensor]) -> dict[LinearName, InputStatistics]:
        tokens, moments = sum(map(len, states)), self._recipe.method == "gptq"
        inputs: dict[LinearName, InputStatistics] = {}

        def observe(name: LinearName, x: Tensor) -> None:
            inputs.setdefault(name, InputStatistics(tokens, moments=moments)).add(x)

        for _ in self._model.outputs(index, self._model.layer(index), states, observe):
            pass
        return inputs

    def _equalized(
        self,
        index: int,
        tensors: Tensors,
        parts: dict[LinearName, tuple[Projection, ...]],
        inputs: dict[LinearName, InputStatistics],
    ) -> dict[LinearName, float]:
        """Folds the best scales of each linear's inputs into what precedes it; returns their exponents."""
        chosen, spec = dict[LinearName, float](), self._model.spec
        for name, before in preceding(spec, self._model.names, index, parts).items():
            after, sample = parts[name], inputs[name].sample
            weights = [tensors[f"{part.name}.weight"].float() for part in after]
            rounded = partial(self._values, dtype=_scale_dtype(tensors, after[0]))
            if self._recipe.method == "awq":
                scales, chosen[name] = awq_scales(weights, sample, rounded, before)
            elif before.rows is None:
                scales, chosen[name] = smoothquant_scales(weights, sample, rounded)
            else:
                continue
            fold(tensors, before, after, scales, spec.norm_offset)
        return chosen

    def _values(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return self._rounded(weight, None, dtype).dequantize()

    def _rounded(self, weight: Tensor, inputs: InputStatistics | None, dtype: torch.dtype) -> AffineWeight:
        recipe = self._recipe
        group = recipe.group or weight.shape[1]
        if recipe.method == "gptq" and inputs is not None:
            return gptq(weight, inputs.hessian, recipe.bits, group, dtype, act_order=recipe.act_order)
        return nearest(weight.float(), recipe.bits, group, dtype)


def _scale_dtype(tensors: Tensors, part: Projection) -> torch.dtype:
    dtype = tensors[f"{part.name}.weight"].dtype
    return dtype if dtype in _FLOATS else torch.float32
