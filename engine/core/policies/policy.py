"""The interface of a scheduling policy: the order of turns, the tokens of a step, and preemption.

The scheduler keeps blocks and rows, and asks. Knows nothing of blocks, tensors or clients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from engine.core.policies.prefill_budget import PrefillBudget, Queue
from engine.core.request import SequenceState


class StepGrant(NamedTuple):
    """A sequence may run in this step: up to `most` tokens, None for as many as the step has left.

    One that waits is admitted by its turn, if there is room.
    """

    seq: SequenceState
    most: int | None = None


class Policy:
    """Decodes first, then prefills that run, then what waits, by class and arrival. Others change parts of that.

    `ageing_s`: in so many seconds a waiting sequence gains a class. Lower classes run first.
    """

    makes_way = False  # whether anybody ever has to make place for another

    def __init__(self, ageing_s: float, chunks: PrefillBudget) -> None:
        self._ageing_s = ageing_s
        self._chunks = chunks

    def budget(self, running: Collection[SequenceState], waiting: Collection[SequenceState]) -> int:
        """The tokens of the next step."""
        decodes = sum(len(seq.tokens) - seq.cursor == 1 for seq in running)
        return self._chunks.budget(decodes, Queue(len(waiting), sum(seq.remaining for seq in waiting)))

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        """Yields the sequences that may run, in order. Read one by one: `charged` comes between two of them."""
        decodes, prefills = parted(running)
        yield from each(decodes)
        yield from each(prefills)
        yield from each(sorted(waiting, key=lambda seq: (self.lifted(seq, now), seq.arrival)))

    def charged(self, seq: SequenceState, tokens: int) -> None:
        """So many tokens of a sequence run in this step; less than 0 where they were taken back."""

    def ran(self, decodes: int, reading: int, seconds: float) -> None:
        """A step ran, in which so many sequences decoded and so many tokens were read."""
        self._chunks.ran(decodes, reading, seconds)

    @property
    def token_s(self) -> float | None:
        """Seconds of a token of a prompt, in steps of nothing else, as learnt; None while too little is known."""
        return self._chunks.token_s

    def victim(self, running: Collection[SequenceState], now: float) -> SequenceState:
        """Returns the sequence to preempt when running ones have too few blocks: the youngest of the lowest class."""
        return max(running, key=lambda seq: (seq.priority, seq.arrival))

    def gives_way(self, running: Collection[SequenceState], seq: SequenceState, now: float) -> SequenceState | None:
        """Returns the sequence to preempt for one that waits; None: it waits on."""
        return None

    def lifted(self, seq: SequenceState, now: float) -> int:
        """The class that a sequence has by now, its job not done since it came."""
        return seq.priority - int((now - seq.queued_at) / self._ageing_s)


def parted(running: Iterable[SequenceState]) -> tuple[list[SequenceState], list[SequenceState]]:
    """Those that decode, and those that still read: in the order in which they were admitted."""
    decodes, prefills = list[SequenceState](), list[SequenceState]()
    for seq in running:
        (prefills if len(seq.tokens) - seq.cursor > 1 else decodes).append(seq)
    return decodes, prefills


def each(seqs: Iterable[SequenceState]) -> Iterator[StepGrant]:
    return map(StepGrant, seqs)
