"""Adapters resident for steps: a cache of slots over a host tier over files (S-LoRA, Sheng et al. 2023).

Any number of adapters is known, `slots` of them are resident. One that a sequence waits for is loaded in a thread
beside the steps, and others run meanwhile: they are preferred, as their adapters are there. The least recently used of
those that nobody uses or waits for is evicted. A sequence that has waited for `ADAPTER_WAIT_S` takes a slot whose
adapter is wanted too, in order of waiting, and preempts what runs there: so every wait ends.

Unified paging (S-LoRA): a resident adapter has blocks of the K/V pool, as many as its bytes fill, and gives them back
when it leaves. One that no running sequence uses is evicted as a cached block is, by the score of its last use. Knows
nothing of names or matrices.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from engine.core import messages as m
from engine.core.request import NO_ADAPTER, SequenceState
from engine.core.step import Row
from engine.errors import EngineError
from engine.kv_cache.block_pool import BlockPool, OutOfBlocks

ADAPTER_WAIT_S = 2.0  # before a sequence takes the slot of a used adapter, which has been resident for as long
NONE: Mapping[int, SequenceState] = MappingProxyType({})


class AdaptedModel(Protocol):
    """A model that runs adapters (`engine.model.decoder.Decoder`). Any: its adapters and sets of them are its own. An
    adapter has a `digest` of its files, and is `bare()` without its matrices."""

    def read_adapter(self, adapter: str, base: str = "") -> Any: ...

    def adapter_bytes(self, adapter: Any) -> int: ...  # that it takes while it is resident

    def with_adapters(self, adapters: Mapping[int, Any], before: Any = None) -> Any: ...

    def use_adapters(self, adapters: Any) -> None: ...


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """An adapter that sequences may use. `digest` is empty until its files are read."""

    number: int  # `SequenceState.adapter`
    path: str
    digest: str = ""
    nbytes: int = 0  # while it is resident
    pinned: bool = False  # never evicted
    blocks: Sequence[int] = ()  # of the pool, from when it gets its slot until it leaves
    running: int = 0  # sequences that run with it
    runs: int = 0  # that have begun to, since it got its slot
    score: float = 0.0  # see `eviction`, of its last use
    slot: int = NO_ADAPTER  # where it is resident, or will be
    loading: bool = False
    loaded_at: float = 0.0
    used_at: float = 0.0
    loads: int = 0
    evictions: int = 0
    prompt_tokens: int = 0  # computed


class Room(Protocol):
    """The scheduler's side of a load: blocks for the adapter of a waiting sequence."""

    def blocks_to_admit(self, seq: SequenceState) -> int:
        """Returns the blocks that its admission takes beside its adapter's."""

    def make_room(self, seq: SequenceState, *, preempting: bool) -> bool:
        """Reclaims idle K/V for it, or preempts a running sequence; False where there is nothing left to take."""

    def preempt(self, seq: SequenceState, rows: dict[int, Row]) -> int:
        """Preempts a running sequence, before any has a row in `rows`."""


