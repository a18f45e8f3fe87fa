"""Interface of a scheduling policy, and the token budget of a step (chunked prefill).

A policy decides the order of turns, the tokens of a step and which sequence to preempt; the scheduler keeps blocks and
rows. Chunked prefill bounds the tokens of a step, so that decodes beside a prefill do not wait long for their next
token. The time of a step is learnt as it runs: a fixed part, one for each sequence that decodes (sampling and
detokenizing included), and one for each token that is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from engine.core.request import SequenceState

STRETCH = 1.8  # without a goal: a step takes at most so many times what its decodes alone would take
MIN_COUNT = 16  # tokens of prefill in a step, whatever the goal: else a prompt would never be read
PATIENCE_S = 0.5  # without a goal: what a prompt may wait for others before steps are stretched further,
PATIENCE_TIMES = 4.0  # beside so many times what reading one like it takes
_FORGET = 0.98  # what an earlier step counts, for each later one
_LEARNT = 8  # steps before what was learnt is trusted


class StepCosts(NamedTuple):
    """Seconds: of a step, of each sequence that decodes in it, and of each token that is read."""

    step: float
    decode: float
    read: float


class Queue(NamedTuple):
    """Prompts that wait for others, and their tokens together."""

    prompts: int = 0
    tokens: int = 0


class PrefillBudget:
    """`most` tokens a step, or fewer where decodes run: as many as `goal_s` seconds allow.

    Without a goal a step with decodes may take `STRETCH` times as long as they would take alone; and longer, up to
    `most` tokens, where so many prompts wait that the last of them would wait for too long. A queue is what gaps are
    stretched for: a step with more tokens costs less for each.
    """

    def __init__(self, most: int, goal_s: float | None = None, *, fixed: bool = False) -> None:
        """`fixed`: always `most`, whoever decodes."""
        self._most = most
        self._goal = goal_s
        self._fixed = fixed
        self._steps = 0
        # Weighted sums over steps: of weights, decodes d, tokens read r, seconds s, dd, dr, rr, ds, rs.
        self._sums: tuple[float, ...] = (0.0,) * 9

    def budget(self, decodes: int, queue: Queue = Queue()) -> int:  # noqa: B008  # it cannot be changed
        """The tokens of a step in which so many sequences decode."""
        costs = self.costs
        if decodes == 0 or self._fixed or costs is None or costs.read == 0:
            return self._most
        alone = costs.step + costs.decode * decodes
        if self._goal is not None:
            reading = (self._goal - alone) / costs.read
        else:
            reading = max((STRETCH - 1) * alone / costs.read, self._wanted(alone, costs.read, queue))
        return min(self._most, decodes + max(MIN_COUNT, int(reading)))

    def ran(self, decodes: int, reading: int, seconds: float) -> None:
        """A step of so many decodes, in which so many tokens were read, took so many seconds."""
        if decodes + reading == 0:
            return
        self._steps += 1
        d, r = float(decodes), float(reading)
        new = (1.0, d, r, seconds, d * d, d * r, r * r, d * seconds, r * seconds)
        self._sums = tuple(_FORGET * old + add for old, add in zip(self._sums, new, strict=True))

    @property
    def token_s(self) -> float | None:
        """Seconds of each token of a step that has as many as it may; None while too little is known."""
        return None if self.costs is None else self.costs.step / self._most + self.costs.read

    @property
    def costs(self) -> StepCosts | None:
        """Returns the costs that fit the steps best, by least squares; None while too little is known."""
        n, d, r, s, dd, dr, rr, ds, rs = self._sums
        if self._steps < _LEARNT:
            return None
        dd, dr, rr, ds, rs = dd - d * d / n, dr - d * r / n, rr - r * r / n, ds - d * s / n, rs - r * s / n
        if rr <= 1e-9 * (r * r / n + 1):  # always as much was read
            return None
        alike = dd <= 1e-9 * (d * d / n + 1)  # as many always decoded: what each costs is in the step's own part
        det = dd * rr - dr * dr
        decode = 0.0 if alike or det <= 1e-9 * dd * rr else (ds * rr - rs * dr) / det
        read = (rs - decode * dr) / rr if decode > 0 else rs / rr
        decode, read = max(0.0, decode), max(0.0, read)
        return StepCosts(max(0.0, (s - decode * d - read * r) / n), decode, read)

    def _wanted(self, alone: float, read: float, queue: Queue) -> float:
        """Tokens to read in each step, so that what waits is read in time."""
        if queue.prompts == 0:
            return 0.0
        patience = PATIENCE_S + PATIENCE_TIMES * read * queue.tokens / queue.prompts
        rate = queue.tokens / patience  # tokens a second; a step of r of them takes alone + read * r
        return rate * alone / (1 - rate * read) if rate * read < 1 else self._most


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
        yield from each(sorted(waiting, key=lambda seq: (self.aged_priority(seq, now), seq.arrival)))

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

    def aged_priority(self, seq: SequenceState, now: float) -> int:
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
