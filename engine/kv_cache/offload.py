"""Offloads evicted blocks to host memory and disk, and loads them back.

All of it is decided in the core's thread. The device copies an evicted block to host memory before the step that
overwrites it (`saves`, then `ran`); files and copies back to the pool are the worker's, whose results `collect` takes
in. A block that is being loaded belongs to the pool already, and can be found there once loaded: a sequence that wants
it waits, and others run. Where a copy fails, its tokens are recomputed. There is no swap of preempted sequences: their
full blocks stay cached and are offloaded when evicted.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.kv_cache.block_pool import NULL_BLOCK, BlockContent, BlockPool
from engine.kv_cache.block_tensors import BlockTensors
from engine.kv_cache.disk_tier import DiskTier, is_full
from engine.kv_cache.eviction import EvictionOrder, Tier, TransferRates
from engine.kv_cache.host_tier import HostRow, HostTier
from engine.kv_cache.quantized_cache import QuantizedCache
from engine.kv_cache.snapshot import HEADER_BYTES, BadImage, layout_of
from engine.kv_cache.transfers import (
    LATER,
    SOON,
    BlockLoaded,
    BlockStore,
    BlockWritten,
    InlineWorker,
    ThreadWorker,
    Worker,
    load,
    write,
)
from engine.model.numerics import Numerics
from engine.outputs import TierStats

log = logging.getLogger(__name__)

PAUSE_S = 30.0  # without writes after a write failed
GIVEN_BACK = 16  # of a full disk's files one in so many is evicted


@dataclass(slots=True)
class TierCounters:
    """Counts since start, in blocks where nothing else is said."""

    saved: int = 0  # from the pool to host memory
    written: int = 0  # to disk
    from_host: int = 0  # back to the pool
    from_disk: int = 0
    passed_over: int = 0  # offloaded, but recomputing them was faster
    lost: int = 0  # evicted with no copy left
    bad: int = 0  # files that were damaged, cut short or of something else
    failed_writes: int = 0


class OffloadTiers:
    """Offload tiers below a pool: host memory and, where there is one, a disk of at most `files` files.

    `wake` is called from the worker's thread when there is something to collect. With `keep` host memory is a tier of
    its own; else it only stages blocks for the disk. `share`: fraction of the files that one root may have while others
    want to keep some.
    """

    def __init__(
        self,
        pool: BlockPool,
        store: BlockStore,
        host: HostTier,
        worker: Worker,
        *,
        disk: DiskTier | None = None,
        files: int = 0,
        keep: bool = True,
        share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = TierCounters()
        self.rates = TransferRates()
        self.host = host
        self.wake: Callable[[], None] = lambda: None
        self.pool = pool
        self._store = store
        self._worker = worker
        self._disk = disk
        self._max_files = files
        self._keep = keep
        self._clean_rows = max(1, host.total // 4) if keep else host.total  # rows kept replaceable
        self._clock = clock
        self._paused_until = 0.0
        self._files: dict[bytes, BlockContent] = {}
        self._order = EvictionOrder(files, share)
        self._writing: set[bytes] = set()
        self._saves: list[bytes] = []  # busy rows that the coming step fills
        self._starting: list[Callable[[Callable[[], None]], None]] = []  # loads: each takes the wait for the device
        self._loading: dict[bytes, tuple[int, set[int]]] = {}  # digest -> (block, the sequences that wait)
        self._waits: dict[int, int] = {}  # sequence -> number of blocks that it waits for
        self._done: deque[BlockWritten | BlockLoaded] = deque()
        pool.keeps_evicted = True
        if disk is not None:
            for digest, root in disk.found():
                self._keep_file(BlockContent(digest, root))

    # -- lookup

    def source(self, digest: bytes) -> Tier | None:
        """Returns the tier to load a block from; None: it is in the pool, being loaded, or nowhere."""
        if self.pool.find(digest) is not None or digest in self._loading:
            return None
        if digest in self.host and digest not in self._saves:
            return "host"
        return "disk" if digest in self._files else None

    def knows(self, digest: bytes) -> bool:
        """Returns whether the block is in the pool or a tier, or is being loaded."""
        return (
            digest in self._loading
            or digest in self._files
            or self.pool.find(digest) is not None
            or (digest in self.host and digest not in self._saves)
        )

    def is_waiting(self, sequence: int) -> bool:
        return sequence in self._waits

    def stats(self) -> TierStats:
        counters, file_bytes = self.counters, 0 if self._disk is None else self._disk.file_bytes
        return TierStats(
            host_bytes=len(self.host) * self.host.nbytes,
            host_bytes_total=self.host.total * self.host.nbytes,
            disk_bytes=len(self._files) * file_bytes,
            disk_bytes_total=self._max_files * file_bytes,
            saved_blocks=counters.saved,
            written_blocks=counters.written,
            host_hit_blocks=counters.from_host,
            disk_hit_blocks=counters.from_disk,
            passed_over_blocks=counters.passed_over,
            lost_blocks=counters.lost,
            bad_blocks=counters.bad,
            failed_writes=counters.failed_writes,
            host_bytes_per_s=self.rates.per_s("host"),
            disk_bytes_per_s=self.rates.per_s("disk"),
        )

    def held(self, digest: bytes) -> Tensor | None:
        """Returns the bytes of a block that host memory holds, while nothing is copied to or from them; else None."""
        if digest not in self.host or (row := self.host[digest]).busy:
            return None
        return self.host.row(row.slot)

    @property
    def blocks(self) -> list[int]:
        """Blocks of the pool that are being loaded: each has a reference."""
        return [block for block, _ in self._loading.values()]

    # -- offload

    def saves(self, extra: Iterable[tuple[int, BlockContent]] = ()) -> list[tuple[int, int]]:
        """Returns the (block, row) pairs to copy before the coming step: blocks that the pool evicted since, and
        `extra`."""
        pairs: list[tuple[int, int]] = []
        for block, content in (*self.pool.take_evicted(), *extra):
            digest = content.digest
            if digest in self.host or (digest in self._files and not self._keep):
                continue
            placed = self.host.place(content)
            if placed is None:
                self.counters.lost += 1
                continue
            row, lost = placed
            self.counters.lost += lost is not None
            row.dirty = digest not in self._files
            self._saves.append(digest)
            pairs.append((block, row.slot))
        return pairs

    def keep(self, blocks: Iterable[tuple[int, bytes]], root: bytes, priority: int) -> None:
        """Writes blocks, as (block, digest) pairs, to the disk as soon as possible; NULL_BLOCK is of one in the tiers
        alone. Does nothing without a disk. No step may be in flight."""
        if self._disk is None:
            return
        for block, digest in blocks:
            if digest in self._files or digest in self._writing or digest in self._saves:
                continue
            if digest in self.host:
                row = self.host.hold(digest)
            elif block == NULL_BLOCK:
                continue  # it is being loaded, or its row was taken for another
            else:
                placed = self.host.place(BlockContent(digest, root, priority, reused=True))
                if placed is None:
                    return
                row, lost = placed
                self.counters.lost += lost is not None
                self._store.save([(block, self.host.row(row.slot))])
                self.counters.saved += 1
            self._start_writing(row)

    def save(self, pairs: list[tuple[int, int]]) -> None:
        """Copies the pairs that `saves` returned. The device's part of the step comes after it."""
        self._store.save([(block, self.host.row(slot)) for block, slot in pairs])

    def ran(self) -> None:
        """Starts the writes of saved rows and the requested loads, after a step.

        A device that is scheduled ahead may still run it. A former holder of a block may be in that step, or in one
        before it: a load waits for them.
        """
        self.counters.saved += len(self._saves)
        for digest in self._saves:
            self.host.release(digest)
        self._saves.clear()
        if self._starting:
            queued = self._store.queued()
            for job in self._starting:
                self._worker.submit(SOON, partial(job, queued))
            self._starting.clear()
        self._write()

    # -- load

    def fetch(self, sequence: int, digests: Iterable[bytes]) -> None:
        """Starts loading blocks for a sequence, which waits until then. The pool has enough free blocks."""
        for digest in digests:
            if self.pool.find(digest) is not None:
                continue
            if digest not in self._loading:
                tier = self.source(digest)
                if tier is None:
                    continue
                block = self.pool.allocate()
                row = None
                if tier == "host":
                    held = self.host.hold(digest)
                    content, row = held.content, self.host.row(held.slot)
                else:
                    content = self._files[digest]
                content.reused = True
                self._loading[digest] = (block, set())
                self._starting.append(partial(self._load, content, block, row))
                if digest in self._files:
                    self._order.put(digest, group=content.root, reused=True, priority=content.priority)
            waiting = self._loading[digest][1]
            if sequence not in waiting:
                waiting.add(sequence)
                self._waits[sequence] = self._waits.get(sequence, 0) + 1

    def pass_over(self, tier: Tier) -> None:
        """Counts a block of that tier that is recomputed, since loading seemed slower."""
        self.counters.passed_over += 1
        self.rates.passed_over(tier)

    def collect(self) -> set[int] | None:
        """Takes in the worker's results. Returns the sequences for which a block was loaded; None where there was no
        result."""
        if not self._done:
            return None
        served = set[int]()
        while self._done:
            match self._done.popleft():
                case BlockWritten() as written:
                    self._take_written(written)
                case BlockLoaded() as loaded:
                    served |= self._take_loaded(loaded)
        self._write()
        return served

    def forget(self, sequence: int) -> None:
        """Ends a sequence's waits; its loads go on."""
        if self._waits.pop(sequence, None) is not None:
            for _, waiting in self._loading.values():
                waiting.discard(sequence)

    # -- the end

    def close(self, seconds: float) -> None:
        """Writes everything findable to the disk, by falling score, for so many seconds; then ends the worker.

        The core is at rest: no step runs.
        """
        self._worker.close()
        self._worker, self._paused_until = InlineWorker(), float("inf")
        self.collect()
        for digest in self._writing:
            self.host.release(digest)
        self._writing.clear()
        if self._disk is not None:
            self._keep_all(seconds)
            self._disk.close()
        self._store.saved()
        self.host.close()

    def check(self) -> None:
        """Raises AssertionError unless rows and waiting sequences add up."""
        self.host.check()
        counts: dict[int, int] = {}
        for _, waiting in self._loading.values():
            for sequence in waiting:
                counts[sequence] = counts.get(sequence, 0) + 1
        assert counts == self._waits, "a sequence waits for something else than what is coming"
        assert len(self._files) <= max(self._max_files, 0), "there are more files than there may be"

    # -- parts

    def _write(self) -> None:
        """Starts writes so that enough rows can be replaced without loss."""
        if self._disk is None or self._clock() < self._paused_until:
            return
        while self.host.replaceable + len(self._writing) < self._clean_rows:
            digest = self.host.next_dirty()
            if digest is None:
                return
            self._start_writing(self.host[digest])

    def _start_writing(self, row: HostRow) -> None:
        self._writing.add(row.content.digest)
        self._worker.submit(LATER, partial(self._write_file, row.content, self.host.row(row.slot)))

    def _write_file(self, content: BlockContent, row: Tensor) -> None:
        assert self._disk is not None
        self._finish(write(self._store, self._disk, content, row))

    def _load(self, content: BlockContent, block: int, row: Tensor | None, queued: Callable[[], None]) -> None:
        self._finish(load(self._store, self._disk, content, block, row, queued))

    def _finish(self, done: BlockWritten | BlockLoaded) -> None:
        self._done.append(done)
        self.wake()

    def _take_written(self, written: BlockWritten) -> None:
        digest = written.content.digest
        self._writing.discard(digest)
        if written.error is None:
            self.counters.written += 1
            self._keep_file(written.content)
        else:
            self.counters.failed_writes += 1
            if self._clock() >= self._paused_until:
                self._paused_until = self._clock() + PAUSE_S
                self._pause_writes(written.error)
        self.host[digest].dirty = written.error is not None
        self.host.release(digest)

    def _take_loaded(self, loaded: BlockLoaded) -> set[int]:
        content, digest = loaded.content, loaded.content.digest
        block, waiting = self._loading.pop(digest)
        if loaded.tier == "host":
            self.host.release(digest)
        if loaded.error is None:
            self.pool.publish(block, digest, content.root, content.priority, reused=True)
            self.rates.copied(loaded.tier, self.host.nbytes, loaded.seconds)
            if loaded.tier == "host":
                self.counters.from_host += 1
            else:
                self.counters.from_disk += 1
        elif loaded.tier == "disk":
            if isinstance(loaded.error, BadImage):
                self.counters.bad += 1
                log.warning("a block of the K/V cache on disk is not used, and removed: %s", loaded.error)
            self._drop_file(digest)
        self.pool.release([block])
        for sequence in waiting:
            if sequence in self._waits:
                self._waits[sequence] -= 1
                if not self._waits[sequence]:
                    del self._waits[sequence]
        return waiting

    def _keep_file(self, content: BlockContent) -> None:
        """Registers a file; removes the one with the lowest score where there are too many."""
        if content.digest not in self._files:
            self._files[content.digest] = content
        self._order.put(content.digest, group=content.root, reused=content.reused, priority=content.priority)
        while len(self._files) > self._max_files and (victim := self._order.pop()) is not None:
            self._remove(victim)

    def _drop_file(self, digest: bytes) -> None:
        if digest in self._files:
            self._order.take(digest)
            self._remove(digest)

    def _remove(self, digest: bytes) -> None:
        content = self._files.pop(digest)
        if digest not in self.host and self.pool.find(digest) is None:
            self.counters.lost += 1
        if self._disk is not None:
            self._worker.submit(LATER, partial(self._disk.remove, digest, content.root))

    def _pause_writes(self, error: Exception) -> None:
        """Pauses writing after a failed write, and evicts some files if the disk is full."""
        given = len(self._files) // GIVEN_BACK if is_full(error) else 0
        for _ in range(given):
            victim = self._order.pop()
            if victim is not None:
                self._remove(victim)
        what = f"is full, {given} blocks are given back" if is_full(error) else f"cannot be written ({error})"
        log.warning("the disk of the K/V cache %s; nothing is written to it for %.0f s", what, PAUSE_S)

    def _keep_all(self, seconds: float) -> None:
        assert self._disk is not None
        until = self._clock() + seconds
        row = self.host.data.new_empty(self.host.nbytes)
        remaining = self._max_files
        for block, content in self.pool.contents():
            if remaining <= 0 or self._clock() >= until:
                return
            remaining -= 1
            if content.digest not in self._files:
                self._store.save([(block, row)])
                self._store.saved()
                if not self._write_last(content, row):
                    return
        for digest in self.host.dirty():
            if remaining <= 0 or self._clock() >= until:
                return
            remaining -= 1
            held = self.host[digest]
            if not self._write_last(held.content, self.host.row(held.slot)):
                return

    def _write_last(self, content: BlockContent, row: Tensor) -> bool:
        assert self._disk is not None
        try:
            self._disk.write(content.digest, content.root, row.numpy().data)
        except OSError as error:
            log.warning("the K/V cache could not be kept for the next start: %s", error)
            return False
        self.counters.written += 1
        self._keep_file(content)
        return True


