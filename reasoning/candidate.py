"""One of several answers to the same prompt: written on a fork, whole before it is shown, with how sure the model was.

Candidates are written side by side, so the engine makes one batch of them; closing the iterator early cancels the rest.
Knows nothing of how one is chosen.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.errors import InvalidParameter
from engine.outputs import TokenLogprob
from engine.params import GREEDY, Span
from reasoning.strategy import Context, Event
from reasoning.thinking import Piece, think_and_answer

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence

TEMPERATURE = 0.7
TOP = 20  # likeliest tokens that an entropy is estimated from


@dataclass(frozen=True, slots=True)
class CandidateDone(Event):
    """A candidate is whole, or was `stopped` before. `score` is the verifier's, or its weight in a vote; `vote` is the
    answer it votes for."""

    index: int
    text: str
    tokens: int
    score: float | None = None
    vote: str | None = None
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class CandidateChosen(Event):
    """The answer that is given, of `of` that had ended; `cancelled` were still being written, or not begun."""

    index: int
    of: int
    score: float | None
    cancelled: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """`tokens` are all that it added to the sequence; `logprobs` those that were measured, thinking included.

    `counted`: the number of tokens, where the tokens are not known. `stopped`: by the draft's `stops`.
    """

    index: int
    pieces: tuple[Piece, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    counted: int | None = None
    stopped: bool = False

    @property
    def text(self) -> str:
        """The answer's, without thinking and calls."""
        return "".join(piece.text for piece in self.pieces if piece.part == "answer")

    @property
    def spent(self) -> int:
        return len(self.tokens) if self.counted is None else self.counted

    @property
    def whole(self) -> bool:
        """Returns whether it came to its own end, rather than to a limit."""
        return bool(self.pieces) and self.pieces[-1].finish_reason == "stop"

    @property
    def confidence(self) -> float:
        """The geometric mean of its tokens' probabilities, 0 to 1; 0 for no tokens."""
        logprobs = [each.logprob for each in self.logprobs]
        return math.exp(sum(logprobs) / len(logprobs)) if logprobs else 0.0

    @property
    def entropy(self) -> float:
        """The mean entropy at its tokens, in nats; a little low, as all but the likeliest count as one."""
        return sum(map(_entropy, self.logprobs)) / len(self.logprobs) if self.logprobs else 0.0


def _entropy(logprob: TokenLogprob) -> float:
    likely = [each for _, each in logprob.top]
    rest = 1.0 - sum(map(math.exp, likely))
    return -sum(each * math.exp(each) for each in likely) - (rest * math.log(rest) if rest > 1e-9 else 0.0)


@dataclass(slots=True)
class Draft:
    """A candidate under way on `seq`. `measured`: with log-probabilities of all tokens, even if the span has none.

    `stops` is asked after each piece, with its log-probabilities, and ends the candidate where it returns true.
    """

    seq: EngineSequence
    context: Context
    index: int = 0
    measured: bool = False
    stops: Callable[[Sequence[TokenLogprob]], bool] | None = None
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    async def write(self) -> Candidate:
        """Write it to its end. Raises the errors of `generate`."""
        context, span, begun, stopped = self.context, self.context.span, len(self.seq), False
        asked = span if not self.measured else replace(span, logprobs=max(span.logprobs or 0, TOP))
        async with aclosing(
            think_and_answer(
                self.seq, asked, context.markers, opened=context.opened, closed=context.closed, calls=context.calls,
                thinking_logprobs=TOP if self.measured else None,
            )
        ) as written:  # fmt: skip
            async for piece in written:
                self.logprobs += piece.logprobs
                shown = span.logprobs is not None and piece.part != "thinking"
                self.pieces.append(piece if shown else replace(piece, logprobs=()))
                if self.stops is not None and piece.finish_reason is None and self.stops(piece.logprobs):
                    stopped = True
                    break
        return replace(self.cut(begun), stopped=True) if stopped else self._as_it_is(begun)

    def cut(self, begun: int) -> Candidate:
        """Returns the candidate so far, as an answer that a limit ended; its tokens are those from `begun` on."""
        part = self.pieces[-1].part if self.pieces else "answer"
        # White space that might yet have come before a thought is written, and was not yielded.
        unreported = len(self.seq) - begun - sum(piece.spent for piece in self.pieces)
        self.pieces.append(Piece(part, "", max(0, unreported), finish_reason="length"))
        return self._as_it_is(begun)

    def _as_it_is(self, begun: int) -> Candidate:
        return Candidate(self.index, tuple(self.pieces), tuple(self.seq.tokens[begun:]), tuple(self.logprobs))


