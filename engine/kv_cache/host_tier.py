"""Host tier: offloaded K/V blocks in page-locked memory outside of the pool.

A row is *free*, *dirty* (no file holds its block), *clean* (a file does), or *busy* while something is copied to or
from it. torch's own page-locked memory comes in powers of two, so a tier would take up to twice its limit: this is
ordinary memory instead, registered with the driver.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_cache.block_pool import BlockContent
from engine.kv_cache.eviction import EvictionOrder

log = logging.getLogger(__name__)


def lock(memory: Tensor) -> bool:
    """Page-locks a tensor's memory; returns False and logs where that is refused, and copies take longer. Locked memory
    has to be unlocked before it is given back."""
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        _forget_error()
        log.warning(
            "%d bytes of host memory could not be page-locked (CUDA error %d): copies of K/V hold up steps",
            memory.nbytes, code,
        )  # fmt: skip
    return not code


def unlock(memory: Tensor) -> None:
    """Unlocks memory that nothing is copied to or from any more."""
    code = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
    if code:
        _forget_error()
        log.warning("host memory could not be unlocked (CUDA error %d)", code)


def _forget_error() -> None:
    """Clears CUDA's sticky error: torch asks for it after each kernel, and that kernel would seem to fail."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


@dataclass(slots=True)
class HostRow:
    slot: int
    content: BlockContent
    dirty: bool = True
    busy: int = 0  # copies in flight


class HostTier:
    """`rows` rows of `nbytes` bytes each, page-locked where a GPU copies from them."""

    def __init__(self, rows: int, nbytes: int, *, pinned: bool = False, share: float = 1.0) -> None:
        self.total = rows
        self.nbytes = nbytes
        self.data = torch.empty(rows, nbytes, dtype=torch.uint8)
        self._unlock = weakref.finalize(self, unlock, self.data) if pinned and lock(self.data) else None
        if self._unlock is not None:
            self._unlock.atexit = False  # a process that ends gives all of it back
        self._rows: dict[bytes, HostRow] = {}
        self._free = list(range(rows))
        self._clean, self._dirty = EvictionOrder(rows, share), EvictionOrder(rows, share)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    def __getitem__(self, digest: bytes) -> HostRow:
        return self._rows[digest]

    @property
    def replaceable(self) -> int:
        """Rows that can be taken without losing anything."""
        return len(self._free) + len(self._clean)

    def row(self, slot: int) -> Tensor:
        return self.data[slot]

    def place(self, content: BlockContent) -> tuple[HostRow, BlockContent | None] | None:
        """Returns a busy row for a block, and the content lost for it; None: all rows are busy."""
        lost = None
        if not self._free:
            digest = self._clean.pop()
            if digest is None:
                digest = self._dirty.pop()
                if digest is None:
                    return None
                lost = self._rows[digest].content
            self._free.append(self._rows.pop(digest).slot)
        row = self._rows[content.digest] = HostRow(self._free.pop(), content, busy=1)
        return row, lost

    def hold(self, digest: bytes) -> HostRow:
        """Marks a row busy while it is copied from: it stays."""
        row = self._rows[digest]
        row.busy += 1
        self._clean.take(digest)
        self._dirty.take(digest)
        return row

    def release(self, digest: bytes) -> None:
        """Ends a copy to or from the row."""
        row = self._rows[digest]
        row.busy -= 1
        if not row.busy:
            order = self._dirty if row.dirty else self._clean
            content = row.content
            order.put(digest, group=content.root, reused=content.reused, priority=content.priority)

    def next_dirty(self) -> bytes | None:
        """Returns the dirty block with the lowest score, now busy."""
        digest = self._dirty.pop()
        if digest is not None:
            self._rows[digest].busy += 1
        return digest

    def dirty(self) -> list[bytes]:
        """Lists digests of idle rows that no file holds, by falling score."""
        return self._dirty.keys()

    def close(self) -> None:
        """Unlocks the memory. Nothing is copied any more, and nothing will be."""
        if self._unlock is not None:
            self._unlock()

    def check(self) -> None:
        """Raises AssertionError unless every row is in one state."""
        slots = [*self._free, *(row.slot for row in self._rows.values())]
        assert sorted(slots) == list(range(self.total)), "a row is lost or holds two blocks"
        idle = {digest for digest, row in self._rows.items() if not row.busy}
        assert idle == {*self._clean.keys(), *self._dirty.keys()}, "a row is in no order, or a busy one is"
