"""Blocks of GGUF tensors, decoded to codes with scales or to floats. Knows layouts of bytes (ggml-common.h) alone.

The idea: every type of 2 to 8 bits is scale * code + minimum by groups, once the scales of K-quants are multiplied out
in float32; types whose codes index a table of small integers (MXFP4, IQ4) are codes of 8 bits. So nothing is rounded,
and `dequantize` gives the very floats of ggml's own reference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.quantization.gguf_file import BlockType
from engine.model.quantization.quantized_weight import AffineWeight

_Codes = tuple[Tensor, Tensor, Tensor | None]  # codes (blocks, items), scales and minimums (blocks, groups)

# Twice the values of FP4 E2M1 (OCP Microscaling Formats 1.0, 5.3.3), by code: the scale is halved for it.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def decode_floats(rows: Tensor, kind: BlockType) -> Tensor | None:
    """Returns rows of bytes (out, row bytes) uint8 as (out, in) in their own type; None if it is no plain float."""
    dtype = _FLOATS.get(kind.name)
    return None if dtype is None else rows.view(dtype)


def decode_blocks(rows: Tensor, kind: BlockType) -> AffineWeight:
    """Returns rows of blocks (out, row bytes) uint8, contiguous, as codes with scales of the same value."""
    bits, group, decode = _DECODERS[kind.name]
    codes, scales, minimums = decode(rows.view(-1, kind.size))
    out = len(rows)
    return AffineWeight(
        codes=codes.reshape(out, -1),
        scales=scales.reshape(out, -1),
        minimums=None if minimums is None else minimums.reshape(out, -1),
        bits=bits,
        group=group,
        zero=2 ** (bits - 1) if minimums is None else 0,
    )


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Returns the float16 at byte `at` of each block, as (blocks, 1) float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Returns all low nibbles, then all high ones: (blocks, 2 * bytes)."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _bits(packed: Tensor) -> Tensor:
    """Returns the bits of (blocks, bytes), lowest first: (blocks, 8 * bytes) uint8."""
    return (packed[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> _Codes:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Codes:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Tensor) -> _Codes:
    codes = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return codes + (128 - 16), _halves(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Codes:
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return codes, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> _Codes:
    return blocks[:, 2:] ^ 128, _halves(blocks, 0), None  # two's complement to a code about 128


def _quarters(packed: Tensor) -> Tensor:
    """Returns 2-bit fields (blocks, 2, 4, 32): of each half's 32 bytes all the lowest fields, then the next."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return packed.reshape(-1, 2, 1, 32) >> shifts & 3


def _q2_k(blocks: Tensor) -> _Codes:
    scales, d, dmin = blocks[:, :16], _halves(blocks, 80), _halves(blocks, 82)
    return _quarters(blocks[:, 16:80]).flatten(1), d * (scales & 15), -(dmin * (scales >> 4))


def _q3_k(blocks: Tensor) -> _Codes:
    high = (_bits(blocks[:, :32]).view(-1, 32, 8).transpose(1, 2)).reshape(-1, 2, 4, 32)  # bit 4 * half + quarter
    codes = _quarters(blocks[:, 32:96]) | high << 2
    low = _nibbles(blocks[:, 96:104])
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    upper = (blocks[:, None, 104:108] >> shifts & 3).flatten(1)
    scales = (low | upper << 4).float() - 32
    return codes.flatten(1) + (8 - 4), _halves(blocks, 108) * scales, None


def _k4_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and minimums of Q4_K and Q5_K, 8 of each in 6 bits: (blocks, 8) float32."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], dim=1)
    minimums = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], dim=1)
    return _halves(blocks, 0) * scales, -(_halves(blocks, 2) * minimums)


def _k4_codes(packed: Tensor) -> Tensor:
    """Returns (blocks, 8, 32): of each 32 bytes the low nibbles, then the high ones."""
    quarters = packed.reshape(-1, 4, 1, 32)
    return torch.cat([quarters & 15, quarters >> 4], dim=2).reshape(-1, 8, 32)


def _q4_k(blocks: Tensor) -> _Codes:
    return (_k4_codes(blocks[:, 16:]).flatten(1), *_k4_scales(blocks))


def _q5_k(blocks: Tensor) -> _Codes:
    high = _bits(blocks[:, 16:48]).view(-1, 32, 8).transpose(1, 2)
    return ((_k4_codes(blocks[:, 48:]) | high << 4).flatten(1), *_k4_scales(blocks))


def _q6_k(blocks: Tensor) -> _Codes:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], dim=2).reshape(-1, 2, 4, 32)
    codes = low | _quarters(blocks[:, 128:192]) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return codes.flatten(1) + (128 - 32), _halves(blocks, 208) * scales, None


def _looked_up(packed: Tensor, table: tuple[int, ...]) -> Tensor:
    """Returns the integers of `table` that nibbles name, as codes about 128."""
    codes = torch.tensor([value + 128 for value in table], dtype=torch.uint8)
    return codes[packed.long()]


def _iq4_nl(blocks: Tensor) -> _Codes:
    return _looked_up(_nibbles(blocks[:, 2:]), _IQ4), _halves(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> _Codes:
    eight = torch.arange(8)
    upper = blocks[:, 2:3].int() | blocks[:, 3:4].int() << 8
    low = blocks[:, 4:8].int().repeat_interleave(2, dim=1) >> eight % 2 * 4 & 15
    scales = (low | (upper >> 2 * eight & 3) << 4) - 32
    codes = _looked_up(_nibbles(blocks[:, 8:].reshape(-1, 16)), _IQ4)
    return codes, _halves(blocks, 0) * scales, None


def _mxfp4(blocks: Tensor) -> _Codes:
    # 2**(e - 128), half of an E8M0 scale; the two smallest exponents are subnormal as float32
    exponents = blocks[:, :1].int() - 128
    scales = torch.ldexp(torch.ones(exponents.shape), exponents)
    return _looked_up(_nibbles(blocks[:, 1:]), _E2M1), scales, None


_DECODERS: dict[str, tuple[int, int, Callable[[Tensor], _Codes]]] = {  # bits, columns of a scale
    "Q4_0": (4, 32, _q4_0),
    "Q4_1": (4, 32, _q4_1),
    "Q5_0": (8, 32, _q5_0),
    "Q5_1": (8, 32, _q5_1),
    "Q8_0": (8, 32, _q8_0),
    "Q2_K": (4, 16, _q2_k),
    "Q3_K": (4, 16, _q3_k),
    "Q4_K": (4, 32, _q4_k),
    "Q5_K": (8, 32, _q5_k),
    "Q6_K": (8, 16, _q6_k),
    "IQ4_NL": (8, 32, _iq4_nl),
    "IQ4_XS": (8, 32, _iq4_xs),
    "MXFP4": (8, 32, _mxfp4),
}
