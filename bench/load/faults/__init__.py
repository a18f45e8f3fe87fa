"""Faults at random moments under load, each kind fifty times: whether the guarantees were kept, and how long recovery
took.
"""

from collections.abc import Callable

from bench.load.faults import processes, storage
from bench.parts import Json

PARTS: dict[str, Callable[[], Json]] = {
    "the engine is killed": processes.engine_killed,
    "a worker is killed": processes.worker_killed,
    "clients go away": processes.clients_gone,
    "the disk is full": storage.disk_full,
    "the pool is full": storage.pool_full,
    "K/V on disk is damaged": storage.blocks_damaged,
    "snapshots are damaged": storage.snapshots_damaged,
}
