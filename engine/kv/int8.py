"""A paged cache that keeps keys and values in 8 bits, so that twice as many tokens fit as in 16.

Each token's key and value of each head has a scale of its own (its largest magnitude over 127), so nothing that is
written later changes what is there. Codes are made when K/V is written and turned back when it is gathered: attention
itself computes in the model's dtype. What that costs in quality is in docs/performance.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST = 1e-12  # of a scale: what is all zeros stays so


@dataclass(frozen=True, slots=True)
class Int8Layer:
    """One layer: codes (2, blocks, block_size, kv_heads, head_dim) int8, scales the same without head_dim, float32."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def store(self, slots: Tensor, new: Tensor) -> None:
        """Write keys and values (2, tokens, kv_heads, head_dim) to slots (tokens,)."""
        heads, width = new.shape[2:]
        values = new.float()
        scales = values.abs().amax(-1).div_(127).clamp_(min=_LEAST)
        codes = (values / scales.unsqueeze(-1)).round_().to(torch.int8)
        self.codes.view(2, -1, heads, width).index_copy_(1, slots, codes)
        self.scales.view(2, -1, heads).index_copy_(1, slots, scales)

    def gather(self, blocks: Tensor, out: Tensor) -> None:
        """Turn blocks (n,), keys' then values' (counted on from the keys'), back into `out`, (n, numbers of one)."""
        total, size, heads, width = self.codes.shape[1:]
        codes = self.codes.view(2 * total, -1).index_select(0, blocks)
        scales = self.scales.view(2 * total, -1).index_select(0, blocks)
        shape = (len(blocks), size, heads, width)
        torch.mul(codes.view(shape), scales.view(*shape[:3], 1), out=out.view(shape))


class Int8Cache:
    """What `KVCache` is, in 8 bits. `like` has the shape of a layer and the dtype that is computed in."""

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
    ) -> None:
        self.block_size = block_size
        self._codes = torch.zeros(layers, 2, blocks, block_size, kv_heads, head_dim, dtype=torch.int8, device=device)
        self._scales = torch.zeros(layers, 2, blocks, block_size, kv_heads, dtype=torch.float32, device=device)
        self.like = torch.empty((), dtype=dtype, device=device).expand(self._codes.shape[1:])

    @property
    def device(self) -> torch.device:
        return self._codes.device

    @property
    def block_shape(self) -> tuple[object, ...]:
        """What tells how `read_block`'s rows are laid out."""
        return ("int8", "float32", *self._codes[:, :, 0].shape)

    @property
    def block_nbytes(self) -> int:
        return self._codes[:, :, 0].nbytes + self._scales[:, :, 0].nbytes

    def layers(self) -> list[Int8Layer]:
        return [Int8Layer(*each) for each in zip(self._codes.unbind(0), self._scales.unbind(0), strict=True)]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer."""
        if pairs:
            sources, destinations = (list(each) for each in zip(*pairs, strict=True))
            for part in (self._codes, self._scales):
                part[:, :, destinations] = part[:, :, sources]

    def read_block(self, block: int, row: Tensor) -> None:
        """See `KVCache.read_block`: codes, then scales."""
        self._parts(block, row, to_row=True)

    def write_block(self, block: int, row: Tensor) -> None:
        """Copy a row that `read_block` filled to a block."""
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
