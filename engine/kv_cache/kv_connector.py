"""KV connector: loads a prompt's blocks from the engine that prefills it, and serves this pool's blocks to others.

Disaggregated prefill and decode (DistServe, Zhong et al. 2024; Mooncake, Qin et al. 2024). Blocks are named by their
digests, so a peer finds only what the same tokens of the same tenant left in a pool. Both sides act in the core's
thread, beside the offload tiers and as they do: a block that is loaded belongs to the pool already, the sequence waits
and others run. Blocks are served as soon as the step that fills them has run, while later chunks of the prompt are
computed. Where a load fails or ends early, its tokens are recomputed. Knows nothing of sockets (`KVTransport`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from engine.core.request import SequenceState
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.host_tier import lock, unlock
from engine.kv_cache.snapshot import Bytes
from engine.kv_cache.transfers import BlockStore
from engine.outputs import KVTransferStats

log = logging.getLogger(__name__)

GRACE_S = 2.0  # in which a request may arrive that computes what a peer asks for
MAX_LOADS = 64  # at once; beyond them a prompt is computed here


@dataclass(slots=True, eq=False)
class BlockRequest:
    """Blocks that a peer asks for: `digests[i]` is of block number `first + i` of a prompt.

    `ready` has (digest, staging row) pairs in that order, then whether all were found.
    """

    first: int
    digests: tuple[bytes, ...]
    asked_at: float
    ready: SimpleQueue[tuple[bytes, int] | bool] = field(default_factory=SimpleQueue)
    found: int = 0  # blocks handed to the sender
    sent: int = 0  # of those, blocks that the sender is done with
    computed: bool = False  # the last one was seen in the pool
    cancelled: bool = False  # the peer is gone

    @property
    def complete(self) -> bool:
        """Returns whether all were handed to the sender."""
        return self.found == len(self.digests)


class BlockSource(Protocol):
    """The connector, as the sending side of a transport sees it. Called from the transport's threads."""

    def serve(self, first: int, digests: tuple[bytes, ...]) -> BlockRequest: ...

    def payload(self, row: int) -> memoryview:
        """Returns the bytes of a staging row, once the device has copied them."""
        ...

    def sent(self, request: BlockRequest, row: int, seconds: float) -> None:
        """Gives a staging row back. `seconds`: of sending it; 0 where that failed."""
        ...

    def release(self, request: BlockRequest) -> None:
        """Ends a request, whose peer has all of it or is gone."""
        ...

    def poke(self) -> None:
        """Has the core look whether more blocks can be sent."""
        ...

    @property
    def memory(self) -> Tensor:
        """Returns the memory of all staging rows, for a transport that registers it."""
        ...


class KVTransport(Protocol):
    """Moves block images between engines: TCP, or a transfer engine behind the same calls."""

    def listen(self, source: BlockSource) -> None:
        """Serves peers from now on."""
        ...

    def fetch(
        self, peer: tuple[str, int], first: int, digests: tuple[bytes, ...],
        arrived: Callable[[bytes, Bytes], None], ended: Callable[[str | None], None],
    ) -> Callable[[], None]:  # fmt: skip
        """Fetches blocks in order, in another thread. `arrived` gets each digest and its checked payload; `ended` why
        the rest is missing, or None. Returns a function that cancels it: `ended` comes all the same."""
        ...

    def close(self) -> None:
        """Ends all transfers and their threads."""
        ...


@dataclass(slots=True, eq=False)
class _Load:
    """Blocks on their way to the pool, each with a reference."""

    peer: tuple[str, int]
    first: int
    root: bytes
    priority: int
    blocks: dict[bytes, int]  # still to come, in order
    sequences: set[int]
    cancel: Callable[[], None] = lambda: None


