"""Paged K/V cache quantized to 8 bits, so that twice as many tokens fit as in 16.

Each token's key and value of each head has a scale of its own, by which its largest magnitude becomes the largest code,
so later writes never change earlier tokens. A code is an int8 or an fp8 number (e4m3, as in Micikevicius et al. 2022).
K/V is quantized when it is written and dequantized when it is gathered: attention itself computes in the model's dtype.
docs/performance.md has the cost in quality.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.kernels import blocks as kernels

Coding = Literal["int8", "fp8"]

MAX_VALUE: dict[Coding, float] = {"int8": 127.0, "fp8": 448.0}
MIN_SCALE = 1e-12  # all zeros stay so


def encode(values: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """Quantizes float32 `values` (..., n). Returns codes, int8 or the bits of e4m3 as uint8, and their scales (...),
    float32."""
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
    float32."""

    codes: Tensor
    scales: Tensor

    @property
    def coding(self) -> Coding:
        return "fp8" if self.codes.dtype == torch.uint8 else "int8"

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def store(self, slots: Tensor, new: Tensor) -> None:
        """Quantizes keys and values (2, tokens, kv_heads, head_dim) into slots (tokens,)."""
        heads, width = new.shape[2:]
        codes, scales = encode(new.float(), self.coding)
        self.codes.view(2, -1, heads, width).index_copy_(1, slots, codes)
        self.scales.view(2, -1, heads).index_copy_(1, slots, scales)

    def gather(self, blocks: Tensor, out: Tensor) -> None:
        """Dequantizes blocks (n,), keys' then values' (counted on from the keys'), into `out`, (n, numbers of one)."""
        total, size, heads, width = self.codes.shape[1:]
        codes = self.codes.view(2 * total, -1).index_select(0, blocks)
        scales = self.scales.view(2 * total, -1).index_select(0, blocks)
        shape = (len(blocks), size, heads, width)
        torch.mul(plain(codes).view(shape), scales.view(*shape[:3], 1), out=out.view(shape))


class QuantizedCache:
    """`KVCache` quantized to 8 bits. `like` has the shape of a layer and the dtype of the computation."""

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
    ) -> None:
        self.block_size = block_size
        self._coding = coding
        kind = torch.int8 if coding == "int8" else torch.uint8
        self._codes = torch.zeros(layers, 2, blocks, block_size, kv_heads, head_dim, dtype=kind, device=device)
        self._scales = torch.zeros(layers, 2, blocks, block_size, kv_heads, dtype=torch.float32, device=device)
        self.like = torch.empty((), dtype=dtype, device=device).expand(self._codes.shape[1:])

    @property
    def device(self) -> torch.device:
        return self._codes.device

    @property
    def block_shape(self) -> tuple[object, ...]:
        """Returns the layout of `read_block`'s rows."""
        return (self._coding, "float32", *self._codes[:, :, 0].shape)

    @property
    def tensors(self) -> list[Tensor]:
        """See `KVCache.tensors`."""
        return [self._codes, self._scales]

    @property
    def block_nbytes(self) -> int:
        return self._codes[:, :, 0].nbytes + self._scales[:, :, 0].nbytes

    def layers(self) -> list[QuantizedLayer]:
        return [QuantizedLayer(*each) for each in zip(self._codes.unbind(0), self._scales.unbind(0), strict=True)]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See `KVCache.copy_blocks`."""
        if self._codes.is_cuda:
            kernels.copy_blocks(self.tensors, pairs)
        elif pairs:
            sources, destinations = (list(each) for each in zip(*pairs, strict=True))
            for part in (self._codes, self._scales):
                part[:, :, destinations] = part[:, :, sources]

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
