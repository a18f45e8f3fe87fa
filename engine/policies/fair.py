"""Deficit round robin over tokens (Shreedhar and Varghese 1996): tenants that want more than there is get alike."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator

from engine.policies.chunks import Chunks
from engine.policies.policy import Policy, Turn, each, parted
from engine.sequence import SequenceState


class FairShare(Policy):
    """Decodes first, and charged to their tenants; what is left of a step goes round among the tenants that want it.

    In each round a tenant's account grows by a quantum, and it may read for what it holds. A tenant that has nothing to
    do loses its account: nobody saves up. Each tenant may have its share of a batch's places, and one that has more
    gives up a place for another that has less.
    """

    makes_way = True

    def __init__(self, ageing_s: float, chunks: Chunks, quantum: int, places: int) -> None:
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
    ) -> Iterator[Turn]:
        decodes, prefills = parted(running)
        queues: dict[str, deque[SequenceState]] = defaultdict(deque)
        for seq in prefills:
            queues[seq.tenant].append(seq)
        for seq in sorted(waiting, key=lambda seq: (self.lifted(seq, now), seq.arrival)):
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
                yield Turn(seq, most)
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
