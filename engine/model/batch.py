"""The model's input of one step. Plain tensors; knows nothing of requests.

Rows are ragged: every sequence's query tokens are laid end to end, `query_starts` has their offsets. A decode row has
one query token, a prefill row has a chunk of them; nothing else distinguishes the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import blocks as kernels
from engine.kernels.buffers import zeros

NULL_BLOCK = 0  # never allocated: takes the writes of tokens whose K/V is already cached


@dataclass(frozen=True, slots=True)
class Batch:
    """One ragged step.

    `token_ids`, `positions` and `slots` have shape (tokens,), int64. A slot is `block * block_size + offset`, the place
    of that token's K/V. `block_tables` is (rows, max_blocks) int64, padded with NULL_BLOCK. A query token at position p
    attends to positions 0..p of its own row's block table. `query_starts` has rows + 1 entries; `context_lens[r]` is
    the position of row r's last query token, plus one. `logits_at` indexes `token_ids`: the tokens whose logits are
    needed.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor
    logits_at: Tensor
    in_place: bool = True  # whether adjacent keys may be read in place, which is faster


class KVCache:
    """Paged keys and values of all layers in one tensor: (layers, 2, blocks, block_size, kv_heads, head_dim)."""

    in_place = True  # attention may read blocks in place

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
        self.data = zeros(layers, 2, blocks, block_size, kv_heads, head_dim, dtype=dtype, device=device)

    @property
    def like(self) -> Tensor:
        """Returns an empty tensor of the shape of a layer and the dtype of the computation."""
        return self.data[0]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def block_shape(self) -> tuple[object, ...]:
        """Returns the layout of `read_block`'s rows."""
        return (self.data.dtype, *self.data[:, :, 0].shape)

    def layers(self) -> list[Tensor]:
        """Returns each layer's (2, blocks, block_size, kv_heads, head_dim): keys, then values."""
        return list(self.data.unbind(0))

    @property
    def tensors(self) -> list[Tensor]:
        """Returns all tensors that blocks are made of, in the order of `read_block`'s rows; each (layers, 2, blocks,
        ...)."""
        return [self.data]

    @property
    def block_nbytes(self) -> int:
        """Returns the bytes of one block in all layers: of `read_block`'s row."""
        return self.data[:, :, 0].numel() * self.data.element_size()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of one layer, each (blocks, block_size, kv_heads, head_dim)."""
        return self.data[index, 0], self.data[index, 1]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks (source, destination) in every layer, as if all were read before any is written."""
        if self.data.is_cuda:
            kernels.copy_blocks(self.tensors, pairs)
        elif len(pairs) == 1:
            ((source, destination),) = pairs
            self.data[:, :, destination].copy_(self.data[:, :, source])
        elif pairs:
            sources, destinations = zip(*pairs, strict=True)
            self.data[:, :, list(destinations)] = self.data[:, :, list(sources)]

    def read_block(self, block: int, row: Tensor) -> None:
        """Copies a block's keys and values to a row of `block_nbytes` bytes on the CPU, without waiting where that is
        page-locked memory and the cache is on a GPU.
        """
        whole = self.data[:, :, block]
        row.view(self.data.dtype).view(whole.shape).copy_(whole, non_blocking=True)

    def write_block(self, block: int, row: Tensor) -> None:
        """Copies a row that `read_block` filled to a block."""
        whole = self.data[:, :, block]
        whole.copy_(row.view(self.data.dtype).view(whole.shape))
