"""Adapters resident for steps: a cache of slots over a host tier over files (S-LoRA, Sheng et al. 2023).

Any number of adapters is known, `slots` of them are resident. One that a sequence waits for is loaded in a thread
beside the steps, and others run meanwhile: they are preferred, as their adapters are there. The least recently used of
those that nobody uses or waits for is evicted. A sequence that has waited for `ADAPTER_WAIT_S` takes a slot whose
adapter is wanted too, in order of waiting, and preempts what runs there: so every wait ends. Knows nothing of names
or matrices.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from engine.core import messages as m
from engine.core.request import NO_ADAPTER, SequenceState
from engine.core.step import Row
from engine.errors import EngineError

ADAPTER_WAIT_S = 2.0  # before a sequence takes the slot of a used adapter, which has been resident for as long


class AdaptedModel(Protocol):
    """A model that runs adapters (`engine.model.decoder.Decoder`). Any: its adapters and sets of them are its own. An
    adapter has a `digest` of its files, and is `bare()` without its matrices."""

    def read_adapter(self, adapter: str, base: str = "") -> Any: ...

    def with_adapters(self, adapters: Mapping[int, Any], before: Any = None) -> Any: ...

    def use_adapters(self, adapters: Any) -> None: ...


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """An adapter that sequences may use. `digest` is empty until its files are read."""

    number: int  # `SequenceState.adapter`
    path: str
    digest: str = ""
    pinned: bool = False  # never evicted
    slot: int = NO_ADAPTER  # where it is resident, or will be
    loading: bool = False
    loaded_at: float = 0.0
    used_at: float = 0.0
    loads: int = 0
    evictions: int = 0
    prompt_tokens: int = 0  # computed


class AdapterCache:
    """The resident adapters of a model. Without a model there are none."""

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

    # -- known adapters

    def add(self, adapter: KnownAdapter) -> None:
        """Adds an adapter whose files were read."""
        self._known[adapter.number] = adapter

    def remove(self, adapter: KnownAdapter) -> None:
        """Frees the memory of an adapter that no sequence uses."""
        self._known.pop(adapter.number, None)
        self._slots.pop(adapter.slot, None)
        self._worker.submit(self._drop, adapter.number, adapter.slot)

    def read(self, number: int, path: str) -> str:
        """Reads an adapter to the host tier; returns the digest of its files. In the worker, or before it runs.

        Raises:
            EngineError: see `AdaptedModel.read_adapter`.
        """
        assert self._model is not None, "a model without adapters knows none"
        adapter = self._model.read_adapter(path, self._base)
        self._host[number] = adapter
        while len(self._host) > self._host_limit:
            self._host.popitem(last=False)
        return str(adapter.digest)

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
        if done.refused:
            del self._slots[adapter.slot]
            adapter.slot = NO_ADAPTER
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
        """Gives a sequence the slot of its adapter, if it has one; False where that is not resident."""
        if seq.adapter == NO_ADAPTER:
            return True
        adapter = self._known[seq.adapter]
        if adapter.loading or adapter.slot == NO_ADAPTER:
            return False
        adapter.used_at = self._clock()
        seq.adapter_slot = adapter.slot
        return True

    def computed(self, row: Row) -> None:
        """Counts the tokens of a row that ran."""
        if row.seq.adapter != NO_ADAPTER and (adapter := self._known.get(row.seq.adapter)) is not None:
            adapter.prompt_tokens += row.seq.generated.count(0, row.start, row.end)

    def bring(self, seq: SequenceState) -> bool:
        """Gives a sequence that nothing runs beside the slot of its adapter, or begins to load it; False for that."""
        self.plan((), (seq,))
        return self.place(seq)

    def plan(self, running: Collection[SequenceState], waiting: Collection[SequenceState]) -> list[SequenceState]:
        """Begins to load the adapters that sequences wait for, as far as there are slots. Returns the running sequences
        that have to be preempted for that."""
        wanted = {seq.adapter for seq in waiting} - {NO_ADAPTER}
        if all(self._known[number].slot != NO_ADAPTER for number in wanted):
            return []
        now, preempted = self._clock(), list[SequenceState]()
        used = {seq.adapter for seq in running} - {NO_ADAPTER}
        for number in used:
            self._known[number].used_at = now
        earlier: set[int] = set()
        for seq in sorted((seq for seq in waiting if seq.adapter != NO_ADAPTER), key=self._turn):
            adapter = self._known[seq.adapter]
            if adapter.slot == NO_ADAPTER:
                expired = now - _since(seq) >= ADAPTER_WAIT_S
                slot = self._slot(used | (earlier if expired else wanted))
                if slot is None and expired and (victim := self._longest(used - earlier, now)) is not None:
                    for other in (each for each in running if each.adapter == victim.number):
                        other.turned_at = now
                        preempted.append(other)
                    used.discard(victim.number)
                    slot = self._evict(victim)
                if slot is None:
                    break
                self._enter(adapter, slot)
                self.submit(partial(self._bring, adapter.number, adapter.path, adapter.digest, slot))
            earlier.add(seq.adapter)
        return preempted

    # -- parts

    def _turn(self, seq: SequenceState) -> tuple[float, int]:
        return _since(seq) + self._ageing_s * seq.priority, seq.arrival

    def _slot(self, kept: Container[int]) -> int | None:
        """Returns a free slot, or that of the least recently used adapter that is not `kept`; None: there is none."""
        if len(self._slots) < self.slots:
            return next(slot for slot in range(self.slots) if slot not in self._slots)
        others = [each for each in self._evictable() if each.number not in kept]
        return self._evict(min(others, key=lambda each: each.used_at)) if others else None

    def _longest(self, numbers: Container[int], now: float) -> KnownAdapter | None:
        """Returns the one of these that has been resident longest, if that is for long enough."""
        found = [each for each in self._evictable() if each.number in numbers]
        longest = min(found, key=lambda each: each.loaded_at, default=None)
        return None if longest is None or now - longest.loaded_at < ADAPTER_WAIT_S else longest

    def _evictable(self) -> list[KnownAdapter]:
        return [each for each in self._slots.values() if not (each.loading or each.pinned)]

    def _enter(self, adapter: KnownAdapter, slot: int) -> None:
        adapter.slot, adapter.loading = slot, True
        self._slots[slot] = adapter

    def _evict(self, adapter: KnownAdapter) -> int:
        slot, adapter.slot = adapter.slot, NO_ADAPTER
        del self._slots[slot]
        adapter.evictions += 1
        return slot

    def _bring(self, number: int, path: str, digest: str, slot: int) -> m.AdapterDone:
        """Makes the next set, with an adapter in a slot. In the worker, or before it runs."""
        assert self._model is not None, "one is known"
        try:
            if number not in self._host and self.read(number, path) != digest:
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
        """In the worker."""
        self._host.pop(number, None)
        if self._resident.pop(slot, None) is not None and self._model is not None:
            self._set = self._model.with_adapters(self._resident, self._set)
            self.post(m.AdapterDone(None, "", self._set))


def _since(seq: SequenceState) -> float:
    """Returns the time from which a sequence waits for its adapter."""
    return max(seq.queued_at, seq.turned_at)
