"""One of several answers to the same prompt: written on a fork, whole before it is shown, with how sure the model was.

Candidates are written side by side, so the engine makes one batch of them; whoever leaves early cancels the rest.
Knows nothing of how one is chosen.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
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
    """A candidate is whole. `score` is the verifier's, or its weight in a vote; `vote` is what it votes for."""

    index: int
    text: str
    tokens: int
    score: float | None = None
    vote: str | None = None


@dataclass(frozen=True, slots=True)
class CandidateChosen(Event):
    """The answer that is given, of `of` that were whole; those still being written were cancelled."""

    index: int
    of: int
    score: float | None
    cancelled: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """`tokens` are all that it added to the sequence; `logprobs` those that were measured, thinking included."""

    index: int
    pieces: tuple[Piece, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The answer's, without thinking and calls."""
        return "".join(piece.text for piece in self.pieces if piece.part == "answer")

    @property
    def spent(self) -> int:
        return len(self.tokens)

    @property
    def whole(self) -> bool:
        """Whether it came to its own end, rather than to a limit."""
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


async def write_candidate(
    seq: EngineSequence, context: Context, index: int = 0, *, measured: bool = False
) -> Candidate:
    """An answer on `seq`. `measured`: with log-probabilities of all its tokens, even where the span asks for none.

    Raises what `generate` raises.
    """
    span, begun = context.span, len(seq)
    asked = span if not measured else replace(span, logprobs=max(span.logprobs or 0, TOP))
    pieces: list[Piece] = []
    logprobs: list[TokenLogprob] = []
    async with aclosing(
        think_and_answer(
            seq, asked, context.markers, opened=context.opened, closed=context.closed, calls=context.calls,
            thinking_logprobs=TOP if measured else None,
        )
    ) as written:  # fmt: skip
        async for piece in written:
            logprobs += piece.logprobs
            pieces.append(
                piece if span.logprobs is not None and piece.part != "thinking" else replace(piece, logprobs=())
            )
    return Candidate(index, tuple(pieces), tuple(seq.tokens[begun:]), tuple(logprobs))


@dataclass(slots=True)
class Candidates:
    """`n` answers under way on forks of `seq`.

    `forks` are theirs, in order, while `written` is iterated over; afterwards `spent` counts the tokens of all, also of
    those that were cancelled.
    """

    seq: EngineSequence
    context: Context
    n: int
    temperature: float | None = None  # None: the span's, or `TEMPERATURE` where that is greedy: all would be the same
    measured: bool = False
    forks: list[EngineSequence] = field(default_factory=list)
    spent: int = 0

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

    async def written(self) -> AsyncGenerator[Candidate, None]:
        """The candidates in the order in which they end. Closing it cancels those that have not."""
        await warm(self.seq)
        begun = len(self.seq)
        (scope,) = self.seq.fork()
        self.forks = scope.fork(self.n)
        tasks = [
            asyncio.ensure_future(write_candidate(fork, self.context, index, measured=self.measured))
            for index, fork in enumerate(self.forks)
        ]
        left = set(tasks)
        try:
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=tasks.index):
                    yield task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.spent = sum(len(fork) - begun for fork in self.forks)
            scope.close()


def given(seq: EngineSequence, chosen: Candidate) -> list[Piece]:
    """The chosen answer becomes the sequence's turn; its pieces, to be shown."""
    seq.append(chosen.tokens)
    return list(chosen.pieces)


async def warm(seq: EngineSequence) -> None:
    """Compute a sequence's K/V once, before it is forked: each fork would compute what is not there yet."""
    length = len(seq)
    await seq.generate_all(Span(GREEDY, max_tokens=1))
    seq.truncate(length)
