"""DeepConf (Fu et al. 2025): stops answers whose tokens the model is unsure of, and weighs the votes of the rest.

The confidence of a token is the mean of the negative log-probabilities of the likeliest tokens at its place: the surer
the model, the less likely the others. A group is a window of tokens, and an answer is as good as its worst group.
Answers of a warm-up are written to their ends, and set the threshold for those after them. Knows nothing of the
answers' subject.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from ponder import (
    Candidate,
    CandidateChosen,
    CandidateDone,
    Candidates,
    Options,
    Spent,
    Yields,
    accept,
    strategy,
    vote_of,
)
from ponder import StrategyContext as Context

if TYPE_CHECKING:
    from ponder import Sequence as EngineSequence
    from ponder import TokenLogprob


class DeepConfOptions(Options):
    """At most `n` answers, of which `warm_up` are written first. Later ones are stopped where the confidence of
    `window` tokens falls below that of the `keep` share of the warm-up's answers with the highest. Sampling stops, too,
    as soon as the leading answer has the share `consensus` of the votes' weight. `compare`, `temperature` and `seconds`
    are those of `self_consistency`.
    """

    n: int = Field(16, ge=2, le=64)
    warm_up: int = Field(4, ge=1, le=63)
    keep: float = Field(0.9, gt=0, le=1)
    window: int = Field(64, ge=8, le=4096)
    consensus: float = Field(0.95, gt=0.5, le=1)
    compare: Literal["last_number", "last_line", "text"] = "last_number"
    temperature: float | None = Field(None, gt=0, le=2)
    seconds: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _checked(self) -> DeepConfOptions:
        if self.warm_up >= self.n:
            raise ValueError(f"warm_up is {self.warm_up}, and n is {self.n}; accepted: warm_up below n.")
        return self


@dataclass(slots=True)
class GroupConfidence:
    """Confidence of the last `window` tokens. `lowest`: of all whole windows, or of all tokens where they are fewer."""

    window: int
    _recent: deque[float] = field(default_factory=deque)
    _sum: float = 0.0
    _lowest: float = math.inf

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        for each in logprobs:
            confidence = -sum(logprob for _, logprob in each.top) / len(each.top)
            self._recent.append(confidence)
            self._sum += confidence
            if len(self._recent) > self.window:
                self._sum -= self._recent.popleft()
            if len(self._recent) == self.window:
                self._lowest = min(self._lowest, self._sum / self.window)

    @property
    def lowest(self) -> float:
        if self._lowest < math.inf:
            return self._lowest
        return self._sum / len(self._recent) if self._recent else 0.0

    def below(self, least: float) -> bool:
        """Returns whether a whole window was below `least`."""
        return self._lowest < least


def lowest_confidence(logprobs: Sequence[TokenLogprob], window: int) -> float:
    """Returns the confidence of the worst group of `window` tokens; 0 for no tokens."""
    group = GroupConfidence(window)
    group.add(logprobs)
    return group.lowest


def threshold(confidences: Sequence[float], keep: float) -> float:
    """Returns the least of the `keep` share of confidences that are highest, at least one."""
    order = sorted(confidences, reverse=True)
    return order[max(1, math.floor(keep * len(order) + 1e-9)) - 1]


def stops_below(window: int, least: float) -> Callable[[Sequence[TokenLogprob]], bool]:
    """Returns the `stops` of one draft, which ends as soon as a group of `window` tokens is below `least`."""
    group = GroupConfidence(window)

    def stops(logprobs: Sequence[TokenLogprob]) -> bool:
        group.add(logprobs)
        return group.below(least)

    return stops


@strategy("deep_conf", DeepConfOptions)
async def deep_conf(seq: EngineSequence, context: Context, options: DeepConfOptions) -> Yields:
    """Writes several answers side by side, stops those that the model is unsure of, and weighs the votes of the rest.

    An answer's weight is the confidence of its worst group. Those that were stopped or cut, or that have nothing to
    compare, have no vote; if no answer has one, the first is given.
    """
    candidates = Candidates(
        seq, context, options.n, options.temperature, True, options.seconds, at_once=options.warm_up
    )  # fmt: skip
    votes: dict[str, float] = {}
    voters: dict[str | None, list[tuple[float, int, Candidate]]] = {}
    confidences: list[float] = []
    async with aclosing(candidates.written()) as written:
        async for candidate in written:
            confidence = lowest_confidence(candidate.logprobs, options.window)
            confidences.append(confidence)
            vote = vote_of(candidate.text, options.compare) if candidate.whole else None
            spent, stopped = candidate.spent, candidate.stopped
            yield CandidateDone(candidate.index, candidate.text, spent, confidence, vote, stopped)
            if not stopped:
                voters.setdefault(vote, []).append((confidence, -candidate.index, candidate))
            if vote is not None:
                votes[vote] = votes.get(vote, 0.0) + confidence
            if len(confidences) < options.warm_up:
                continue
            if votes and max(votes.values()) >= options.consensus * sum(votes.values()):
                break
            if len(confidences) == options.warm_up:
                candidates.stops = partial(stops_below, options.window, threshold(confidences, options.keep))
                candidates.begin(options.n)
    winner = max(votes, key=votes.__getitem__, default=None)
    *_, chosen = max(voters[winner], key=lambda each: each[1:2] if winner is None else each[:2])
    done = len(confidences)
    yield CandidateChosen(chosen.index, done, None if winner is None else votes[winner], options.n - done)
    yield Spent(candidates.spent - chosen.spent)
    for piece in accept(seq, chosen):
        yield piece
