"""Scheduling policies that come with the engine, each known from other serving systems.

They differ in the order of turns and in the sequence to preempt. `FairShare` is deficit round robin over tokens
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
    """First come, first served: running and waiting sequences alike, of any class."""

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        yield from each(sorted([*running, *waiting], key=lambda seq: seq.arrival))

    def victim(self, running: Collection[SequenceState], now: float) -> SequenceState:
        return max(running, key=lambda seq: seq.arrival)


class ShortestFirst(Policy):
    """Decodes, then the prefill with the fewest remaining tokens. Waiting for `ageing_s` counts as a step's tokens
    fewer, so that a long prompt comes before all that arrive late enough."""

    def __init__(self, ageing_s: float, chunks: PrefillBudget, max_tokens: int) -> None:
        super().__init__(ageing_s, chunks)
        self._max_tokens = max_tokens

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        def left(seq: SequenceState) -> tuple[float, int]:
            return seq.remaining - self._max_tokens * (now - seq.queued_at) / self._ageing_s, seq.arrival

        decodes, prefills = parted(running)
        yield from each(decodes)
        yield from each(sorted([*prefills, *waiting], key=left))


class PriorityClasses(Policy):
    """By class throughout: a waiting sequence preempts a running one of a worse class.

    Ageing raises every unfinished sequence, waiting or running, so a low class is delayed and never starved: a sequence
    that arrives late enough can neither overtake nor preempt it.
    """

    preempts = True

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        decodes, prefills = parted(running)
        yield from each(sorted(decodes, key=lambda seq: self._standing(seq, now)))
        yield from each(sorted([*prefills, *waiting], key=lambda seq: self._standing(seq, now)))

    def victim_for(self, running: Collection[SequenceState], seq: SequenceState, now: float) -> SequenceState | None:
        worst = max(running, key=lambda other: self._standing(other, now), default=None)
        return worst if worst is not None and self.aged_priority(worst, now) > self.aged_priority(seq, now) else None

    def victim(self, running: Collection[SequenceState], now: float) -> SequenceState:
        return max(running, key=lambda seq: self._standing(seq, now))

    def _standing(self, seq: SequenceState, now: float) -> tuple[int, int]:
        return self.aged_priority(seq, now), seq.arrival


class FairShare(Policy):
    """Decodes first, charged to their tenants; the rest of a step goes round among the tenants that want it.

    In each round a tenant's account grows by a quantum, and pays for its prefills. A tenant without work loses its
    account:
    none saves up. Each tenant may have its share of a batch's places, and one above it is preempted for one below it.
    """

    preempts = True

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
            while queue and (max_tokens := int(self._accounts[tenant])) > 0:
                seq, self._used = queue[0], 0
                yield StepGrant(seq, max_tokens)
                granted[seq.id] += self._used
                if self._used == 0 or granted[seq.id] >= seq.remaining:
                    queue.popleft()
            if not queue:
                del queues[tenant]

    def charged(self, seq: SequenceState, tokens: int) -> None:
        self._used += tokens
        if seq.tenant in self._accounts:
            self._accounts[seq.tenant] -= tokens

    def victim_for(self, running: Collection[SequenceState], seq: SequenceState, now: float) -> SequenceState | None:
        held = defaultdict[str, int](int)
        for other in running:
            held[other.tenant] += 1
        share = self._places // max(1, len(self._wanting))
        if held[seq.tenant] >= share:
            return None
        greedy = [other for other in running if held[other.tenant] > share]
        return self.victim(greedy, now) if greedy else None

    def _keep(self, tenants: set[str]) -> None:
        """Keeps accounts for exactly the tenants that have work."""
        self._wanting = tenants
        if tenants != self._accounts.keys():
            self._accounts = {tenant: self._accounts.get(tenant, 0.0) for tenant in tenants}
            self._ring = deque(tenant for tenant in self._ring if tenant in tenants)
            self._ring.extend(sorted(tenants - set(self._ring)))


class Exclusive(Policy):
    """A step has prefills or decodes, never both: decodes halt during any prefill."""

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
        """Is called when no other sequence joins in this step."""


class Static(Exclusive):
    """Static batching: all sequences that wait when nothing runs form a batch, and none joins until all of it is done.

    A finished sequence costs nothing more, where padded batches go on computing it: a comparison with this flatters
    them.
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
        self._batch = {seq.id for seq in running}  # the others did not fit: they are the next batch
