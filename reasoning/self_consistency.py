"""Self-consistency (Wang et al. 2022): several answers side by side, the one that most of them agree on is given.

Votes may be weighted by a verifier. Sampling stops as soon as no answer that is still being written can change the
outcome, so stopping never favours short ones. Knows nothing of the answers' subject.
"""

from __future__ import annotations

import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal

from pydantic import Field

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
    """

    n: int = Field(8, ge=1, le=64)
    compare: Compared = "last_number"
    weight: Literal["one", "checker", "confidence", "judge"] = "one"
    temperature: float | None = Field(None, gt=0, le=2)
    seconds: float | None = Field(None, gt=0)


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


@strategy("self_consistency", SelfConsistencyOptions, takes_checker=lambda options: options.weight == "checker")
async def self_consistency(seq: EngineSequence, context: Context, options: SelfConsistencyOptions) -> Yields:
    """Writes several answers side by side and gives one of those that most of them agree with.

    Of the answers for the winner, the one with the greatest weight is given, the first among equals. Those that a limit
    cut, or that have nothing to compare, have no vote; if no answer has one, the first is given.
    """
    judge = None if options.weight == "one" else verifier(options.weight, context)
    measured = judge is not None and judge.measures
    candidates = Candidates(seq, context, options.n, options.temperature, measured, options.seconds)
    votes: dict[str, float] = {}
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
            if leader(votes, options.n - done)[1]:
                break
    first = {vote: min(-at for _, at, _ in voters[vote]) for vote in votes}
    winner, _ = leader({vote: votes[vote] for vote in sorted(votes, key=first.__getitem__)}, 0)
    weight, _, chosen = max(voters[winner], key=lambda each: each[:2])
    yield CandidateChosen(chosen.index, done, votes.get(winner) if winner is not None else None, options.n - done)
    yield Spent(candidates.spent - chosen.spent)
    for piece in accept(seq, chosen):
        yield piece
