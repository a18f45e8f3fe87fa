"""Policies that differ in whose turn it is. Each is a way that servers of its kind are known to go."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from engine.policies.chunks import Chunks
from engine.policies.policy import Policy, Turn, each, parted
from engine.sequence import SequenceState


class PrefillFirst(Policy):
    """Prompts before decodes: answers begin soon, and then halt whenever another prompt comes."""

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[Turn]:
        decodes, prefills = parted(running)
        yield from each(prefills)
        yield from each(sorted(waiting, key=lambda seq: (self.lifted(seq, now), seq.arrival)))
        yield from each(decodes)


class Arrival(Policy):
    """First come, first served, whether it runs or waits, and whatever its class."""

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[Turn]:
        yield from each(sorted([*running, *waiting], key=lambda seq: seq.arrival))

    def victim(self, running: Collection[SequenceState], now: float) -> SequenceState:
        return max(running, key=lambda seq: seq.arrival)


class ShortestFirst(Policy):
    """Decodes, then whoever has least left to read. Waiting for `ageing_s` counts as a step's tokens fewer, so that
    a long prompt comes before all that arrive late enough.
    """

    def __init__(self, ageing_s: float, chunks: Chunks, most: int) -> None:
        super().__init__(ageing_s, chunks)
        self._most = most

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[Turn]:
        def left(seq: SequenceState) -> tuple[float, int]:
            return seq.remaining - self._most * (now - seq.queued_at) / self._ageing_s, seq.arrival

        decodes, prefills = parted(running)
        yield from each(decodes)
        yield from each(sorted([*prefills, *waiting], key=left))


class Classes(Policy):
    """By class throughout: a sequence of a better class takes the place of one of a worse class that runs.

    Age lifts whatever is not done, whether it waits or runs, so a low class is delayed and never starved: what comes
    later than its class is worth can neither overtake it nor send it away.
    """

    makes_way = True

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[Turn]:
        decodes, prefills = parted(running)
        yield from each(sorted(decodes, key=lambda seq: self._standing(seq, now)))
        yield from each(sorted([*prefills, *waiting], key=lambda seq: self._standing(seq, now)))

    def gives_way(self, running: Collection[SequenceState], seq: SequenceState, now: float) -> SequenceState | None:
        worst = max(running, key=lambda other: self._standing(other, now), default=None)
        return worst if worst is not None and self.lifted(worst, now) > self.lifted(seq, now) else None

    def victim(self, running: Collection[SequenceState], now: float) -> SequenceState:
        return max(running, key=lambda seq: self._standing(seq, now))

    def _standing(self, seq: SequenceState, now: float) -> tuple[int, int]:
        return self.lifted(seq, now), seq.arrival
