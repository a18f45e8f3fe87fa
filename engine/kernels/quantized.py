"""Linear layers on weights of 8 or 4 bits and activations of 16: Triton kernels and their torch reference, of one
signature.

The idea: few tokens wait for the weights to be read, so weights are kept small and widened next to the multiplication.
Knows nothing of models. Packed words are (blocks, out, 32) int32: block b has columns `b * span` to `(b + 1) * span`,
span being 128 at 8 bits and 256 at 4; plane p of word w, its p-th 8 or 4 bits, is column `b * span + 32 * p + w` plus
half the range (128 or 8). More tokens cost more arithmetic, so there are three ways, by tokens:

- up to 2, small gemm: sums on the ordinary cores, a weight costs about 4.5 instructions, and no tensor core waits for
16 rows;
- up to 128, gemm: tensor cores on weights widened in registers, 5.5 instructions a weight for any number of tokens;
- beyond, weights are widened in memory, some rows at a time, and multiplied by torch. That moves 4.5 bytes a weight
  where the others move a half to one, as much as 200 tokens cost at cuBLAS's speed, which the second does not reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from engine.errors import InvalidParameter
from engine.model.linear import Linear, PackAffine, Packing
from engine.model.quantization.quantized_weight import AffineWeight

WORDS = 32  # of a row in a block
SMALL_GEMM_TOKENS, GEMM_TOKENS = 2, 128  # of a small gemm, of a gemm: see above
GROUP = 64  # columns of a scale, as the engine packs 4 bits: 6% more bytes than 0.5 a weight
_SHRINK = [1.1 - 0.05 * step for step in range(9)]  # of a group's largest weight, tried for the least error
_WIDENED_AT_ONCE = 1 << 24  # elements: 32 MiB, which stay in the second-level cache until they are multiplied
_SMALL_GEMM_PROGRAMS = 512  # 4 for each of 132 multiprocessors; constant, as sums depend on it
_GEMM_PROGRAMS = 264  # 2 for each


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight (out, in), rounded to `bits`; made by `quantize`, or by `pack` of a checkpoint's own codes.

    `packed` is described above. `scales` is (out,) float32 where `group` is 0, one scale a row; else
    (blocks * span / group, out) of 16 or 32 bits, one for `group` columns. `minimums`, float32 of the same shape, are
    added to a group's weights. `bias` is (out,) or None.
    """

    packed: Tensor
    scales: Tensor
    bits: int
    group: int
    shape: tuple[int, int]
    bias: Tensor | None = None
    minimums: Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = (self.packed, self.scales, self.bias, self.minimums)
        return sum(part.nbytes for part in parts if part is not None)


