"""KV connector to stores: saves computed blocks to them, and loads the prompts that begin with what they have.

A tier below the pool, host memory and disk, which replicas share and which outlives them (LMCache, Liu et al. 2025;
Mooncake Store, Qin et al. 2024). Loads as `KVConnector` does: a sequence waits, and others run. Blocks are saved after
the step that fills them, through staging rows; where none is free they wait in a queue of digests, and one that has
left the pool and host memory meanwhile is not saved. Knows nothing of sockets (`KVStoreClient`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from functools import partial

import torch
from torch import Tensor

from engine.config import KVTransferConfig
from engine.core.request import SequenceState
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.host_tier import lock, unlock
from engine.kv_cache.kv_connector import KVConnector, _Load
from engine.kv_cache.kv_store.client import NOT_STORED, KVStoreClient
from engine.kv_cache.transfers import LATER, LayerStore, ThreadWorker
from engine.kv_cache.transport.peer_handshake import shared_secret
from engine.outputs import KVTransferStats

log = logging.getLogger(__name__)

BATCH = 32  # blocks that are saved at once
MAX_KNOWN = 1 << 16  # blocks that are remembered as saved
MAX_QUEUED = 1 << 16  # blocks that wait for a staging row
_ANY = ("", 0)  # in the place of a peer: each block's store follows from its digest


class KVStoreConnector(KVConnector):
    """The connector of one pool to the stores of `client`. `saves`, `loads`: as its role says. `rows`: staging rows of
    host memory, for blocks on their way to stores."""

    def __init__(
        self, pool: BlockPool, store: LayerStore, client: KVStoreClient, block_size: int, nbytes: int,
        *, rows: int, saves: bool, loads: bool, pinned: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(pool, store, client, block_size, nbytes, rows=0, listening=False)
        self._client, self._saving, self._loading = client, saves, loads
        self._tried: dict[int, bytes] = {}  # by sequence: the first block that no store had
        self._staging = torch.empty(rows if saves else 0, nbytes, dtype=torch.uint8)
        self._pinned = pinned and saves and lock(self._staging)
        self._free_rows = deque(range(len(self._staging)))
        self._queued: OrderedDict[bytes, None] = OrderedDict()
        self._known: OrderedDict[bytes, None] = OrderedDict()  # on their way to a store, or there
        self._seen: dict[int, int] = {}  # by sequence: its blocks that were queued or known
        self._saved: deque[tuple[list[tuple[bytes, int]], set[bytes], int, float]] = deque()
        self._came: deque[bytes] = deque()  # from a store
        self._in_flight = 0  # batches
        self._generation = client.generation
        self._worker = ThreadWorker()

    # -- loading

    def load(self, seq: SequenceState) -> bool:
        """Starts looking for the blocks that continue a sequence's K/V; True when the sequence should wait for them.
        The pool has enough free blocks."""
        if not self._loading or not self._client.up or seq.kv_len != len(seq.table) * self._size:
            return False
        if (missing := self._missing(seq)) is None:
            return True
        if not missing or self._tried.get(seq.id) == missing[0]:
            return False
        self._tried[seq.id] = missing[0]
        token_s = self.token_s()
        if token_s is not None and self._client.seconds(len(missing)) > len(missing) * self._size * token_s:
            self._client.passed_over()
            self.counters.passed_over_blocks += len(missing)
            return False
        return self._begin(seq, missing, _ANY)

    def forget(self, sequence: int) -> None:
        super().forget(sequence)
        self._tried.pop(sequence, None)
        self._seen.pop(sequence, None)

    def _finish(self, load: _Load, digest: bytes | None, error: str | None) -> None:
        if digest is not None:
            self._came.append(digest)
        super()._finish(load, digest, error)

    def _count_end(self, load: _Load, error: str | None) -> None:
        if not load.blocks:
            return
        first = next(iter(load.blocks))
        for sequence in load.sequences:
            self._tried[sequence] = first
        for digest in load.blocks:  # a store lost it, or it is at another one now
            self._known.pop(digest, None)
        if error not in (None, NOT_STORED) and load.sequences:
            self.counters.failed_loads += 1
            log.warning("%d blocks of K/V did not come from the stores, and are computed: %s", len(load.blocks), error)

    # -- saving

    def ran(self) -> None:
        super().ran()
        if self._saving:
            self._queue_computed()
            self._save()

    def collect(self) -> set[int] | None:
        while self._came:
            self._know(self._came.popleft())
        while self._saved:
            self._take_saved(*self._saved.popleft())
        if self._queued:
            self._save()
        return super().collect()

    def _queue_computed(self) -> None:
        """Queues the blocks that running sequences have filled, and that no store is known to have."""
        if self._generation != self._client.generation:  # blocks have other places now
            self._generation = self._client.generation
            self._known.clear()
            self._seen.clear()
        if not self._client.up:
            return
        for seq in self.jobs[0].values() if self.jobs else ():
            seen, full = self._seen.get(seq.id, 0), seq.kv_len // self._size
            if seen == full:
                continue
            self._seen[seq.id] = full
            for index in range(seen, full):
                digest = seq.digest(index, self._size)
                if digest in self._known:
                    self._known.move_to_end(digest)
                elif len(self._queued) < MAX_QUEUED:
                    self._queued[digest] = None
                else:
                    self.counters.unsent_blocks += 1

    def _save(self) -> None:
        """Copies queued blocks to free staging rows, and has the worker save these."""
        copies: list[tuple[int, Tensor]] = []
        batch: list[tuple[bytes, int]] = []
        while self._queued and self._free_rows:
            digest, _ = self._queued.popitem(last=False)
            row = self._free_rows.popleft()
            if (block := self._pool.find(digest)) is not None:
                copies.append((block, self._staging[row]))
            elif (held := self.offloaded(digest)) is not None:
                self._staging[row].copy_(held)
            else:
                self._free_rows.append(row)
                self.counters.unsent_blocks += 1
                continue
            batch.append((digest, row))
            self._know(digest)
        if copies:
            self._store.save(copies)
        for part in (batch[at : at + BATCH] for at in range(0, len(batch), BATCH)):
            self._in_flight += 1
            self._worker.submit(LATER, partial(self._save_rows, part))

    def _save_rows(self, batch: list[tuple[bytes, int]]) -> None:
        began, there, put = time.perf_counter(), set[bytes](), 0
        try:
            self._store.saved()
            there, put = self._client.save([(digest, self._staging[row].numpy().data) for digest, row in batch])
        except Exception:  # of any kind: the rows must not stay busy
            log.exception("blocks could not be saved to the K/V stores")
        self._saved.append((batch, there, put, time.perf_counter() - began))
        self.wake()

    def _take_saved(self, batch: list[tuple[bytes, int]], there: set[bytes], put: int, seconds: float) -> None:
        self._in_flight -= 1
        for digest, row in batch:
            self._free_rows.append(row)
            if digest not in there:
                self._known.pop(digest, None)
        self.counters.sent_blocks += put
        self.counters.sent_bytes += put * self._nbytes
        self.counters.send_seconds += seconds
        self.counters.unsent_blocks += len(batch) - len(there)

    def _know(self, digest: bytes) -> None:
        self._known[digest] = None
        self._known.move_to_end(digest)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    # -- statistics and the end

    def stats(self) -> KVTransferStats:
        found = super().stats()
        found.lookups, found.lookup_seconds = self._client.lookups, self._client.lookup_seconds
        return found

    def close(self, seconds: float) -> None:
        """Saves what waits, for so many seconds; then ends all transfers. The core is at rest: no step runs."""
        until, pause = time.monotonic() + seconds, threading.Event()
        while (self._queued or self._in_flight) and self._client.up and time.monotonic() < until:
            self.collect()
            pause.wait(0.005)
        super().close(seconds)
        self._worker.close()
        if self._pinned:
            unlock(self._staging)

    def check(self) -> None:
        """Raises AssertionError unless each load has blocks of its own, and each row one use."""
        super().check()
        assert len(set(self._free_rows)) == len(self._free_rows) <= len(self._staging), "a row is free twice"


def build_store_connector(
    transfer: KVTransferConfig,
    layout: bytes,
    pool: BlockPool,
    store: LayerStore,
    block_size: int,
    nbytes: int,
    *,
    pinned: bool,
) -> KVStoreConnector:
    """Builds the connector to the stores that `transfer` names. One that cannot be reached is used once it can.

    Raises:
        InvalidParameter: the secret cannot be used.
    """
    client = KVStoreClient(
        transfer.store_addresses,
        shared_secret(transfer.secret_file),
        layout,
        nbytes,
        timeout_s=transfer.load_timeout_s,
        lookup_timeout_s=transfer.lookup_timeout_s,
    )
    return KVStoreConnector(
        pool,
        store,
        client,
        block_size,
        nbytes,
        rows=transfer.kv_buffer_size // nbytes,
        saves=transfer.produces,
        loads=transfer.consumes,
        pinned=pinned,
    )
