"""KV connector: loads a prompt's blocks from the engine that prefills it, and serves this pool's blocks to others.

Disaggregated prefill and decode (DistServe, Zhong et al. 2024; Mooncake, Qin et al. 2024). Blocks are named by their
digests, so a peer finds only what the same tokens of the same tenant left in a pool. Both sides act in the core's
thread, beside the offload tiers and as they do: a block that is loaded belongs to the pool already, the sequence waits
and others run. Blocks that a step fills are served layer by layer while it computes later layers (`save_kv_layer`, as
in vLLM); those of small chunks, and all that are in the pool already, as a whole. A block that is loaded can be found
once all of its layers have come. Where a load fails or ends early, its tokens are recomputed. Knows nothing of sockets
(`KVTransport`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty

import torch
from torch import Tensor

from engine.core.request import SequenceState
from engine.core.step import Row
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.host_tier import lock, unlock
from engine.kv_cache.transfers import LayerStore, at_once
from engine.kv_cache.transport.kv_transport import BlockFetcher, BlockFilling, BlockRequest, StagedBlocks
from engine.outputs import KVTransferStats

log = logging.getLogger(__name__)

GRACE_S = 2.0  # in which a request may arrive that computes what a peer asks for
MAX_LOADS = 64  # at once; beyond them a prompt is computed here
MIN_LAYERS_BYTES = 1 << 16  # sent at once, unless no layer follows: a payload costs about 0.1 ms besides its bytes


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
    through `rows` staging rows of host memory: chunks of at least `layerwise_tokens` layer by layer, or none where that
    is None.

    `wake` is called from other threads when there is something to collect. `jobs` are the scheduler's sequences, which
    may still compute what a peer asks for. `offloaded` returns the bytes of a block that host memory holds, as what a
    peer asks for may have left the pool.
    """

    def __init__(
        self, pool: BlockPool, store: LayerStore, transport: BlockFetcher, block_size: int, nbytes: int,
        *, rows: int, listening: bool, pinned: bool = False, layerwise_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
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
        self._over: deque[BlockRequest] = deque()
        self._layerwise_tokens = layerwise_tokens if listening else None
        self._layers, self._decoder_layers = store.parts.nbytes, store.parts.decoder_layers
        self._synchronous = store.queued() is at_once  # a layer is computed when `save_kv_layer` is called
        self._filled: dict[bytes, int] = {}  # blocks that the running step fills
        self._written = 0  # layers of them that have K/V

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
                if not load.blocks:
                    self.counters.loaded_at = self._clock()
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
        self._filled.clear()
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

        def arrived(digests: Sequence[bytes], payload: memoryview, layers: range | None = None) -> None:
            queued()
            if layers is None:
                self._store.load(blocks[digests[0]], payload)
            else:
                self._store.load_layers([blocks[each] for each in digests], layers, payload)
            if layers is None or layers.stop == len(self._layers):
                for each in digests:
                    self._finish(load, each, None)

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

    def payload(self, staged: StagedBlocks) -> memoryview:
        staged.arrived()
        return self._rows[staged.row, : staged.nbytes].numpy().data

    def sent(self, request: BlockRequest, staged: StagedBlocks, seconds: float) -> None:
        request.sent += 1
        self._free.append(staged.row)
        if seconds:
            with self._counting:
                blocks = len(staged.digests) if staged.whole else 0
                self.counters.sent_blocks += blocks
                self.counters.layerwise_blocks += 0 if staged.layers is None else blocks
                self.counters.sent_bytes += staged.nbytes
                self.counters.send_seconds += seconds
                self.counters.overlapped_seconds += 0.0 if request.computed else seconds
        if not request.complete:
            self.wake()

    def release(self, request: BlockRequest) -> None:
        self._over.append(request)
        self.wake()

    def poke(self) -> None:
        self.wake()

    @property
    def memory(self) -> Tensor:
        return self._rows

    def bind_connector_metadata(self, rows: Sequence[Row]) -> Callable[[int], None] | None:
        """Takes the blocks that the coming step fills (vLLM's name). Returns `save_kv_layer` where the step is to call
        it, None where its chunks are small."""
        self._filled, self._written = {}, 0
        if self._layerwise_tokens is None:
            return None
        for row in rows:
            if row.count >= self._layerwise_tokens and row.sampled_at is None:
                for index in range(row.seq.kv_len // self._size, row.end // self._size):
                    self._filled[row.seq.digest(index, self._size)] = row.seq.table[index]
        return self.save_kv_layer if self._filled else None

    def save_kv_layer(self, layer: int) -> None:
        """Hands peers this layer of the blocks that they ask for and the running step fills. Called in the step's
        thread, after the layer's K/V (vLLM's name; the cache and the step are known here). Where that thread is not the
        core's, the core may end sequences meanwhile, but calls `collect` and `ran` after the step."""
        self._written = layer + 1
        self._serve(running=True)

    def _serve(self, *, running: bool = False) -> None:
        """Copies computed blocks that peers ask for, from the pool or host memory, to staging rows for the senders; of
        those that a `running` step fills, the layers so far. After the step, ends requests of which no more will come.
        """
        while self._asked:
            self._requests.append(self._asked.popleft())
        while self._over:
            self._end(self._over.popleft())
        if not self._requests:
            return
        copies: list[tuple[int, Tensor]] = []
        ready: list[tuple[BlockRequest, StagedBlocks]] = []
        for request in list(self._requests):
            if not request.computed and self._is_computed(request.digests[-1]):
                request.computed = True
                self.counters.computed_at = self._clock()
            most = max(1, len(self._rows) // len(self._requests))  # a slow peer leaves rows to others
            for filling in request.filling.copy():
                ready += self._stage_layers(request, filling, most)
            while request.found < len(request.digests) and self._free and request.staged - request.sent < most:
                digest = request.digests[request.found]
                if (block := self._pool.find(digest)) is not None:
                    row = self._free.popleft()
                    copies.append((block, self._rows[row]))
                elif (held := self.offloaded(digest)) is not None:
                    row = self._free.popleft()
                    self._rows[row].copy_(held)
                elif self._written and digest in self._filled:
                    self._begin_filling(request)
                    ready += self._stage_layers(request, request.filling[-1], most)
                    continue
                else:
                    break
                ready.append((request, StagedBlocks((digest,), row, self._nbytes, arrived=self._store.saved)))
                request.found += 1
                request.staged += 1
        if copies:
            self._store.save(copies)
        for request, staged in ready:  # last: threads that begin to send would take turns with every copy above
            request.ready.put(staged)
        for request in list(self._requests):
            if request.complete or request.lost or not (running or request.filling or self._may_come(request)):
                self._requests.remove(request)
                request.ready.put(request.complete)

    def _begin_filling(self, request: BlockRequest) -> None:
        """Has the next blocks of a request sent layer by layer: as many of the running step's as a row has room for in
        any one layer."""
        first, most = request.found, self._nbytes // max(self._layers)
        end = next(
            (
                at
                for at, digest in enumerate(request.digests[first : first + most], first)
                if digest not in self._filled
            ),
            min(first + most, len(request.digests)),
        )
        digests = request.digests[first:end]
        request.filling.append(BlockFilling(first, digests, tuple(self._filled[each] for each in digests)))
        request.found = end

    def _stage_layers(
        self, request: BlockRequest, filling: BlockFilling, most: int
    ) -> Iterator[tuple[BlockRequest, StagedBlocks]]:
        """Copies layers that a request's blocks have by now to staging rows; all that are left, after their step.
        Yields each row for the sender."""
        written, last = self._written, self._decoder_layers
        blocks = dict(zip(filling.digests, filling.blocks, strict=True))
        if any(self._filled.get(digest) != block for digest, block in blocks.items()):
            written = last = len(self._layers)
            if any(self._pool.find(digest) != block for digest, block in blocks.items()):
                request.lost = True
                return
        count = len(filling.blocks)
        while filling.layers < written and self._free and request.staged - request.sent < most:
            end, nbytes = filling.layers, 0
            while end < written and nbytes + count * self._layers[end] <= self._nbytes:
                nbytes += count * self._layers[end]
                end += 1
            if not nbytes:  # layers that read the K/V of others
                filling.layers = end
            elif nbytes < MIN_LAYERS_BYTES and end == written < last:
                return
            else:
                row, layers = self._free.popleft(), range(filling.layers, end)
                arrived = self._store.save_layers(filling.blocks, layers, self._rows[row])
                filling.layers = end
                whole = end == len(self._layers)
                request.staged += 1
                yield request, StagedBlocks(filling.digests, row, nbytes, layers, whole, arrived)
        if filling.layers == len(self._layers):
            request.filling.remove(filling)

    def _is_computed(self, digest: bytes) -> bool:
        written = self._synchronous and digest in self._filled and self._written >= self._decoder_layers
        return written or self._has(digest)

    def _has(self, digest: bytes) -> bool:
        return self._pool.find(digest) is not None or self.offloaded(digest) is not None

    def _end(self, request: BlockRequest) -> None:
        """Ends a request, and takes back the rows that a peer which is gone was not sent."""
        if request in self._requests:
            self._requests.remove(request)
        while True:
            try:
                item = request.ready.get_nowait()
            except Empty:
                return
            if not isinstance(item, bool):
                self._free.append(item.row)

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