STAGED_BYTES = 64 << 20  # staging for a disk, where no host tier is kept
STAGED_ROWS = (8, 256)  # at least and at most


def build_offload(
    config: EngineConfig,
    model: bytes,
    numerics: Numerics,
    pool: BlockPool,
    kv: BlockTensors | QuantizedCache,
    store: BlockStore,
    device: torch.device,
    *,
    share: float = 1.0,
) -> OffloadTiers | None:
    """Builds the tiers that `config` asks for, with the blocks that an earlier engine left on the disk; None: none.
    `model` is the fingerprint of the model's files. `share`: fraction of the tiers' bytes for this pool.

    Raises:
        InvalidParameter: a tier is too small for one block, or the directory cannot be used.
    """
    if not config.kv_host_bytes and not config.kv_disk_bytes:
        return None
    nbytes = kv.block_nbytes
    files = int(share * config.kv_disk_bytes) // (HEADER_BYTES + nbytes)
    rows = int(share * config.kv_host_bytes) // nbytes if config.kv_host_bytes else _staged(nbytes)
    for name, count in (("kv_host_bytes", rows), ("kv_disk_bytes", files)):
        value = getattr(config, name)
        if value and not count:
            smallest = math.ceil((HEADER_BYTES + nbytes) / share)
            message = f"{name} is {value}; accepted: 0, or at least {smallest}, one block of this model."
            raise InvalidParameter(name, message)
    disk = None
    if files and config.kv_dir is not None:
        layout = layout_of(model, config, numerics, kv.block_shape)
        disk = DiskTier(Path(config.kv_dir), layout, nbytes)
    host = HostTier(rows, nbytes, pinned=device.type == "cuda", share=config.kv_tenant_share)
    return OffloadTiers(
        pool,
        store,
        host,
        ThreadWorker(),
        disk=disk,
        files=files,
        keep=bool(config.kv_host_bytes),
        share=config.kv_tenant_share,
    )


def _staged(nbytes: int) -> int:
    min_rows, max_rows = STAGED_ROWS
    return max(min_rows, min(max_rows, STAGED_BYTES // nbytes))