def packed_bytes(rows: int, width: int, bits: int, group: int) -> int:
    """Returns the bytes of what `quantize` makes of a weight (rows, width)."""
    blocks = -(-width // (WORDS * 32 // bits))
    scales = 4 * rows if not group else 2 * rows * (blocks * WORDS * 32 // bits // group)
    return blocks * rows * WORDS * 4 + -(-scales // 16) * 16  # as far as the next part, where they lie together


def quantize(weight: Tensor, bits: int, group: int = 0, bias: Tensor | None = None) -> QuantizedWeight:
    """Rounds `weight` (out, in) to 8 or 4 bits, with a scale for `group` columns (32, 64, 128) or for the row (0).

    Symmetric: on Gaussian weights in groups of 64 zero points make 4 bits 3% more exact (relative error 0.088, not
    0.091; a scale for all weights 0.21), for more bytes and another sum of x for every group. Instead the largest
    weight takes the end of the range that has one step more, and the range is the best of nine. A last group that `in`
    cuts short has a scale of its own.

    Raises:
        InvalidParameter: other bits, or another group.
    """
    if bits not in (4, 8):
        raise InvalidParameter("bits", f"bits is {bits}; accepted: 4 or 8.")
    if group not in (0, 32, 64, 128):
        raise InvalidParameter("group", f"group is {group}; accepted: 32, 64, 128, or 0 for a scale a row.")
    out, width = weight.shape
    planes = 32 // bits
    blocks = -(-width // (WORDS * planes))
    packed = torch.empty(blocks, out, WORDS, dtype=torch.int32, device=weight.device)
    columns = blocks * WORDS * planes
    scales = torch.empty(out, columns // (group or columns), device=weight.device)
    for first in range(0, out, rows := max(1, _WIDENED_AT_ONCE // columns)):  # in float32 the whole may not fit
        part = torch.nn.functional.pad(weight[first : first + rows].float(), (0, columns - width))
        grouped = part.view(len(part), scales.shape[1], -1)
        scale = _scales(grouped, bits, bool(group))
        scales[first : first + rows] = scale.squeeze(-1)
        packed[:, first : first + rows] = _words(_rounded(grouped, scale, bits) + (1 << (bits - 1)), bits)
    scales = scales.t().contiguous().bfloat16() if group else scales.view(out)
    return QuantizedWeight(packed, scales, bits, group, (out, width), bias)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Packs codes of whole blocks, (rows, …), as words (blocks, rows, 32)."""
    planes = 32 // bits
    fields = codes.to(torch.int64).view(len(codes), -1, planes, WORDS)
    words = torch.zeros(len(codes), fields.shape[1], WORDS, dtype=torch.int64, device=codes.device)
    for plane in range(planes):
        words |= fields[:, :, plane] << (bits * plane)
    return words.to(torch.int32).transpose(0, 1)  # the low 32 bits


def pack(weight: AffineWeight, bias: Tensor | None, device: torch.device) -> QuantizedWeight | None:
    """Packs a checkpoint's own codes without rounding them again; None where the kernels do not have its groups.

    Scales are float16 where that is what they were, else float32.
    """
    out, width = weight.codes.shape
    whole_row = weight.group == width and weight.minimums is None and weight.zero == 1 << (weight.bits - 1)
    group = 0 if whole_row else next((size for size in (128, 64, 32) if weight.group % size == 0), -1)
    if group < 0:
        return None
    half, columns = 1 << (weight.bits - 1), WORDS * 32 // weight.bits
    blocks = -(-width // columns)
    packed = torch.empty(blocks, out, WORDS, dtype=torch.int32, device=device)
    for first in range(0, out, rows := max(1, _WIDENED_AT_ONCE // (blocks * columns))):
        codes = weight.codes[first : first + rows].to(device)
        codes = torch.nn.functional.pad(codes, (0, blocks * columns - width), value=half)
        packed[:, first : first + rows] = _words(codes, weight.bits)
    if whole_row:
        return QuantizedWeight(packed, weight.scales.view(out).to(device), weight.bits, 0, (out, width), bias)

    def grouped(parts: Tensor) -> Tensor:
        parts = parts.to(device).repeat_interleave(weight.group // group, 1)
        return torch.nn.functional.pad(parts, (0, blocks * columns // group - parts.shape[1])).t().contiguous()

    scales = grouped(weight.scales)
    low = weight.scales * (half - weight.zero) + (0.0 if weight.minimums is None else weight.minimums)
    minimums = grouped(low) if low.any() else None
    if torch.equal(scales.half().float(), scales):
        scales = scales.half()
    return QuantizedWeight(packed, scales, weight.bits, group, (out, width), bias, minimums)


def _scales(grouped: Tensor, bits: int, grouped_scales: bool) -> Tensor:
    """Returns the scales of weights (out, groups, group), as (out, groups, 1): at 4 bits those of the least squared
    error."""
    if bits == 8:
        scale = grouped.abs().amax(-1, keepdim=True) / 127
        return scale.bfloat16().float() if grouped_scales else scale
    extreme = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True)) / -(1 << (bits - 1))
    best, lowest_error = extreme, torch.full_like(extreme, torch.inf)
    for shrink in _SHRINK:
        tried = extreme * shrink
        if grouped_scales:
            tried = tried.bfloat16().float()
        error = (_rounded(grouped, tried, bits) * tried - grouped).square_().sum(-1, keepdim=True)
        best = torch.where(error < lowest_error, tried, best)
        lowest_error = torch.minimum(error, lowest_error)
    return best


def _rounded(weights: Tensor, scale: Tensor, bits: int) -> Tensor:
    half = 1 << (bits - 1)
    return (weights / torch.where(scale == 0, 1, scale)).round_().clamp_(-half, half - 1)


def dequantize(
    weight: QuantizedWeight, first: int = 0, end: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns rows `first` to `end` of the rounded weight, (rows, in)."""
    rows = slice(first, weight.shape[0] if end is None else end)
    shifts = torch.arange(0, 32, weight.bits, dtype=torch.int32, device=weight.packed.device)
    fields = (weight.packed[:, rows, None, :] >> shifts[:, None]) & ((1 << weight.bits) - 1)
    integers = (fields - (1 << (weight.bits - 1))).permute(1, 0, 2, 3).flatten(1).float()
    if weight.group:
        scales = weight.scales[:, rows].float().t().repeat_interleave(weight.group, 1)
    else:
        scales = weight.scales[rows, None]
    values = integers * scales
    if weight.minimums is not None:
        values += weight.minimums[:, rows].t().repeat_interleave(weight.group, 1)
    return values[:, : weight.shape[1]].to(dtype)


def packing(quantization: Literal["int8", "int4"], *, invariant: bool = False) -> Packing:
    """Returns a decoder's weight layout for `linear`: 8 bits with a scale a row, or 4 with one for `GROUP` columns.

    Logits come from 8 bits in either: an error there is in every logit at once and no later layer evens it out, and
    the matrix is a small part of a large model (7% of Llama 3 8B). `invariant`: see `linear`.
    """

    def rounded(weight: Tensor, bias: Tensor | None, bits: int = 8) -> Linear:
        return partial(linear, weight=quantize(weight, bits, GROUP if bits == 4 else 0, bias), invariant=invariant)

    inner = partial(rounded, bits=4) if quantization == "int4" else rounded
    return Packing(inner, inner, head=rounded)


def as_stored(device: torch.device, *, invariant: bool = False) -> PackAffine:
    """Returns the layout of weights that a checkpoint has quantised already, for `Packing.affine`."""

    def packed(weight: AffineWeight, bias: Tensor | None, gated: bool) -> Linear | None:
        made = pack(weight, None if bias is None else bias.to(device), device)
        return None if made is None else partial(linear, weight=made, invariant=invariant)

    return packed


def linear(x: Tensor, weight: QuantizedWeight, *, invariant: bool = False) -> Tensor:
    """Computes x @ weight.T + bias for x (tokens, in) of 16 bits, rows `in` contiguous or not: (tokens, out) of x's
    dtype.

    Sums are in float32. With `invariant`, on a GPU, a token's result has the same bits in any batch: all numbers of
    tokens go the second way, with one configuration, which costs many tokens a multiple. x in float32 goes the third
    way, which knows no tokens either but is torch's.
    """
    return linear_triton(x, weight, invariant=invariant) if x.is_cuda else linear_torch(x, weight)


def linear_torch(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The torch reference. See `linear`."""
    made = x.float() @ dequantize(weight).t()
    return (made if weight.bias is None else made + weight.bias.float()).to(x.dtype)


def linear_triton(x: Tensor, weight: QuantizedWeight, *, invariant: bool = False) -> Tensor:
    """The kernels; on CPU tensors only under Triton's interpreter. See `linear`."""
    tokens = len(x)
    if x.dtype == torch.float32 or (tokens > GEMM_TOKENS and not invariant):
        return _widened(x, weight)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(tokens, weight.shape[0])
    if not tokens:
        return out
    if tokens <= SMALL_GEMM_TOKENS and not invariant:
        _small_gemm(x, weight, out)
    else:
        _gemm(x, weight, out, invariant)
    return out


def _small_gemm(x: Tensor, weight: QuantizedWeight, out: Tensor) -> None:
    from engine.kernels.gpu.quantized import REPEATS, SLOTS, small_gemm_kernel

    (height, width), blocks = weight.shape, len(weight.packed)
    splits, repeats = 1, REPEATS[len(x)]
    rows = repeats * SLOTS.value
    while splits < 8 and splits < blocks and height * splits < _SMALL_GEMM_PROGRAMS * rows:
        splits *= 2
    rows //= splits
    whole = width % (WORDS * 32 // weight.bits) == 0 and height % rows == 0 and blocks % splits == 0
    small_gemm_kernel[(-(-height // rows),)](
        *(x, weight.packed, weight.scales, weight.minimums, weight.bias, out, height, width, blocks, x.stride(0)),
        bits=weight.bits,
        group=weight.group,
        tokens=len(x),
        splits=splits,
        repeats=repeats,
        whole=whole,
        num_warps=4,
    )


def _gemm(x: Tensor, weight: QuantizedWeight, out: Tensor, invariant: bool) -> None:
    from engine.kernels.gpu.quantized import BLOCK_ROWS, STAGES, SUM_BLOCK, gemm_kernel, gemm_warps, sum_kernel

    tokens, (height, width), blocks = len(x), weight.shape, len(weight.packed)
    block_tokens = 32 if invariant or 16 < tokens <= 32 else 16 if tokens <= 16 else 64
    across, down = -(-height // BLOCK_ROWS), -(-tokens // block_tokens)
    splits = 1
    while splits < 8 and splits < blocks and across * (1 if invariant else down) * splits < _GEMM_PROGRAMS:
        splits *= 2
    made = out if splits == 1 else x.new_empty(splits, tokens, height, dtype=torch.float32)
    gemm_kernel[across, down, splits](
        *(x, weight.packed, weight.scales, weight.minimums, weight.bias, made),
        *(tokens, height, width, blocks, x.stride(0)),
        bits=weight.bits,
        group=weight.group,
        splits=splits,
        block_tokens=block_tokens,
        block_rows=BLOCK_ROWS,
        num_warps=gemm_warps(block_tokens),
        num_stages=STAGES[block_tokens],
    )
    if splits > 1:
        sum_kernel[-(-height // SUM_BLOCK), tokens](
            *(made, weight.scales, weight.bias, out, tokens, height),
            splits=splits,
            group=weight.group,
            block=SUM_BLOCK,
        )


def _widened(x: Tensor, weight: QuantizedWeight) -> Tensor:
    from engine.kernels.gpu.quantized import BLOCK_ROWS, widen_kernel

    (height, width), blocks = weight.shape, len(weight.packed)
    out = x.new_empty(len(x), height)
    at_once = min(height, max(BLOCK_ROWS, _WIDENED_AT_ONCE // width))
    wide = x.new_empty(at_once, width)
    for first in range(0, height, at_once):
        rows = min(at_once, height - first)
        widen_kernel[-(-rows // BLOCK_ROWS), blocks](
            *(weight.packed, weight.scales, weight.minimums, wide, first, rows, height, width),
            bits=weight.bits,
            group=weight.group,
            block_rows=BLOCK_ROWS,
        )
        out[:, first : first + rows] = x @ wide[:rows].t()
    return out if weight.bias is None else out.add_(weight.bias)