class KVConnector:
    """The connector of one pool, whose blocks have `nbytes` bytes. With a `listening` transport it serves peers,
    through `rows` staging rows of host memory.

    `wake` is called from other threads when there is something to collect. `jobs` are the scheduler's sequences, which
    may still compute what a peer asks for. `offloaded` returns the bytes of a block that host memory holds, as what a
    peer asks for may have left the pool.
    """

    def __init__(
        self, pool: BlockPool, store: BlockStore, transport: KVTransport, block_size: int, nbytes: int,
        *, rows: int, listening: bool, pinned: bool = False, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.wake: Callable[[], None] = lambda: None
        self.jobs: tuple[Mapping[int, SequenceState], ...] = ()
        self.token_s: Callable[[], float | None] = lambda: None  # seconds of computing a token, if known
        self.offloaded: Callable[[bytes], Tensor | None] = lambda digest: None
        self.counters, self._counting = KVTransferStats(), threading.Lock()
        self._pool, self._store, self._transport, self._clock = pool, store, transport, clock
        self._size, self._nbytes = block_size, nbytes
        self._loads: list[_Load] = []
        self._starting: list[_Load] = []  # begin once the device no longer uses their blocks
        self._done: deque[tuple[_Load, bytes | None, str | None]] = deque()
        self._rows = torch.empty(rows if listening else 0, nbytes, dtype=torch.uint8)
        self._locked = listening and pinned and lock(self._rows)
        self._free = deque(range(len(self._rows)))
        self._asked: deque[BlockRequest] = deque()
        self._requests: list[BlockRequest] = []
        if listening:
            transport.listen(self)

    @property
    def blocks(self) -> list[int]:
        """Blocks of the pool that are being loaded: each has a reference."""
        return [block for load in self._loads for block in load.blocks.values()]

    def stats(self) -> KVTransferStats:
        with self._counting:
            return replace(self.counters)

    # -- loading, in the core's thread

    def load(self, seq: SequenceState) -> bool:
        """Starts loading the blocks that continue a sequence's K/V from the engine that prefills it, if one does; True
        when the sequence should wait for them. The pool has enough free blocks."""
        if seq.remote_prefill is None or seq.kv_len != len(seq.table) * self._size:
            return False
        if (missing := self._missing(seq)) is None:
            return True
        peer, seq.remote_prefill = seq.remote_prefill, None
        return self._begin(seq, missing, (peer.host, peer.port))

    def _missing(self, seq: SequenceState) -> list[bytes] | None:
        """Lists the blocks that continue a sequence's K/V and are not here. None: another sequence's load brings the
        first of them, and this one waits for it."""
        first, missing = len(seq.table), list[bytes]()
        for index in range(first, len(seq) // self._size):
            digest = seq.digest(index, self._size)
            if self._pool.find(digest) is not None:
                break
            if (running := next((each for each in self._loads if digest in each.blocks), None)) is not None:
                if not missing:
                    running.sequences.add(seq.id)  # a twin's: what is missing after it is asked for then
                    return None
                break
            missing.append(digest)
        return missing

    def _begin(self, seq: SequenceState, missing: list[bytes], peer: tuple[str, int]) -> bool:
        """Starts a load, as far as the pool has blocks; returns whether there is one."""
        del missing[self._pool.available :]
        if not missing or len(self._loads) >= MAX_LOADS:
            return False
        blocks = {digest: self._pool.allocate() for digest in missing}
        load = _Load(peer, len(seq.table), seq.root, seq.priority, blocks, {seq.id})
        self._loads.append(load)
        self._starting.append(load)
        return True

    def is_waiting(self, sequence: int) -> bool:
        return any(sequence in load.sequences for load in self._loads)

    def forget(self, sequence: int) -> None:
        """Ends a sequence's wait, and a load that no other sequence waits for."""
        for load in self._loads:
            if sequence in load.sequences:
                load.sequences.discard(sequence)
                if not load.sequences:
                    load.cancel()

    def collect(self) -> set[int] | None:
        """Takes in blocks that came, and hands peers those that they wait for. Returns the sequences for which a block
        was loaded or that wait no longer; None where there are none."""
        self._serve()
        if not self._done:
            return None
        served = set[int]()
        while self._done:
            load, digest, error = self._done.popleft()
            served |= load.sequences
            if digest is None:
                self._loads.remove(load)
                self._pool.release(list(load.blocks.values()))  # empty: they hold nothing that can be found
                self._count_end(load, error)
            else:
                block = load.blocks.pop(digest)
                self._pool.publish(block, digest, load.root, load.priority, reused=True)
                self._pool.release([block])
                self.counters.received_blocks += 1
                self.counters.received_bytes += self._nbytes
        return served

    def _count_end(self, load: _Load, error: str | None) -> None:
        if load.blocks and load.sequences:  # else its sequences closed
            self.counters.failed_loads += 1
            host, port = load.peer
            log.warning(
                "%d blocks of K/V did not come from %s:%d, and their tokens are computed: %s",
                len(load.blocks), host, port, error,
            )  # fmt: skip

    def ran(self) -> None:
        """Starts the requested loads and serves peers, after a step. A former holder of a block may be in that step, or
        in one before it: a load waits for them."""
        self._serve()
        if not self._starting:
            return
        starting, self._starting = self._starting, []
        queued = self._store.queued()
        for load in starting:
            load.cancel = self._fetch(load, queued)
            if not load.sequences:
                load.cancel()

    def _fetch(self, load: _Load, queued: Callable[[], None]) -> Callable[[], None]:
        blocks = dict(load.blocks)

        def arrived(digest: bytes, payload: Bytes) -> None:
            queued()
            self._store.load(blocks[digest], memoryview(payload))
            self._finish(load, digest, None)

        return self._transport.fetch(
            load.peer, load.first, tuple(blocks), arrived, lambda error: self._finish(load, None, error)
        )

    def _finish(self, load: _Load, digest: bytes | None, error: str | None) -> None:
        self._done.append((load, digest, error))
        self.wake()

    # -- serving: `serve` to `poke` are called from the transport's threads, the rest in the core's

    def serve(self, first: int, digests: tuple[bytes, ...]) -> BlockRequest:
        request = BlockRequest(first, digests, self._clock())
        self._asked.append(request)
        self.wake()
        return request

    def payload(self, row: int) -> memoryview:
        self._store.saved()
        return self._rows[row].numpy().data

    def sent(self, request: BlockRequest, row: int, seconds: float) -> None:
        request.sent += 1
        self._free.append(row)
        if seconds:
            with self._counting:
                self.counters.sent_blocks += 1
                self.counters.sent_bytes += self._nbytes
                self.counters.send_seconds += seconds
                self.counters.overlapped_seconds += 0.0 if request.computed else seconds
        if not request.complete:
            self.wake()

    def release(self, request: BlockRequest) -> None:
        request.cancelled = True
        self.wake()

    def poke(self) -> None:
        self.wake()

    @property
    def memory(self) -> Tensor:
        return self._rows

    def _serve(self) -> None:
        """Copies computed blocks that peers ask for, from the pool or host memory, to staging rows for the senders."""
        while self._asked:
            self._requests.append(self._asked.popleft())
        if not self._requests:
            return
        copies: list[tuple[int, Tensor]] = []
        ready: list[tuple[BlockRequest, bytes, int]] = []
        for request in list(self._requests):
            if request.cancelled:
                self._requests.remove(request)
                self._drain(request)
                continue
            request.computed |= self._has(request.digests[-1])
            most = max(1, len(self._rows) // len(self._requests))  # a slow peer leaves rows to others
            while not request.complete and self._free and request.found - request.sent < most:
                digest = request.digests[request.found]
                if (block := self._pool.find(digest)) is not None:
                    row = self._free.popleft()
                    copies.append((block, self._rows[row]))
                elif (held := self.offloaded(digest)) is not None:
                    row = self._free.popleft()
                    self._rows[row].copy_(held)
                else:
                    break
                ready.append((request, digest, row))
                request.found += 1
        if copies:
            self._store.save(copies)
        for request, digest, row in ready:
            request.ready.put((digest, row))
        for request in list(self._requests):
            if request.complete or not self._may_come(request):
                self._requests.remove(request)
                request.ready.put(request.complete)

    def _has(self, digest: bytes) -> bool:
        return self._pool.find(digest) is not None or self.offloaded(digest) is not None

    def _drain(self, request: BlockRequest) -> None:
        """Takes back the rows that a peer which is gone was not sent."""
        while True:
            try:
                item = request.ready.get_nowait()
            except Empty:
                return
            if not isinstance(item, bool):
                self._free.append(item[1])

    def _may_come(self, request: BlockRequest) -> bool:
        """Returns whether the next block that a peer asks for is here, or will be: the request is young, or a sequence
        computes it. One that waits for a peer itself does not: two engines would wait for each other."""
        digest, index = request.digests[request.found], request.first + request.found
        if self._clock() - request.asked_at < GRACE_S or self._has(digest):
            return True
        return any(
            index < len(seq) // self._size and seq.digest(index, self._size) == digest and not self.is_waiting(seq.id)
            for each in self.jobs
            for seq in each.values()
        )

    # -- the end

    def close(self, seconds: float) -> None:
        """Ends all transfers, and waits for their threads. The core is at rest: no step runs."""
        for load in self._loads:
            load.cancel()
        for request in (*self._asked, *self._requests):
            request.ready.put(False)
        self._transport.close()
        if self._locked:
            unlock(self._rows)

    def check(self) -> None:
        """Raises AssertionError unless each load has blocks of its own."""
        assert len(set(self.blocks)) == len(self.blocks), "two loads share a block"
