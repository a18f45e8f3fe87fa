"""Copies blocks between the pool and the offload tiers in a worker thread.

No step ever waits for a file. Every copy reports its outcome, errors included.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.kv_cache.block_pool import BlockContent
from engine.kv_cache.disk_tier import DiskTier
from engine.kv_cache.eviction import Tier
from engine.kv_cache.layer_parts import LayerParts
from engine.kv_cache.snapshot import BadImage

log = logging.getLogger(__name__)


class BlockStore(Protocol):
    """The device's side of a copy."""

    def save(self, pairs: list[tuple[int, Tensor]]) -> None:
        """Copies blocks to rows of host memory: (block, row of bytes) pairs. Called before a step runs."""
        ...

    def saved(self) -> None:
        """Waits until the saved blocks have arrived. Called from the worker."""
        ...

    def load(self, block: int, payload: Tensor | memoryview) -> None:
        """Writes a block, and waits until that is done. Called from the worker."""
        ...

    def queued(self) -> Callable[[], None]:
        """Returns a wait, for any thread, until the device has finished everything queued by now, `save` included:
        `at_once` where the device is synchronous. Called in the thread that steps."""
        ...


class LayerStore(BlockStore, Protocol):
    """The device's side where layers of blocks are copied, too."""

    @property
    def parts(self) -> LayerParts: ...

    def save_layers(self, blocks: Sequence[int], layers: range, row: Tensor) -> Callable[[], None]:
        """Copies layers of blocks, as `LayerParts.read`, to a row of host memory. Called while a step runs, in its
        thread, once their K/V is written or queued to be. Returns a wait, for any thread, until the copy has come."""
        ...

    def load_layers(self, blocks: Sequence[int], layers: range, payload: memoryview) -> None:
        """Writes layers of blocks, and waits until that is done. Called from the worker."""
        ...


def at_once() -> None:
    """Waits for nothing: the copy is done at once."""


@dataclass(frozen=True, slots=True)
class BlockWritten:
    content: BlockContent
    error: Exception | None


@dataclass(frozen=True, slots=True)
class BlockLoaded:
    """The outcome of loading a block from a tier."""

    content: BlockContent
    block: int
    tier: Tier
    seconds: float
    error: Exception | None


def write(store: BlockStore, disk: DiskTier, content: BlockContent, row: Tensor) -> BlockWritten:
    """Writes a row of host memory to a file."""
    try:
        store.saved()
        disk.write(content.digest, content.root, row.numpy().data)
    except OSError as error:
        return BlockWritten(content, error)
    except Exception as error:  # of any kind: the row must not stay busy
        log.exception("a block could not be written")
        return BlockWritten(content, error)
    return BlockWritten(content, None)


def load(
    store: BlockStore,
    disk: DiskTier | None,
    content: BlockContent,
    block: int,
    row: Tensor | None,
    queued: Callable[[], None],
) -> BlockLoaded:
    """Loads a block of the pool from a row of host memory or, without one, from the disk.

    `queued` waits for steps that may still use the block, or fill the row. That wait is not counted in the copy's
    seconds.
    """
    tier: Tier = "disk" if row is None else "host"
    began, waited = time.perf_counter(), 0.0
    error: Exception | None = None
    try:
        payload: Tensor | memoryview
        if row is None:
            assert disk is not None
            payload = disk.read(content.digest, content.root, bytearray(disk.file_bytes))
        else:
            payload = row
        waits = time.perf_counter()
        queued()
        waited = time.perf_counter() - waits
        store.load(block, payload)
    except (BadImage, OSError) as failure:
        error = failure
    except Exception as failure:  # of any kind: no sequence may wait for ever
        log.exception("a block could not be copied from %s", tier)
        error = failure
    return BlockLoaded(content, block, tier, time.perf_counter() - began - waited, error)


SOON, LATER = 0, 2  # loads, which sequences wait for; writes, which nothing waits for
_END = 1


class Worker(Protocol):
    """Runs jobs in another thread, urgent ones first, else in order."""

    def submit(self, urgency: int, job: Callable[[], None]) -> None: ...

    def close(self) -> None:
        """Runs the jobs that something waits for, and ends. Other jobs may be left undone."""
        ...


class InlineWorker:
    """Runs a job at once, in the thread that asks for it."""

    def submit(self, urgency: int, job: Callable[[], None]) -> None:
        job()

    def close(self) -> None:
        pass


class ThreadWorker:
    """One daemon thread."""

    def __init__(self) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._thread.start()

    def submit(self, urgency: int, job: Callable[[], None]) -> None:
        self._jobs.put((urgency, next(self._numbers), job))

    def close(self) -> None:
        self._jobs.put((_END, next(self._numbers), self._end))
        self._thread.join()

    def _run(self) -> None:
        while True:
            _, _, job = self._jobs.get()
            if job == self._end:
                return
            try:
                job()
            except Exception:
                log.exception("a copy between K/V tiers failed")

    def _end(self) -> None:
        """Marks the end of the queue; never called."""
