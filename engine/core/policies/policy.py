"""Interface of a scheduling policy, and the token budget of a step (chunked prefill).

A policy decides the order of turns, the tokens of a step and the sequence to preempt; the scheduler keeps blocks and
rows. Chunked prefill bounds the tokens of a step, so that decodes beside a prefill do not wait long for their next
token. The time of a step is learnt as it runs: a fixed part, one for each sequence that decodes (sampling and
detokenizing included), and one for each prefill token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from engine.core.request import SequenceState

STRETCH = 1.8  # without a goal: a step takes at most so many times the time of its decodes alone
MIN_COUNT = 16  # prefill tokens of a step under any goal: else a prompt would never be read
PATIENCE_S = 0.5  # without a goal: queueing time of a prompt before steps are stretched further,
PATIENCE_TIMES = 4.0  # beside so many times the prefill time of a prompt like it
_FORGET = 0.98  # weight of an earlier step, for each later one
_LEARNT = 8  # steps before the estimate is used


class StepCosts(NamedTuple):
    """Seconds: of a step, of each sequence that decodes in it, and of each prefill token."""

    step: float
    decode: float
    read: float


class Queue(NamedTuple):
    """Waiting prompts, and their tokens together."""

    prompts: int = 0
    tokens: int = 0


class PrefillBudget:
    """Token budget for chunked prefill: `max_tokens` a step, or fewer where decodes run: as many as `goal_s` seconds
    allow.

    Without a goal a step with decodes may take `STRETCH` times as long as they would take alone; and longer, up to
    `max_tokens` tokens, where so many prompts wait that the last of them would wait for too long. Longer gaps between
    tokens pay only for a queue: a step with more tokens costs less for each.
    """

    def __init__(self, max_tokens: int, goal_s: float | None = None, *, fixed: bool = False) -> None:
        """`fixed`: always `max_tokens`, whether sequences decode or not."""
        self._max_tokens = max_tokens
        self._goal = goal_s
        self._fixed = fixed
        self._steps = 0
        # Weighted sums over steps: of weights, decodes d, tokens read r, seconds s, dd, dr, rr, ds, rs.
        self._sums: tuple[float, ...] = (0.0,) * 9

    def budget(self, decodes: int, queue: Queue = Queue()) -> int:  # noqa: B008  # it cannot be changed
        """Returns the token budget of a step in which so many sequences decode."""
        costs = self.costs
        if decodes == 0 or self._fixed or costs is None or costs.read == 0:
            return self._max_tokens
        alone = costs.step + costs.decode * decodes
        if self._goal is not None:
            reading = (self._goal - alone) / costs.read
        else:
            reading = max((STRETCH - 1) * alone / costs.read, self._wanted(alone, costs.read, queue))
        return min(self._max_tokens, decodes + max(MIN_COUNT, int(reading)))

    def ran(self, decodes: int, reading: int, seconds: float) -> None:
        """Learns from a step: its decodes, its prefill tokens, its seconds."""
        if decodes + reading == 0:
            return
        self._steps += 1
        d, r = float(decodes), float(reading)
        new = (1.0, d, r, seconds, d * d, d * r, r * r, d * seconds, r * seconds)
        self._sums = tuple(_FORGET * old + add for old, add in zip(self._sums, new, strict=True))

    @property
    def token_s(self) -> float | None:
        """Returns the seconds of each token of a full step; None while too little is known."""
        return None if self.costs is None else self.costs.step / self._max_tokens + self.costs.read

    @property
    def costs(self) -> StepCosts | None:
        """Returns the costs that fit the steps best, by least squares; None while too little is known."""
        n, d, r, s, *products = self._sums
        if self._steps < _LEARNT:
            return None
        dd, dr, rr, ds, rs = products
        dd, dr, rr, ds, rs = dd - d * d / n, dr - d * r / n, rr - r * r / n, ds - d * s / n, rs - r * s / n
        if rr <= 1e-9 * (r * r / n + 1):  # always the same number of prefill tokens
            return None
        alike = dd <= 1e-9 * (d * d / n + 1)  # always the same number of decodes: their cost is in the step's own part
        decode, read = _two_costs(0.0 if alike else dd, dr, rr, ds, rs)
        step = (s - decode * d - read * r) / n
        if step < 0:  # as where nearly every step has as many decodes: the fit without it, rather than these and 0
            decode, read = _two_costs(*products)
        return StepCosts(max(0.0, step), decode, read)

    def _wanted(self, alone: float, read: float, queue: Queue) -> float:
        """Returns the prefill tokens of each step by which the queue is read in time."""
        if queue.prompts == 0:
            return 0.0
        patience = PATIENCE_S + PATIENCE_TIMES * read * queue.tokens / queue.prompts
        rate = queue.tokens / patience  # tokens a second; a step of r of them takes alone + read * r
        return rate * alone / (1 - rate * read) if rate * read < 1 else self._max_tokens


def _two_costs(dd: float, dr: float, rr: float, ds: float, rs: float) -> tuple[float, float]:
    """Returns the costs of decodes and prefill tokens, none below 0, that fit best, of sums of products as in
    `PrefillBudget`."""
    det = dd * rr - dr * dr
    decode = max(0.0, 0.0 if det <= 1e-9 * dd * rr else (ds * rr - rs * dr) / det)
    read = (rs - decode * dr) / rr
    if read < 0 and dd > 0:
        return max(0.0, ds / dd), 0.0
    return decode, max(0.0, read)


class StepGrant(NamedTuple):
    """Lets a sequence run in this step: up to `max_tokens` tokens, None for as many as the step has left.

    A waiting sequence is admitted by its turn, if it fits.
    """

    seq: SequenceState
    max_tokens: int | None = None


class Policy:
    """Decodes first, then running prefills, then waiting sequences, by class and arrival. Others change parts of that.

    `ageing_s`: in so many seconds a waiting sequence gains a class. Lower classes run first.
    """

    preempts = False  # whether a running sequence may be preempted for a waiting one

    def __init__(self, ageing_s: float, chunks: PrefillBudget) -> None:
        self._ageing_s = ageing_s
        self._chunks = chunks

    def budget(self, running: Collection[SequenceState], waiting: Collection[SequenceState]) -> int:
        """Returns the token budget of the next step."""
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
        """Charges tokens of a sequence that run in this step; less than 0 where they are taken back."""

    def ran(self, decodes: int, reading: int, seconds: float) -> None:
        """Learns from a step: its decodes, its prefill tokens, its seconds."""
        self._chunks.ran(decodes, reading, seconds)

    @property
    def token_s(self) -> float | None:
        """Returns the seconds of a prompt token in steps of prefill alone, as learnt; None while too little is
        known."""
        return self._chunks.token_s

    def victim(self, running: Collection[SequenceState], now: float) -> SequenceState:
        """Returns the sequence to preempt when running ones have too few blocks: the youngest of the lowest class."""
        return max(running, key=lambda seq: (seq.priority, seq.arrival))

    def victim_for(self, running: Collection[SequenceState], seq: SequenceState, now: float) -> SequenceState | None:
        """Returns the sequence to preempt for a waiting one; None: it waits on."""
        return None

    def aged_priority(self, seq: SequenceState, now: float) -> int:
        """Returns the sequence's class by now: it rises until the job is done."""
        return seq.priority - int((now - seq.queued_at) / self._ageing_s)


def parted(running: Iterable[SequenceState]) -> tuple[list[SequenceState], list[SequenceState]]:
    """Splits sequences into those that decode and those in prefill, in the order of admission."""
    decodes, prefills = list[SequenceState](), list[SequenceState]()
    for seq in running:
        (prefills if len(seq.tokens) - seq.cursor > 1 else decodes).append(seq)
    return decodes, prefills


def each(seqs: Iterable[SequenceState]) -> Iterator[StepGrant]:
    return map(StepGrant, seqs)
