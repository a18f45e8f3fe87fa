"""Paged K/V cache quantized to 8 or 4 bits, so that two or three times as many tokens fit as in 16.

Each token's key and value of each head has scales of its own, so later writes never change earlier tokens. In 8 bits
its largest magnitude becomes the largest code, an int8 or an fp8 number (e4m3, as in Micikevicius et al. 2022). In 4
bits each group of 32 columns has a scale and a minimum. Keys have channels of large numbers, for which KIVI (Liu et al.
2024) gives each channel of a run of tokens its scale; here they are rotated by a Hadamard matrix first (QuaRot,
Ashkboos et al. 2024), and queries alike, so scores stay as they are. K/V is quantized when it is written and
dequantized when it is gathered: attention itself computes in the model's dtype. docs/performance.md has the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from engine.kernels import blocks as kernels
from engine.kernels.buffers import zeros
from engine.kv_cache.block_tensors import copy_slots
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.layer_parts import LayerParts

Coding = Literal["int8", "fp8", "int4"]

MAX_VALUE: dict[Coding, float] = {"int8": 127.0, "fp8": 448.0}
MIN_SCALE = 1e-12  # all zeros stay so
INT4_GROUP = 32  # columns of a scale; kCodeGroup in kernels/cpu/attention.h
INT4_MAX_WIDTH = 512  # of a head; kMaxCodeWidth there
_INT4_MIN_SCALE = 2.0**-100


def head_bytes(width: int, coding: Coding) -> int:
    """Returns the bytes of one head's key or value of `width` numbers, with its scales."""
    return width // 2 + 4 * (width // INT4_GROUP) if coding == "int4" else width + torch.float32.itemsize


def rotate_head(x: Tensor) -> Tensor:
    """Multiplies float32 `x` (..., n) by the orthogonal Hadamard matrix of the largest power of two that divides n,
    block by block: its own inverse. Each pass makes sums and differences of the halves, in turn."""
    size = x.shape[-1] & -x.shape[-1]
    blocks = x.unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):
        a, b = blocks.chunk(2, -1)
        blocks = torch.stack((a + b, a - b), -1).flatten(-2)
    return blocks.flatten(-2) * size**-0.5


