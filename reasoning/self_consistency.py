"""Self-consistency (Wang et al. 2022): several answers side by side, the one that most of them agree on is given.

Votes may be weighted by a verifier. Sampling stops as soon as no answer that is still being written can change the
outcome, so stopping never favours short ones. Two options stop earlier, and may: `posterior` (Aggarwal et al. 2023,
Adaptive-Consistency) and `m` (Hassid et al. 2025, short-m@k). Knows nothing of the answers' subject.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import aclosing
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
    verifier,
)
from ponder import StrategyContext as Context

if TYPE_CHECKING:
    from ponder import Sequence as EngineSequence

Compared = Literal["last_number", "last_line", "text"]
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


class SelfConsistencyOptions(Options):
    """`compare` is the part that two answers must share to agree; `weight` is how much a vote counts, one each for
    `one`. After `seconds` the votes that there are decide.

    `at_once` answers are written side by side, all by default: fewer take longer, and leave more of them unwritten
    where sampling stops early. It stops after the first `m` votes, and as soon as the leading answer is the more
    probable one of the first two with a probability above `posterior`.
    """

    n: int = Field(8, ge=1, le=64)
    compare: Compared = "last_number"
    weight: Literal["one", "checker", "confidence", "judge", "value"] = "one"
    temperature: float | None = Field(None, gt=0, le=2)
    seconds: float | None = Field(None, gt=0)
    at_once: int | None = Field(None, ge=1, le=64)
    m: int | None = Field(None, ge=1, le=64)
    posterior: float | None = Field(None, gt=0.5, lt=1)

    @model_validator(mode="after")
    def _checked(self) -> SelfConsistencyOptions:
        if self.m is not None and self.m > self.n:
            raise ValueError(f"m is {self.m}, and n is {self.n}; accepted: m of at most n.")
        if self.posterior is not None and self.weight != "one":
            raise ValueError(f"posterior counts votes, and weight is {self.weight!r}; accepted: weight 'one' with it.")
        return self


def vote_of(text: str, compare: Compared) -> str | None:
    """Returns the part of an answer that votes; None where it has none of the kind."""
    if compare == "last_number":
        found = _NUMBER.findall(text)
        return None if not found else _plain(found[-1])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    chosen = lines[-1:] if compare == "last_line" else lines
    return " ".join(" ".join(chosen).casefold().split()) or None


def _plain(number: str) -> str:
    digits = number.replace(",", "")
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def leader(votes: dict[str, float], coming: int) -> tuple[str | None, bool]:
    """Returns the vote with the most weight (the first among equals), and whether `coming` more of at most 1 each can't
    change it."""
    order = sorted(votes.items(), key=lambda each: -each[1])
    if not order:
        return None, coming == 0
    second = order[1][1] if len(order) > 1 else 0.0
    return order[0][0], order[0][1] - second > coming or coming == 0


def majority(first: int, second: int) -> float:
    """Returns the probability that an answer with `first` votes is more probable than one with `second`: of a share
    distributed as Beta(first + 1, second + 1) to be above one half."""
    n = first + second + 1
    return sum(math.comb(n, k) for k in range(first + 1)) / 2**n


def _sure(counts: Counter[str], posterior: float) -> bool:
    (_, first), (_, second) = [*counts.most_common(2), ("", 0), ("", 0)][:2]
    return majority(first, second) > posterior


@strategy("self_consistency", SelfConsistencyOptions, takes_checker=lambda options: options.weight == "checker")
async def self_consistency(seq: EngineSequence, context: Context, options: SelfConsistencyOptions) -> Yields:
    """Writes several answers side by side and gives one of those that most of them agree with.

    Of the answers for the winner, the one with the greatest weight is given, the first among equals. Those that a limit
    cut, or that have nothing to compare, have no vote; if no answer has one, the first is given.
    """
    judge = None if options.weight == "one" else verifier(options.weight, context)
    measured = judge is not None and judge.measures
    candidates = Candidates(
        seq, context, options.n, options.temperature, measured, options.seconds, at_once=options.at_once
    )  # fmt: skip
    votes: dict[str, float] = {}
    counts = Counter[str]()
    voters: dict[str | None, list[tuple[float, int, Candidate]]] = {}
    done = 0
    async with aclosing(candidates.written()) as written:
        async for candidate in written:
            done += 1
            vote = vote_of(candidate.text, options.compare) if candidate.whole else None
            weight = 0.0 if vote is None else 1.0
            if vote is not None and judge is not None:
                weight = await judge.score(candidate, candidates.forks[candidate.index])
            yield CandidateDone(candidate.index, candidate.text, candidate.spent, weight, vote)
            voters.setdefault(vote, []).append((weight, -candidate.index, candidate))
            if vote is not None:
                votes[vote] = votes.get(vote, 0.0) + weight
                counts[vote] += 1
            if leader(votes, options.n - done)[1] or counts.total() == options.m:
                break
            if options.posterior is not None and _sure(counts, options.posterior):
                break
            candidates.begin(1)
    first = {vote: min(-at for _, at, _ in voters[vote]) for vote in votes}
    winner, _ = leader({vote: votes[vote] for vote in sorted(votes, key=first.__getitem__)}, 0)
    weight, _, chosen = max(voters[winner], key=lambda each: each[:2])
    yield CandidateChosen(chosen.index, done, votes.get(winner) if winner is not None else None, options.n - done)
    yield Spent(candidates.spent - chosen.spent)
    for piece in accept(seq, chosen):
        yield piece