@dataclass(slots=True)
class Candidates:
    """`n` answers under way on forks of `seq`.

    `forks` are theirs, in order, while `written` is iterated over; afterwards `spent` counts the tokens of all, also of
    those that were cancelled. The fork of a stopped one is closed. The first `at_once` are begun at once, and more by
    `begin`. `stops` makes the `stops` of each draft that is begun after it was set.
    """

    seq: EngineSequence
    context: Context
    n: int
    temperature: float | None = None  # None: the span's, or `TEMPERATURE` where that is greedy: all would be the same
    measured: bool = False
    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    at_once: int | None = None  # None: all
    stops: Callable[[], Callable[[Sequence[TokenLogprob]], bool]] | None = None
    forks: list[EngineSequence] = field(default_factory=list)
    spent: int = 0
    _tasks: dict[asyncio.Task[Candidate], Draft] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """
        Raises:
            InvalidParameter: more are asked for than the quota has.
        """
        if self.n > self.context.quota.branches:
            raise InvalidParameter("n", f"n is {self.n}; accepted: at most {self.context.quota.branches} candidates.")
        sampling = self.context.span.sampling
        temperature = sampling.temperature or TEMPERATURE if self.temperature is None else self.temperature
        span = replace(self.context.span, sampling=replace(sampling, temperature=temperature))
        self.context = replace(self.context, span=span)

    def begin(self, count: int) -> None:
        """Begins up to `count` more, as far as there are more. Only while `written` is iterated over."""
        for fork in self.forks[len(self._tasks) :][:count]:
            index = len(self._tasks)
            stops = None if self.stops is None else self.stops()
            draft = Draft(fork, self.context, index, self.measured, stops)
            self._tasks[asyncio.ensure_future(draft.write())] = draft

    async def written(self) -> AsyncGenerator[Candidate, None]:
        """The candidates in the order in which they end. Closing it cancels those that have not.

        At the deadline nothing more is waited for; had none ended by then, the first is given as far as it came.
        """
        began = self.clock()
        await prefill(self.seq)
        begun, ended, closed = len(self.seq), set[asyncio.Task[Candidate]](), 0
        (scope,) = self.seq.fork()
        self.forks = scope.fork(self.n)
        self.begin(self.at_once or self.n)
        try:
            while left := self._tasks.keys() - ended:
                wait_s = None if self.seconds is None else max(0.0, self.seconds - (self.clock() - began))
                done, _ = await asyncio.wait(left, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in sorted(done, key=list(self._tasks).index):
                    ended.add(task)
                    candidate = task.result()
                    if candidate.stopped:
                        closed += candidate.spent
                        self.forks[candidate.index].close()
                    yield candidate
            if not ended:
                await _cancelled(self._tasks)
                yield next(iter(self._tasks.values())).cut(begun)
        finally:
            await _cancelled(self._tasks)
            self.spent = closed + sum(len(fork) - begun for fork in self.forks if not fork.closed)
            scope.close()


async def _cancelled(tasks: Iterable[asyncio.Task[Candidate]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def accept(seq: EngineSequence, chosen: Candidate) -> list[Piece]:
    """The chosen answer becomes the sequence's turn; its pieces, to be shown."""
    seq.append(chosen.tokens)
    return list(chosen.pieces)


async def prefill(seq: EngineSequence) -> None:
    """Compute a sequence's K/V once, before it is forked: otherwise each fork would compute the missing tokens."""
    length = len(seq)
    await seq.generate_all(Span(GREEDY, max_tokens=1, min_confidence=0.0))
    seq.truncate(length)
