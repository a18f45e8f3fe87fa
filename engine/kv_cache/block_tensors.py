"""Tensors of which numbered parts are copied whole: blocks of a paged cache, or slots of recurrent states.

Knows nothing of the numbers in them. Each tensor is (layers, parts, blocks, ...), contiguous, with keys and
values for two parts, or latents for one; a row of bytes has a block's part of each in turn, which is the layout that
`engine.kernels.blocks` copies on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.kernels import blocks as kernels


def copy_slots(tensors: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copies single tokens of a paged cache, slots (source, destination), as if all were read before any is written.

    Args:
        tensors: of the cache, each (layers, parts, blocks, block_size, ...); a slot is `block * block_size + offset`.
    """
    if not pairs:
        return
    sources, destinations = torch.tensor(pairs, device=tensors[0].device).unbind(1)
    for part in tensors:
        slots = part.flatten(2, 3)
        slots[:, :, destinations] = slots[:, :, sources]


class BlockTensors:
    """The tensors of one pool's blocks."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """Returns all tensors that blocks are made of, in the order of `read_block`'s rows; each (layers, parts,
        blocks, ...)."""
        return self._tensors

    @property
    def device(self) -> torch.device:
        return self._tensors[0].device

    @property
    def block_nbytes(self) -> int:
        """Returns the bytes of one block in all layers: of `read_block`'s row."""
        return sum(part[:, :, 0].nbytes for part in self._tensors)

    @property
    def block_shape(self) -> tuple[object, ...]:
        """Returns the layout of `read_block`'s rows."""
        shapes = [part[:, :, 0].shape for part in self._tensors]
        return (self._tensors[0].dtype, *shapes[0], *(size for shape in shapes[1:] for size in shape))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks (source, destination) in every layer, as if all were read before any is written."""
        if self.device.type == "cuda":
            kernels.copy_blocks(self.tensors, pairs)
        elif len(pairs) == 1:
            ((source, destination),) = pairs
            for part in self._tensors:
                part[:, :, destination].copy_(part[:, :, source])
        elif pairs:
            sources, destinations = (list(each) for each in zip(*pairs, strict=True))
            for part in self._tensors:
                part[:, :, destinations] = part[:, :, sources]

    def read_block(self, block: int, row: Tensor) -> None:
        """Copies a block to a row of `block_nbytes` bytes on the CPU, without waiting where that is page-locked memory
        and the tensors are on a GPU.
        """
        for whole, kept in self._parts(block, row):
            kept.copy_(whole, non_blocking=True)

    def write_block(self, block: int, row: Tensor) -> None:
        """Copies a row that `read_block` filled to a block."""
        for whole, kept in self._parts(block, row):
            whole.copy_(kept)

    def _parts(self, block: int, row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields a block in each tensor with its share of a row of bytes."""
        at = 0
        for part in self._tensors:
            whole = part[:, :, block]
            yield whole, row[at : at + whole.nbytes].view(part.dtype).view(whole.shape)
            at += whole.nbytes