def encode_int4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes float32 `values` (..., n), n a multiple of 32.

    Returns:
        Codes (..., n / 2) uint8, of each group 16 bytes, byte i with column i below column i + 16; and each group's
        scale and minimum (..., n / 16) bfloat16.
    """
    groups = values.unflatten(-1, (-1, INT4_GROUP))
    least, most = groups.aminmax(dim=-1, keepdim=True)
    parameters = torch.cat((((most - least) / 15).clamp_(min=_INT4_MIN_SCALE), least), -1).bfloat16()
    scales, minimums = parameters.float().split(1, -1)
    codes = ((groups - minimums) / scales).round_().clamp_(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, -1)
    return (low | high << 4).flatten(-2), parameters.flatten(-2)


def decode_int4(codes: Tensor, parameters: Tensor) -> Tensor:
    """Returns the float32 values (..., n) of `encode_int4`'s codes and parameters."""
    groups = codes.unflatten(-1, (-1, INT4_GROUP // 2))
    scales, minimums = parameters.float().unflatten(-1, (-1, 2)).split(1, -1)
    return torch.cat((groups & 15, groups >> 4), -1).mul(scales).add_(minimums).flatten(-2)


def encode(values: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """Quantizes float32 `values` (..., n) to 8 bits. Returns codes, int8 or the bits of e4m3 as uint8, and their scales
    (...), float32."""
    largest = values.abs().amax(-1)
    # by a tensor: a GPU divides by a number as by its reciprocal, one bit off from the kernels
    scales = (largest / torch.full_like(largest, MAX_VALUE[coding])).clamp_(min=MIN_SCALE)
    scaled = values / scales.unsqueeze(-1)
    if coding == "int8":
        return scaled.round_().to(torch.int8), scales
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def plain(codes: Tensor) -> Tensor:
    """Returns the codes' values before they are scaled: as they are, or e4m3's bits as float32."""
    return codes.view(torch.float8_e4m3fn).float() if codes.dtype == torch.uint8 else codes


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """K/V of one quantized layer: codes (2, blocks, block_size, kv_heads, head_dim), scales the same without head_dim,
    float32; in 4 bits, codes and scales as in `encode_int4`."""

    codes: Tensor
    scales: Tensor

    @property
    def coding(self) -> Coding:
        if self.scales.dtype == torch.bfloat16:
            return "int4"
        return "fp8" if self.codes.dtype == torch.uint8 else "int8"

    @property
    def shape(self) -> torch.Size:
        """Returns (2, blocks, block_size, kv_heads, head_dim)."""
        shape = self.codes.shape
        return torch.Size((*shape[:-1], 2 * shape[-1])) if self.coding == "int4" else shape

    def of_queries(self, queries: Tensor) -> Tensor:
        """Returns queries (tokens, heads, head_dim) as the stored keys want them."""
        return rotate_head(queries.float()).to(queries.dtype) if self.coding == "int4" else queries

    def store(self, slots: Tensor, new: Tensor) -> None:
        """Quantizes keys and values (2, tokens, kv_heads, head_dim) into slots (tokens,)."""
        if self.coding == "int4":
            codes, scales = encode_int4(torch.stack((rotate_head(new[0].float()), new[1].float())))
        else:
            codes, scales = encode(new.float(), self.coding)
        for part, made in ((self.codes, codes), (self.scales, scales)):
            part.view(2, -1, *made.shape[2:]).index_copy_(1, slots, made)

    def gather(self, blocks: Tensor, out: Tensor) -> None:
        """Dequantizes blocks (n,), keys' then values' (counted on from the keys'), into `out`, (n, numbers of one)."""
        codes, scales = (part.flatten(0, 1).index_select(0, blocks) for part in (self.codes, self.scales))
        if self.coding == "int4":
            out.copy_(decode_int4(codes, scales).flatten(1))
        else:
            torch.mul(plain(codes), scales.unsqueeze(-1), out=out.view(codes.shape))

    def tokens(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantizes the keys and values at slots (n,): (2, n, kv_heads, head_dim) of `dtype`."""
        codes, scales = (part.flatten(1, 2)[:, slots] for part in (self.codes, self.scales))
        if self.coding == "int4":
            return decode_int4(codes, scales).to(dtype)
        return torch.mul(plain(codes), scales.unsqueeze(-1)).to(dtype)


class QuantizedCache:
    """`KVCache` quantized to 8 or 4 bits. `like` has the shape of a layer and the dtype of the computation."""

    states = None  # of recurrent layers: see KVCache
    in_place = False

    def __init__(
        self,
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        coding: Coding = "int8",
        *,
        groups: KVGroups | None = None,
    ) -> None:
        self.block_size = block_size
        self.groups = groups
        layers = layers if groups is None else groups.layers
        self._coding = coding
        heads = (layers, 2, blocks, block_size, kv_heads)
        if coding == "int4":
            self._codes = zeros(*heads, head_dim // 2, dtype=torch.uint8, device=device)
            self._scales = zeros(*heads, head_dim // INT4_GROUP * 2, dtype=torch.bfloat16, device=device)
        else:
            kind = torch.int8 if coding == "int8" else torch.uint8
            self._codes = zeros(*heads, head_dim, dtype=kind, device=device)
            self._scales = zeros(*heads, dtype=torch.float32, device=device)
        self.like = torch.empty((), dtype=dtype, device=device).expand(*heads[1:], head_dim)

    @property
    def device(self) -> torch.device:
        return self._codes.device

    @property
    def block_shape(self) -> tuple[object, ...]:
        """Returns the layout of `read_block`'s rows."""
        return (self._coding, str(self._scales.dtype).removeprefix("torch."), *self._codes[:, :, 0].shape)

    @property
    def coding(self) -> Coding:
        return self._coding

    @cached_property
    def addresses(self) -> list[int]:
        """Returns where each layer's codes of keys begin."""
        return [layer.codes.data_ptr() for layer in self.layers()]

    @cached_property
    def scale_addresses(self) -> list[int]:
        """Returns where each layer's scales of keys begin."""
        return [layer.scales.data_ptr() for layer in self.layers()]

    @property
    def tensors(self) -> list[Tensor]:
        """See `KVCache.tensors`."""
        return [self._codes, self._scales]

    @property
    def block_nbytes(self) -> int:
        return self._codes[:, :, 0].nbytes + self._scales[:, :, 0].nbytes

    def layers(self) -> list[QuantizedLayer]:
        layers = [QuantizedLayer(*each) for each in zip(self._codes.unbind(0), self._scales.unbind(0), strict=True)]
        return layers if self.groups is None else [layers[place] for place in self.groups.places]

    def layer_parts(self) -> LayerParts:
        """See `KVCache.layer_parts`: codes, then scales."""
        assert self.groups is None, "a block of a K/V group is no block of all layers"
        layers = [[each.codes, each.scales] for each in self.layers()]
        return LayerParts(layers, len(layers))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See `KVCache.copy_blocks`."""
        if self._codes.is_cuda:
            kernels.copy_blocks(self.tensors, pairs)
        elif pairs:
            sources, destinations = (list(each) for each in zip(*pairs, strict=True))
            for part in (self._codes, self._scales):
                part[:, :, destinations] = part[:, :, sources]

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KVCache.copy_slots`."""
        copy_slots(self.tensors, pairs)

    def read_block(self, block: int, row: Tensor) -> None:
        """See `KVCache.read_block`: codes, then scales."""
        self._parts(block, row, to_row=True)

    def write_block(self, block: int, row: Tensor) -> None:
        """Copies a row that `read_block` filled to a block."""
        self._parts(block, row, to_row=False)

    def _parts(self, block: int, row: Tensor, *, to_row: bool) -> None:
        at = 0
        for part in (self._codes, self._scales):
            whole = part[:, :, block]
            kept = row[at : at + whole.nbytes].view(part.dtype).view(whole.shape)
            if to_row:
                kept.copy_(whole, non_blocking=True)
            else:
                whole.copy_(kept)
            at += whole.nbytes