class AdapterCache:
    """The resident adapters of a model, and the weights of its K/V pool. Without a model there are none."""

    def __init__(
        self,
        model: AdaptedModel | None = None,
        slots: int = 0,
        host: int | None = None,
        base: str = "",
        ageing_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots` are resident at once, and matrices of `host` are kept in memory as they were read (None: of as many).
        `base` is the model's name, and in `ageing_s` seconds a waiting sequence gains a class of priority."""
        self.slots = slots
        self.post: Callable[[m.Command], None] = lambda command: None  # to the core, from the worker
        self._model, self._base, self._ageing_s, self._clock = model, base, ageing_s, clock
        self._known: dict[int, KnownAdapter] = {}
        self._slots: dict[int, KnownAdapter] = {}  # those that are resident, or will be
        self._worker = ThreadPoolExecutor(1, "adapters")
        self._host_limit = slots if host is None else host
        self._host: OrderedDict[int, Any] = OrderedDict()  # by number; with those below the worker's own, once it runs
        self._resident: dict[int, Any] = {}  # by slot, bare
        self._set: Any = None  # the newest set of these
        self.seq_blocks = 1  # of the longest sequence
        self._pool, self._block_bytes = BlockPool(0), 0  # of which adapters have blocks; none before `share`
        self._spared: Container[int] = ()  # adapters that are not evicted for the one that is being brought
        self._reserved: dict[int, int] = {}  # blocks of sequences that others gave way to, until they run; by adapter
        self._gave_way_at = float("-inf")  # when sequences did last, or such blocks were taken after all

    def share(self, pool: BlockPool, block_bytes: int) -> None:
        """Gives resident adapters blocks of a pool from now on, before any step. Those that are resident and do not
        fit leave, pinned ones last."""
        self._pool, self._block_bytes, pool.weights = pool, block_bytes, self
        fitting = len(self._slots)
        for adapter in sorted(self._slots.values(), key=lambda each: not each.pinned):
            if self.blocks_for(adapter) <= pool.empty:
                self._enter(adapter, adapter.slot)
                adapter.loading = False
            else:
                del self._slots[adapter.slot], self._resident[adapter.slot]
                adapter.slot = NO_ADAPTER
        if len(self._slots) < fitting and self._model is not None:
            self._set = self._model.with_adapters(self._resident, self._set)
            self._model.use_adapters(self._set)

    def blocks_for(self, adapter: KnownAdapter) -> int:
        """Returns the blocks of the pool that an adapter takes while it is resident."""
        return -(-adapter.nbytes // self._block_bytes) if self._block_bytes else 0

    @property
    def largest_bytes(self) -> int:
        """Returns the bytes of the largest adapters, as many as are resident at once."""
        return sum(sorted((each.nbytes for each in self._known.values()), reverse=True)[: self.slots])

    @property
    def reserved_blocks(self) -> int:
        """Returns the blocks that no sequence can have while it runs with the largest adapter: those of this, and of
        pinned ones."""
        pinned = sum(self.blocks_for(each) for each in self._known.values() if each.pinned)
        return pinned + max((self.blocks_for(each) for each in self._known.values() if not each.pinned), default=0)

    def too_large(self, adapter: KnownAdapter) -> str:
        """Returns why an adapter that is known now has no room in the pool, beside pinned ones and a sequence of the
        greatest length, or nothing."""
        if not self._block_bytes or (over := self.reserved_blocks + self.seq_blocks - self._pool.total) <= 0:
            return ""
        needed, least = self.blocks_for(adapter), max(0, self.blocks_for(adapter) - over)

        def said(blocks: int) -> str:
            return f"{blocks} blocks ({blocks * self._block_bytes / 1e6:.3g} MB)"

        return (
            f"takes {said(needed)} of the K/V pool's {said(self._pool.total)}, of which a sequence of max_model_len "
            f"takes {self.seq_blocks}; accepted: an adapter of up to {said(least)}, a larger kv_blocks or kv_bytes, a "
            "smaller max_model_len, or fewer pinned adapters."
        )

    # -- the pool's side (`PagedWeights`)

    @property
    def evictable(self) -> int:
        """Counts the blocks of adapters that no running sequence uses."""
        return sum(len(each.blocks) for each in self._idle(self._spared))

    def lowest(self) -> float | None:
        """Returns the eviction score of the one of these that is evicted first."""
        return min((each.score for each in self._idle(self._spared) if each.blocks), default=None)

    def evict(self) -> None:
        """Evicts that one: releases its blocks, and has the worker free its memory."""
        adapter = min((each for each in self._idle(self._spared) if each.blocks), key=lambda each: each.score)
        self._worker.submit(self._vacate, self._evict(adapter))

    def stats(self) -> dict[str, int]:
        """Returns fields of `Stats`: blocks by the use of their adapters."""
        pinned = sum(len(each.blocks) for each in self._slots.values() if each.pinned)
        every, idle = (
            sum(map(len, self.tables)),
            sum(len(each.blocks) for each in self._evictable() if not each.running),
        )
        uses = {"pinned": pinned, "used": every - pinned - idle, "idle": idle}
        return {f"adapter_blocks_{use}": blocks for use, blocks in uses.items()}

    @property
    def tables(self) -> list[Sequence[int]]:
        """Returns the blocks of each resident adapter."""
        return [each.blocks for each in self._slots.values()]

    # -- known adapters

    def add(self, adapter: KnownAdapter) -> None:
        """Adds an adapter whose files were read."""
        self._known[adapter.number] = adapter

    def remove(self, adapter: KnownAdapter) -> None:
        """Frees the memory of an adapter that no sequence uses."""
        self._known.pop(adapter.number, None)
        self._reserved.pop(adapter.number, None)
        self._slots.pop(adapter.slot, None)
        self._release_blocks(adapter)
        self._worker.submit(self._drop, adapter.number, adapter.slot)

    def read(self, number: int, path: str) -> tuple[str, int]:
        """Reads an adapter to the host tier; returns the digest of its files, and its bytes while it is resident. In
        the worker, or before it runs.

        Raises:
            EngineError: see `AdaptedModel.read_adapter`.
        """
        assert self._model is not None, "a model without adapters knows none"
        adapter = self._model.read_adapter(path, self._base)
        self._host[number] = adapter
        while len(self._host) > self._host_limit:
            self._host.popitem(last=False)
        return str(adapter.digest), self._model.adapter_bytes(adapter)

    def submit(self, job: Callable[[], m.Command]) -> None:
        """Runs a job in the worker, and posts the command that it returns."""
        self._worker.submit(lambda: self.post(job()))

    def fill(self, adapter: KnownAdapter) -> None:
        """Makes an adapter resident where a slot is free, before any step. Raises EngineError."""
        if len(self._resident) < self.slots:
            self._enter(adapter, len(self._resident))
            if refused := self.take(self._bring(adapter.number, adapter.path, adapter.digest, adapter.slot)):
                raise EngineError(refused)

    def take(self, done: m.AdapterDone) -> str:
        """Takes what the worker made; returns why an adapter could not come in, or nothing. No step may be running."""
        if done.resident is not None and self._model is not None:
            self._model.use_adapters(done.resident)
        adapter = self._known.get(done.number)
        if adapter is None or not adapter.loading:
            return ""
        adapter.loading = False
        adapter.loads += not done.refused
        adapter.loaded_at = adapter.used_at = self._clock()
        adapter.score = self._pool.score(reused=False)
        if done.refused:
            del self._slots[adapter.slot]
            adapter.slot = NO_ADAPTER
            self._release_blocks(adapter)
        return done.refused

    def close(self) -> None:
        """Ends the worker."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    # -- the scheduler's side

    @property
    def loading(self) -> bool:
        """Returns whether an adapter is on its way in."""
        return any(each.loading for each in self._slots.values())

    def is_waiting(self, seq: SequenceState) -> bool:
        """Returns whether the sequence's adapter is on its way in."""
        return seq.adapter != NO_ADAPTER and self._known[seq.adapter].loading

    def place(self, seq: SequenceState) -> bool:
        """Gives a sequence the slot of its adapter, if it has one, which `left` takes back; False where that is not
        resident."""
        if seq.adapter == NO_ADAPTER:
            return True
        adapter = self._known[seq.adapter]
        if adapter.loading or adapter.slot == NO_ADAPTER:
            return False
        adapter.used_at = self._clock()
        adapter.running += 1
        seq.adapter_slot = adapter.slot
        return True

    def admitted(self, seq: SequenceState) -> None:
        """Counts a placed sequence that runs."""
        if seq.adapter != NO_ADAPTER:
            self._known[seq.adapter].runs += 1
            self._reserved.pop(seq.adapter, None)

    def left(self, seq: SequenceState) -> None:
        """Takes note that a placed sequence does not run, or no more."""
        if seq.adapter != NO_ADAPTER:
            adapter = self._known[seq.adapter]
            adapter.running -= 1
            adapter.score = self._pool.score(reused=adapter.runs > 1)

    def reserved(self, seq: SequenceState) -> int:
        """Returns the blocks that are left free for other sequences, which have waited long for their adapters."""
        return sum(blocks for number, blocks in self._reserved.items() if number != seq.adapter)

    def yield_reserved(self) -> bool:
        """Leaves these blocks, and those of the adapters, to running sequences; False where there are none."""
        if self._reserved:
            self._reserved, self._gave_way_at = {}, self._clock()
            return True
        return False

    def computed(self, row: Row) -> None:
        """Counts the tokens of a row that ran."""
        if row.seq.adapter != NO_ADAPTER and (adapter := self._known.get(row.seq.adapter)) is not None:
            adapter.prompt_tokens += row.seq.generated.count(0, row.start, row.end)

    def bring(self, seq: SequenceState) -> bool:
        """Gives a sequence that nothing runs beside the slot of its adapter; False while that is on its way in.

        Raises:
            OutOfBlocks: there is no room for it beside what sequences have.
        """
        if seq.adapter == NO_ADAPTER:
            return True
        if not (self.loading or self._known[seq.adapter].slot != NO_ADAPTER or self._begin(seq, None, ())):
            raise OutOfBlocks
        if placed := self.place(seq):
            self.left(seq)
        return placed

    def plan(self, running: Mapping[int, SequenceState], waiting: Collection[SequenceState], room: Room) -> None:
        """Begins to load the adapters that sequences wait for, as far as there are slots and blocks. For a sequence
        that has waited for `ADAPTER_WAIT_S` running ones are preempted, until its tokens have room too."""
        wanted = {seq.adapter for seq in waiting} - {NO_ADAPTER}
        self._reserved = {number: blocks for number, blocks in self._reserved.items() if number in wanted}
        if all(self._known[number].slot != NO_ADAPTER for number in wanted):
            return
        now = self._clock()
        for number in {seq.adapter for seq in running.values()} - {NO_ADAPTER}:
            self._known[number].used_at = now
        earlier: set[int] = set()
        for seq in sorted((seq for seq in waiting if seq.adapter != NO_ADAPTER), key=self._turn):
            if self._known[seq.adapter].slot == NO_ADAPTER:
                expired = now - max(_since(seq), self._gave_way_at) >= ADAPTER_WAIT_S
                if not self._begin(seq, room, earlier if expired else wanted, running, expired=expired):
                    break
            earlier.add(seq.adapter)

    # -- parts

    def _turn(self, seq: SequenceState) -> tuple[float, int]:
        return _since(seq) + self._ageing_s * seq.priority, seq.arrival

    def _begin(
        self,
        seq: SequenceState,
        room: Room | None,
        spared: Container[int],
        running: Mapping[int, SequenceState] = NONE,
        *,
        expired: bool = False,
    ) -> bool:
        """Begins to load a sequence's adapter; False where that has no slot, or too few blocks. `spared` adapters stay;
        `expired`: running sequences give way."""
        adapter, leaving = self._known[seq.adapter], None
        if len(self._slots) == self.slots:
            leaving = min(self._idle(spared), key=lambda each: each.used_at, default=None)
            if leaving is None and expired:
                leaving = self._longest(spared)
            if leaving is None:
                return False
        needed = self.blocks_for(adapter)
        kept = (*(each.number for each in self._slots.values() if each.loading or each.pinned), *self._reserved)
        staying = [each for each in self._slots.values() if each.number in kept or each.number in spared]
        reserved = self.reserved(seq)
        most = self._pool.total - sum(len(each.blocks) for each in staying) - reserved
        if needed > most:
            return False
        for other in [each for each in running.values() if leaving is not None and each.adapter == leaving.number]:
            assert room is not None, "a sequence runs"
            room.preempt(other, {})
        self._spared = spared
        try:
            tokens, before = 0, len(running)
            if room is not None:
                tokens = min(room.blocks_to_admit(seq), most - needed) if expired else 0
                while self._pool.available < needed + tokens + reserved and room.make_room(seq, preempting=expired):
                    pass
            if self._pool.available < needed + tokens + reserved:
                return False
            if len(running) < before:
                self._reserved[adapter.number], self._gave_way_at = tokens, self._clock()
            if leaving is not None:
                self._evict(leaving)
            self._enter(adapter, next(slot for slot in range(self.slots) if slot not in self._slots))
        finally:
            self._spared = ()
        self.submit(partial(self._bring, adapter.number, adapter.path, adapter.digest, adapter.slot))
        return True

    def _longest(self, spared: Container[int]) -> KnownAdapter | None:
        """Returns the used adapter that has been resident longest, if that is for long enough."""
        found = [each for each in self._evictable() if each.running and each.number not in spared]
        longest = min(found, key=lambda each: each.loaded_at, default=None)
        return None if longest is None or self._clock() - longest.loaded_at < ADAPTER_WAIT_S else longest

    def _idle(self, spared: Container[int]) -> list[KnownAdapter]:
        """Returns the adapters that may be evicted, and are used by no running sequence."""
        idle = (each for each in self._evictable() if not each.running and each.number not in self._reserved)
        return [each for each in idle if each.number not in spared]

    def _evictable(self) -> list[KnownAdapter]:
        return [each for each in self._slots.values() if not (each.loading or each.pinned)]

    def _enter(self, adapter: KnownAdapter, slot: int) -> None:
        """Gives an adapter a slot and blocks. Raises OutOfBlocks."""
        adapter.blocks = [self._pool.allocate() for _ in range(self.blocks_for(adapter))]
        adapter.slot, adapter.loading, adapter.runs = slot, True, 0
        self._slots[slot] = adapter

    def _evict(self, adapter: KnownAdapter) -> int:
        """Takes an adapter's slot and blocks."""
        slot, adapter.slot = adapter.slot, NO_ADAPTER
        del self._slots[slot]
        adapter.evictions += 1
        self._release_blocks(adapter)
        return slot

    def _release_blocks(self, adapter: KnownAdapter) -> None:
        self._pool.release(adapter.blocks)
        adapter.blocks = ()

    def _bring(self, number: int, path: str, digest: str, slot: int) -> m.AdapterDone:
        """Makes the next set, with an adapter in a slot. In the worker, or before it runs."""
        assert self._model is not None, "one is known"
        try:
            if number not in self._host and self.read(number, path)[0] != digest:
                self._host.pop(number)
                raise EngineError(f"the files in {path} are others than those that were loaded; load them again.")
            self._host.move_to_end(number)
            adapter = self._host[number]
            self._set = self._model.with_adapters({**self._resident, slot: adapter}, self._set)
        except Exception as error:  # of any kind that memory or files raise: its waiters must hear
            said = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            return m.AdapterDone(None, "", None, refused=said or type(error).__name__, number=number)
        self._resident[slot] = adapter.bare()
        return m.AdapterDone(None, "", self._set, number=number)

    def _drop(self, number: int, slot: int) -> None:
        """Forgets an adapter. In the worker."""
        self._host.pop(number, None)
        self._vacate(slot)

    def _vacate(self, slot: int) -> None:
        """Frees the memory of the adapter in a slot; it stays in the host tier. In the worker."""
        if self._resident.pop(slot, None) is not None and self._model is not None:
            self._set = self._model.with_adapters(self._resident, self._set)
            self.post(m.AdapterDone(None, "", self._set))


def _since(seq: SequenceState) -> float:
    """Returns the time from which a sequence waits for its adapter."""
    return max(seq.queued_at, seq.turned_at)
