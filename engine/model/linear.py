"""Linear layers with the weight laid out for the machine; knows nothing of models.

The idea: weights are packed once, at load, and a layer is then one call. Measured on 2 cores of a Cascade Lake Xeon
(AVX-512, no bf16), torch 2.13, float32, microseconds for 1 and 16 rows: out x in = 1408 x 256: F.linear 26 and 331,
the transposed matrix 18 and 55; 2048 x 2048: F.linear 514 and 2533, transposed 464 and 1823, oneDNN prepacked 611 and
1131. Weights that are read from memory each step, 3072 x 576, for 1, 4 and 16 rows: F.linear 383, 778 and 1826,
transposed 333, 681 and 882, prepacked 415, 449 and 586. So small matrices are transposed and large ones prepacked.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.quantization.quantized_weight import AffineWeight, round_to_nearest

Linear = Callable[[Tensor], Tensor]  # (tokens, in) -> (tokens, out)
Pack = Callable[[Tensor, Tensor | None], Linear]  # from weight (out, in) and bias (out,)
PackAffine = Callable[[AffineWeight, Tensor | None, bool], Linear | None]  # from weight, bias, and whether it is gated


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of a model's weights: `gated` packs gate and up, one below the other, `head` the weights of the logits
    where they differ, `plain` all else.

    `affine` packs weights that a checkpoint has as codes with scales, and returns None for those that it does not take;
    without it they are dequantised. `expert` is given the number of an expert and each of its projections once it is
    packed, and returns it in the place where it is kept.
    """

    plain: Pack
    gated: Pack
    head: Pack | None = None
    affine: PackAffine | None = None
    expert: Callable[[int, Linear], Linear] | None = None


class ProjectionReader(Protocol):
    """Reads and packs the weights of one checkpoint (`engine.model.layers.LayerReader`)."""

    @property
    def packing(self) -> Packing: ...

    def tensor(self, name: str, *shape: int) -> Tensor: ...

    def exact(self, name: str, *shape: int) -> Tensor: ...

    def linear(self, name: str, rows: int, columns: int, bias: bool = False) -> Linear: ...

    def gate_up(self, prefix: str, names: tuple[str, ...], width: int, *, gated: bool = False) -> Linear: ...

    def packed(self, weight: Tensor) -> Linear: ...

    def plain_norm(self, name: str, width: int) -> Linear: ...


# Elements. Below this, packing costs a step of one row a fifth and saves one of sixteen up to a third: a CPU mostly
# serves one chat at a time, so one row decides.
PREPACK_FROM = 1 << 21


@cache
def native_bf16() -> bool:
    """Returns whether this CPU multiplies bfloat16 in hardware (AMX or AVX512-BF16) and torch can use it."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )


def default_dtype(device: torch.device | str) -> torch.dtype:
    """Returns bfloat16 where the hardware multiplies it, else float32."""
    return torch.bfloat16 if torch.device(device).type == "cuda" or native_bf16() else torch.float32


def pack(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Returns x -> x @ weight.T + bias, for `weight` (out, in) and `bias` (out,) of one dtype on one device.

    The packed layer keeps a copy of its own on the CPU, so the caller may drop `weight`.
    """
    if weight.device.type == "cpu":
        if weight.dtype == torch.float32 and weight.numel() < PREPACK_FROM:
            return _transposed(weight, bias)
        if _prepackable(weight.dtype):
            return _prepacked(weight, bias)
    return Dense(weight, bias)


@dataclass(frozen=True, slots=True)
class Dense:
    """Keeps a weight as it is, (out, in): for devices whose libraries take it so."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _transposed(weight: Tensor, bias: Tensor | None) -> Linear:
    columns = weight.t().contiguous()
    if bias is None:
        return lambda x: torch.mm(x, columns)
    return lambda x: torch.addmm(bias, x, columns)


def _prepackable(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN multiplies packed weights of this type on this CPU; it refuses float16 without
    AVX512-FP16."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32 or native_bf16()


def _prepacked(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: linear(x, packed, bias, "none", [], "")


def multiplies_int8() -> bool:
    """Returns whether torch has a product of 8 bits for `pack_int8`: oneDNN's, on x86."""
    return torch.backends.mkldnn.is_available() and platform.machine().lower() in ("x86_64", "amd64")


def pack_int8(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Returns `pack`'s layer with weights and activations rounded to 8 bits, each row of either with its own scale.

    oneDNN takes one scale for all activations: it is given 1, and rows are multiplied by theirs afterwards. Without
    VNNI it adds products of bytes in 16 bits, which hold them if activations have 7.
    """
    rounded = round_to_nearest(weight, 8, weight.shape[1], symmetric=True)
    codes = (rounded.codes.int() - rounded.zero).to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(codes, None)
    zeros = torch.zeros(len(codes), dtype=torch.int32)
    scales, offset = rounded.scales.squeeze(1), 128 if torch.cpu._is_vnni_supported() else 64
    multiply = torch.ops.onednn.qlinear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        steps = x.abs().amax(1, keepdim=True).float().clamp_(min=1e-30) / (offset - 1)
        unsigned = (x / steps).round_().add_(offset).to(torch.uint8)
        made = multiply(unsigned, 1.0, offset, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        made *= steps
        return (made if bias is None else made.add_(bias)).to(x.dtype)

    return linear
