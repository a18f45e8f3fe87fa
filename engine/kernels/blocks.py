"""Copies whole blocks of a paged cache: within it, to contiguous rows of bytes, and back.

The Triton kernel and its torch references. A cache is given as its tensors, each (layers, 2 or 1, blocks, ...) and
contiguous, of any dtype: all is copied as bytes. A row has the layout of a cache's `read_block`: tensor by tensor,
(layers, 2 or 1, ...) of one block. Knows nothing of the bytes' meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.kernels.buffers import to_device

Pairs = Sequence[tuple[int, int]]


def copy_blocks(cache: Sequence[Tensor], pairs: Pairs) -> None:
    """Copies blocks (source, destination) in every layer, as if all were read before any is written.

    The scheduler's pairs need that: a block that one sequence has copied away from may be taken, in the same step, as
    the destination of another. No block is a destination twice.

    Raises:
        ValueError: a block is a destination twice.
    """
    (copy_blocks_triton if cache[0].is_cuda else copy_blocks_torch)(cache, pairs)


def gather_blocks(cache: Sequence[Tensor], blocks: Sequence[int], out: Tensor) -> None:
    """Copies blocks to the rows of `out`, (n, `block_nbytes`) uint8, contiguous, on the cache's device."""
    (gather_blocks_triton if cache[0].is_cuda else gather_blocks_torch)(cache, blocks, out)


def scatter_blocks(cache: Sequence[Tensor], blocks: Sequence[int], rows: Tensor) -> None:
    """Copies rows that `gather_blocks` filled to blocks. No block is there twice."""
    (scatter_blocks_triton if cache[0].is_cuda else scatter_blocks_torch)(cache, blocks, rows)


def block_nbytes(cache: Sequence[Tensor]) -> int:
    """Returns the bytes of one block in all layers of all tensors."""
    return sum(each[:, :, 0].nbytes for each in cache)


def _check(pairs: Pairs) -> None:
    destinations = [destination for _, destination in pairs]
    if len(set(destinations)) < len(destinations):
        raise ValueError(f"A block is a destination twice: {sorted(destinations)}")


# -- the kernel


def copy_blocks_triton(cache: Sequence[Tensor], pairs: Pairs) -> None:
    """The kernel; on CPU tensors only under Triton's interpreter. See `copy_blocks`."""
    _check(pairs)
    if not pairs:
        return
    if not {source for source, _ in pairs} & {destination for _, destination in pairs}:
        where = _on_device(pairs, cache[0])
        for each in cache:
            _launch(each, _bytes(each), _strides(each), _bytes(each), _strides(each), where)
        return
    kept = cache[0].new_empty(len(pairs), block_nbytes(cache), dtype=torch.uint8)  # rare: through other memory
    gather_blocks_triton(cache, [source for source, _ in pairs], kept)
    scatter_blocks_triton(cache, [destination for _, destination in pairs], kept)


def gather_blocks_triton(cache: Sequence[Tensor], blocks: Sequence[int], out: Tensor) -> None:
    """The kernel; on CPU tensors only under Triton's interpreter. See `gather_blocks`."""
    if blocks:
        where = _on_device([(block, row) for row, block in enumerate(blocks)], cache[0])
        for each, rows, strides in _columns(cache, out):
            _launch(each, _bytes(each), _strides(each), rows, strides, where)


def scatter_blocks_triton(cache: Sequence[Tensor], blocks: Sequence[int], rows: Tensor) -> None:
    """The kernel; on CPU tensors only under Triton's interpreter. See `scatter_blocks`."""
    if blocks:
        where = _on_device(list(enumerate(blocks)), cache[0])
        for each, mine, strides in _columns(cache, rows):
            _launch(each, mine, strides, _bytes(each), _strides(each), where)


# Bytes to the next block, and to the next part of one: from a layer's keys to its values, and on to the next layer's.
Strides = tuple[int, int]


def _launch(like: Tensor, source: Tensor, read: Strides, destination: Tensor, write: Strides, pairs: Tensor) -> None:
    """Copies blocks shaped as those of `like` in the longest words that all of them are made of."""
    from engine.kernels.gpu.blocks import PIECE, copy_kernel

    part = like[0, 0, 0].nbytes
    numbers = (part, *read, *write, source.data_ptr(), destination.data_ptr())
    dtype = next(each for each in _WORDS if not any(number % each.itemsize for number in numbers))
    word = dtype.itemsize
    grid = (len(pairs), like.shape[0] * like.shape[1], -(-part // (word * PIECE)))
    words = [_words(source, dtype), _words(destination, dtype)]
    copy_kernel[grid](
        *words, pairs, part // word, *(stride // word for stride in (*read, *write)), piece=PIECE, num_stages=1
    )


_WORDS = (torch.int64, torch.int32, torch.int8)


def _bytes(each: Tensor) -> Tensor:
    return each.view(-1).view(torch.uint8)


def _words(memory: Tensor, dtype: torch.dtype) -> Tensor:
    return memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)


def _strides(each: Tensor) -> Strides:
    return each.stride(2) * each.element_size(), each.stride(1) * each.element_size()


def _columns(cache: Sequence[Tensor], rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Strides]]:
    """Yields each tensor with the bytes of rows from the first that is its own, and their strides."""
    assert rows.is_contiguous()
    at = 0
    for each in cache:
        yield each, rows.view(-1)[at:], (rows.shape[1], each[0, 0, 0].nbytes)
        at += each[:, :, 0].nbytes


def _on_device(pairs: Pairs, like: Tensor) -> Tensor:
    return to_device(torch.tensor(pairs, dtype=torch.int32), like.device)


# -- the torch references


def copy_blocks_torch(cache: Sequence[Tensor], pairs: Pairs) -> None:
    """The torch reference. See `copy_blocks`."""
    _check(pairs)
    for each in cache:
        kept = [each[:, :, source].clone() for source, _ in pairs]
        for (_, destination), block in zip(pairs, kept, strict=True):
            each[:, :, destination] = block


def gather_blocks_torch(cache: Sequence[Tensor], blocks: Sequence[int], out: Tensor) -> None:
    """The torch reference. See `gather_blocks`."""
    for block, row in zip(blocks, out, strict=True):
        row.copy_(torch.cat([each[:, :, block].reshape(-1).view(torch.uint8) for each in cache]))


def scatter_blocks_torch(cache: Sequence[Tensor], blocks: Sequence[int], rows: Tensor) -> None:
    """The torch reference. See `scatter_blocks`."""
    for block, row in zip(blocks, rows, strict=True):
        at = 0
        for each in cache:
            whole = each[:, :, block]
            whole.copy_(row[at : at + whole.nbytes].clone().view(each.dtype).view(whole.shape))
            at += whole.nbytes
