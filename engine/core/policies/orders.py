"""Scheduling policies that come with the engine, each known from other serving systems.

They differ in the order of turns and in which sequence gives way. `FairShare` is deficit round robin over tokens
(Shreedhar and Varghese 1996): tenants that want more than there is get equal shares.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator

from engine.core.policies.policy import Policy, PrefillBudget, StepGrant, each, parted
from engine.core.request import SequenceState


class PrefillFirst(Policy):
    """Prompts before decodes: answers begin soon, and then halt whenever another prompt comes."""

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        decodes, prefills = parted(running)
        yield from each(prefills)
        yield from each(sorted(waiting, key=lambda seq: (self.aged_priority(seq, now), seq.arrival)))
        yield from each(decodes)


class Arrival(Policy):
    """First come, first served, whether it runs or waits, and whatever its class."""

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        yield from each(sorted([*running, *waiting], key=lambda seq: seq.arrival))

    def victim(self, running: Collection[SequenceState], now: float) -> SequenceState:
        return max(running, key=lambda seq: seq.arrival)


class ShortestFirst(Policy):
    """Decodes, then whoever has least left to read. Waiting for `ageing_s` counts as a step's tokens fewer, so that
    a long prompt comes before all that arrive late enough.
    """

    def __init__(self, ageing_s: float, chunks: PrefillBudget, most: int) -> None:
        super().__init__(ageing_s, chunks)
        self._most = most

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        def left(seq: SequenceState) -> tuple[float, int]:
            return seq.remaining - self._most * (now - seq.queued_at) / self._ageing_s, seq.arrival

        decodes, prefills = parted(running)
        yield from each(decodes)
        yield from each(sorted([*prefills, *waiting], key=left))


class PriorityClasses(Policy):
    """By class throughout: a sequence of a better class takes the place of one of a worse class that runs.

    Age lifts whatever is not done, whether it waits or runs, so a low class is delayed and never starved: what comes
    later than its class is worth can neither overtake it nor send it away.
    """

    makes_way = True

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        decodes, prefills = parted(running)
        yield from each(sorted(decodes, key=lambda seq: self._standing(seq, now)))
        yield from each(sorted([*prefills, *waiting], key=lambda seq: self._standing(seq, now)))

    def gives_way(self, running: Collection[SequenceState], seq: SequenceState, now: float) -> SequenceState | None:
        worst = max(running, key=lambda other: self._standing(other, now), default=None)
        return worst if worst is not None and self.aged_priority(worst, now) > self.aged_priority(seq, now) else None

    def victim(self, running: Collection[SequenceState], now: float) -> SequenceState:
        return max(running, key=lambda seq: self._standing(seq, now))

    def _standing(self, seq: SequenceState, now: float) -> tuple[int, int]:
        return self.aged_priority(seq, now), seq.arrival


class FairShare(Policy):
    """Decodes first, and charged to their tenants; what is left of a step goes round among the tenants that want it.

    In each round a tenant's account grows by a quantum, and it may read for what it holds. A tenant that has nothing to
    do loses its account: nobody saves up. Each tenant may have its share of a batch's places, and one that has more
    gives up a place for another that has less.
    """

    makes_way = True

    def __init__(self, ageing_s: float, chunks: PrefillBudget, quantum: int, places: int) -> None:
        """`quantum`: tokens of a round; `places`: of a batch."""
        super().__init__(ageing_s, chunks)
        self._quantum = quantum
        self._places = places
        self._accounts: dict[str, float] = {}
        self._ring: deque[str] = deque()
        self._wanting: set[str] = set()
        self._used = 0

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        decodes, prefills = parted(running)
        queues: dict[str, deque[SequenceState]] = defaultdict(deque)
        for seq in prefills:
            queues[seq.tenant].append(seq)
        for seq in sorted(waiting, key=lambda seq: (self.aged_priority(seq, now), seq.arrival)):
            queues[seq.tenant].append(seq)
        self._keep({seq.tenant for seq in running} | set(queues))
        yield from each(decodes)
        granted: dict[int, int] = defaultdict(int)
        while queues:
            tenant = self._ring[0]
            self._ring.rotate(-1)
            queue = queues.get(tenant)
            if queue is None:
                continue
            self._accounts[tenant] += self._quantum
            while queue and (most := int(self._accounts[tenant])) > 0:
                seq, self._used = queue[0], 0
                yield StepGrant(seq, most)
                granted[seq.id] += self._used
                if self._used == 0 or granted[seq.id] >= seq.remaining:
                    queue.popleft()
            if not queue:
                del queues[tenant]

    def charged(self, seq: SequenceState, tokens: int) -> None:
        self._used += tokens
        if seq.tenant in self._accounts:
            self._accounts[seq.tenant] -= tokens

    def gives_way(self, running: Collection[SequenceState], seq: SequenceState, now: float) -> SequenceState | None:
        held = defaultdict[str, int](int)
        for other in running:
            held[other.tenant] += 1
        share = self._places // max(1, len(self._wanting))
        if held[seq.tenant] >= share:
            return None
        greedy = [other for other in running if held[other.tenant] > share]
        return self.victim(greedy, now) if greedy else None

    def _keep(self, tenants: set[str]) -> None:
        """The accounts are those of the tenants that have something to do."""
        self._wanting = tenants
        if tenants != self._accounts.keys():
            self._accounts = {tenant: self._accounts.get(tenant, 0.0) for tenant in tenants}
            self._ring = deque(tenant for tenant in self._ring if tenant in tenants)
            self._ring.extend(sorted(tenants - set(self._ring)))


class Exclusive(Policy):
    """A step reads prompts or writes answers, never both: whoever writes halts while anybody reads."""

    def __init__(self, ageing_s: float, chunks: PrefillBudget) -> None:
        super().__init__(ageing_s, chunks)
        self._read = 0

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        decodes, prefills = parted(running)
        self._read = 0
        yield from each(prefills)
        yield from each(self._line(waiting, now))
        if self._read == 0:
            self._closed(running)
            yield from each(decodes)

    def charged(self, seq: SequenceState, tokens: int) -> None:
        self._read += tokens

    def _line(self, waiting: Collection[SequenceState], now: float) -> list[SequenceState]:
        """Returns the sequences that may join, in order."""
        return sorted(waiting, key=lambda seq: (self.aged_priority(seq, now), seq.arrival))

    def _closed(self, running: Collection[SequenceState]) -> None:
        """Nobody else joins in this step."""


class Static(Exclusive):
    """A batch is what waits when nothing runs, and nobody joins it until all of it is done.

    What is done costs nothing more, where padded batches go on computing it: a comparison with this flatters them.
    """

    def __init__(self, ageing_s: float, chunks: PrefillBudget, places: int) -> None:
        """`places`: sequences of a batch."""
        super().__init__(ageing_s, chunks)
        self._places = places
        self._batch: set[int] = set()

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        self._batch &= {seq.id for seq in (*running, *waiting)}
        if not self._batch:
            self._batch = {seq.id for seq in super()._line(waiting, now)[: self._places]}
        yield from super().turns(running, waiting, now)

    def _line(self, waiting: Collection[SequenceState], now: float) -> list[SequenceState]:
        return [seq for seq in super()._line(waiting, now) if seq.id in self._batch]

    def _closed(self, running: Collection[SequenceState]) -> None:
        self._batch = {seq.id for seq in running}  # for the others there was no room: they are the next batch
