"""Blocks on their way from a GPU to host memory: gathered by one launch, then copied while the model computes.

A gather runs at the speed of the GPU's memory and in the order of the steps, so that a block may be overwritten right
after it. What takes long, the way to the host, is on a stream of its own. Knows nothing of tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from engine.kernels.blocks import block_nbytes, gather_blocks

BYTES = 16 << 20  # of each of two buffers on the GPU: one is filled while the other is copied


class Saving:
    """For a cache given as its tensors, see `engine.kernels.blocks`. The buffers come with the first block."""

    def __init__(self, cache: Sequence[Tensor]) -> None:
        self._cache = cache
        self._stream = torch.cuda.Stream(cache[0].device)
        self._saved = torch.cuda.Event()
        self._rows = max(1, BYTES // block_nbytes(cache))
        self._halves: Iterator[tuple[Tensor, torch.cuda.Event]] | None = None

    def save(self, pairs: Sequence[tuple[int, Tensor]]) -> None:
        """Queue copies of blocks to rows of bytes, after what the current stream has been given so far.

        What that stream is given next may overwrite the blocks. The rows are page-locked, unless this may wait.
        """
        here = torch.cuda.current_stream(self._cache[0].device)
        for first in range(0, len(pairs), self._rows):
            some = pairs[first : first + self._rows]
            half, copied = self._next_half()
            here.wait_event(copied)
            gather_blocks(self._cache, [block for block, _ in some], half[: len(some)])
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                for row, (_, target) in zip(half, some, strict=False):
                    target.copy_(row, non_blocking=True)
                copied.record()
        self._saved.record(self._stream)

    def _next_half(self) -> tuple[Tensor, torch.cuda.Event]:
        """A buffer, and what tells that its last copies are done."""
        if self._halves is None:
            shape = (2, self._rows, block_nbytes(self._cache))
            halves = torch.empty(shape, dtype=torch.uint8, device=self._cache[0].device)
            self._halves = cycle([(half, torch.cuda.Event()) for half in halves])
        return next(self._halves)

    def wait(self) -> None:
        """Until all that was saved has arrived."""
        self._saved.synchronize()

    def queued(self) -> Callable[[], None]:
        """What waits, in any thread, for all that the current stream and this one have been given by now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._cache[0].device))
        done = torch.cuda.Event(blocking=True)  # a step may take long, and whoever waits for one need not spin
        done.record(self._stream)
        return done.synchronize
