"""Weights as integers in safetensors, read to codes with scales: GPTQ, AWQ, compressed-tensors and bitsandbytes' int8.

Knows the layouts that these publish. The idea: scale * (code - zero) with a zero for each group is scale * code plus a
minimum of -scale * zero. Both products are exact in float32, where scales have 16 bits, and so is their sum; codes of
groups that all have the middle as zero need no minimum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.quantization.quantized_weight import AffineWeight
from engine.model.quantization.stored_parts import StoredParts

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds, the lowest first


def gptq(parts: StoredParts, bits: int, zero_offset: int) -> AffineWeight | Tensor | None:
    """Reads GPTQ's layout (Frantar et al. 2022; AutoGPTQ): codes (in / n, out) and zeros (groups, out / n) in words
    of n = 32 / bits, scales (groups, out), and `g_idx` (in,), the group of each column.

    `zero_offset` is 1 where zeros are stored less one, as in the first version of the format. With `act-order`, columns
    of a group do not lie together: the weight is then returned dequantised, (out, in) float32.
    """
    if "qweight" not in parts:
        return None
    out, width = parts.shape
    per_word = 32 // bits
    codes = unpack(parts.take("qweight", (width // per_word, out), "I32").t(), bits)
    groups = parts.shape_of("scales")[0]
    scales = parts.take("scales", (groups, out)).float().t()
    zeros = unpack(parts.take("qzeros", (groups, out // per_word), "I32"), bits).t()
    zeros = zeros + zero_offset & 2**bits - 1
    group = parts.group_of(groups)
    if "g_idx" in parts:
        order = parts.take("g_idx", (width,), "I32").long()
        if not torch.equal(order, torch.arange(width) // group):
            if order.min() < 0 or order.max() >= groups:
                raise parts.refuse("g_idx", f"groups {int(order.min())} to {int(order.max())}", f"0 to {groups - 1}")
            return (codes.float() - zeros[:, order]) * scales[:, order]
    return affine(codes, scales, zeros, bits, group)


def awq(parts: StoredParts) -> AffineWeight | None:
    """Reads AWQ's layout "gemm" (Lin et al. 2023; AutoAWQ): codes (in, out / 8) and zeros (groups, out / 8) of 4 bits,
    in words whose nibbles are not in order, and scales (groups, out)."""
    if "qweight" not in parts:
        return None
    out, width = parts.shape
    codes = _awq_unpack(parts.take("qweight", (width, out // 8), "I32"))
    groups = parts.shape_of("scales")[0]
    zeros = _awq_unpack(parts.take("qzeros", (groups, out // 8), "I32"))
    scales = parts.take("scales", (groups, out)).float()
    return affine(codes.t(), scales.t(), zeros.t(), 4, parts.group_of(groups))


def pack_quantized(parts: StoredParts) -> AffineWeight | Tensor | None:
    """Reads compressed-tensors' layout "pack-quantized": codes (out, in / n) and zeros (out / n, groups) in words,
    with an offset of half their range, and scales (out, groups). Act-order as in `gptq`."""
    if "weight_packed" not in parts:
        return None
    out, width = parts.shape
    words = parts.shape_of("weight_packed")[-1]
    bits = 4 if words == -(-width // 8) else 8
    codes = unpack(parts.take("weight_packed", (out, -(-width * bits // 32)), "I32"), bits)[:, :width]
    if "weight_shape" in parts:
        parts.take("weight_shape", (2,), "I64")  # the shape that config.json asks for was found above
    groups = parts.shape_of("weight_scale")[-1]
    scales = parts.take("weight_scale", (out, groups)).float()
    zeros = torch.full((out, groups), 2 ** (bits - 1), dtype=torch.uint8)
    if "weight_zero_point" in parts:
        packed = parts.take("weight_zero_point", (-(-out * bits // 32), groups), "I32")
        zeros = unpack(packed.t(), bits)[:, :out].t()
    group = parts.group_of(groups)
    if "weight_g_idx" in parts:
        order = parts.take("weight_g_idx", (width,), "I32").long()
        if order.min() >= 0 and not torch.equal(order, torch.arange(width) // group):  # -1: not used
            if order.max() >= groups:
                raise parts.refuse("weight_g_idx", f"group {int(order.max())}", f"0 to {groups - 1}")
            return (codes.float() - zeros[:, order]) * scales[:, order]
    return affine(codes, scales, zeros, bits, group)


def int_quantized(parts: StoredParts) -> AffineWeight | None:
    """Reads compressed-tensors' layout "int-quantized": int8 (out, in), scales (out, groups), (out, 1) or one."""
    if parts.kind_of("weight") != "I8":
        return None
    codes = parts.take("weight", parts.shape, "I8").view(torch.uint8) ^ 128
    scales = parts.per_row("weight_scale").float()
    zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
    if "weight_zero_point" in parts:
        zeros = parts.per_row("weight_zero_point", "I8").view(torch.uint8) ^ 128
    return affine(codes, scales, zeros, 8, parts.group_of(scales.shape[1]))


def bitsandbytes_int8(parts: StoredParts) -> AffineWeight | None:
    """Reads bitsandbytes' LLM.int8 (Dettmers et al. 2022): int8 (out, in) and `SCB` (out,), each row's largest
    magnitude, which is 127."""
    if "SCB" not in parts:
        return None
    out, width = parts.shape
    codes = parts.take("weight", parts.shape, "I8").view(torch.uint8) ^ 128
    if "weight_format" in parts and int(parts.take("weight_format", (), "U8")):
        raise parts.refuse("weight_format", "a tiled layout", "0, rows")
    scales = parts.take("SCB", (out,)).float()[:, None] / 127
    return AffineWeight(codes, scales, None, bits=8, group=width, zero=128)


def affine(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int) -> AffineWeight:
    """Returns scale * (code - zero) of codes (out, in), scales and zeros (out, groups)."""
    middle = 2 ** (bits - 1)
    symmetric = bool((zeros == middle).all())
    minimums = None if symmetric else -(scales * zeros.float())
    return AffineWeight(
        codes.contiguous(), scales.contiguous(), minimums, bits=bits, group=group, zero=middle if symmetric else 0
    )


def unpack(words: Tensor, bits: int) -> Tensor:
    """Returns the fields of int32 words (rows, n), the lowest first: (rows, n * 32 / bits) uint8."""
    fields = words.contiguous().view(torch.uint8)  # little-endian: the lowest byte is first
    if bits == 8:
        return fields
    return torch.stack([fields & 15, fields >> 4], dim=-1).flatten(1)


def _awq_unpack(words: Tensor) -> Tensor:
    fields = unpack(words, 4).unflatten(1, (-1, 8))
    columns = torch.empty_like(fields)
    columns[..., list(AWQ_ORDER)] = fields
    return columns.flatten(1)
