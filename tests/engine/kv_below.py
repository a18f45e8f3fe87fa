"""Tiers below a pool for tests: a worker that works when it is told to, and a disk that can be full."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.disk_tier import DiskTier
from engine.kv_cache.eviction import Tier, TransferRates
from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.offload import OffloadTiers
from engine.kv_cache.snapshot import Bytes
from tests.engine.fake import FakeRunner, FakeStates

LAYOUT = b"a layout of test"


class Told:
    """A worker of which a test says when it works, and in which order its jobs end."""

    def __init__(self) -> None:
        self.jobs: list[tuple[int, Callable[[], None]]] = []

    def submit(self, urgency: int, job: Callable[[], None]) -> None:
        self.jobs.append((urgency, job))

    def work(self, count: int | None = None) -> None:
        """Do so many jobs, those that are wanted soon first; all of them unless told."""
        for _ in range(len(self.jobs) if count is None else count):
            if self.jobs:
                self.jobs.sort(key=lambda each: each[0])
                self.jobs.pop(0)[1]()

    def close(self) -> None:
        while self.jobs:
            self.work()


class Eager(TransferRates):
    """Copying always seems faster than computing."""

    def seconds(self, tier: Tier, nbytes: int) -> float:
        return -1.0


class Disk(DiskTier):
    """A disk that is full when `full` says so."""

    full = False

    def write(self, digest: bytes, root: bytes, payload: Bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(digest, root, payload)

    def files(self) -> list[Path]:
        return sorted(path for path in self._directory.glob("*/*") if path.is_file())


def tiers_below(
    pool: BlockPool,
    runner: FakeRunner | FakeStates,
    worker: Told,
    rows: int,
    *,
    keep: bool = True,
    directory: Path | None = None,
    files: int = 0,
    clock: Callable[[], float] = lambda: 0.0,
) -> tuple[OffloadTiers, Disk | None]:
    disk = None if directory is None else Disk(directory, LAYOUT, runner.block_nbytes)
    host = HostTier(rows, runner.block_nbytes)
    tiers = OffloadTiers(pool, runner, host, worker, disk=disk, files=files, keep=keep, clock=clock)
    tiers.rates = Eager()
    return tiers, disk
