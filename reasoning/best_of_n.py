"""Best of n: several answers side by side, the one that a verifier scores highest is given.

Sampling stops as soon as one scores `enough`. Knows nothing of criteria: a verifier scores.
"""

from __future__ import annotations

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


class BestOfNOptions(Options):
    """`verifier` scores; None: the request's checker, or `confidence` without one.

    `temperature` is the candidates'; None: the request's, or 0.7 where that is greedy, as all would be the same.

    After `seconds` the best so far is given.
    """

    n: int = Field(4, ge=1, le=64)
    verifier: Literal["checker", "confidence", "judge", "value"] | None = None
    enough: float | None = Field(None, gt=0, le=1)
    temperature: float | None = Field(None, gt=0, le=2)
    seconds: float | None = Field(None, gt=0)


@strategy("best_of_n", BestOfNOptions, takes_checker=lambda options: options.verifier in (None, "checker"))
async def best_of_n(seq: EngineSequence, context: Context, options: BestOfNOptions) -> Yields:
    """Writes several answers side by side and gives the one that a verifier scores highest.

    Answers that came to their own end go before those that a limit cut; among equals the first of them is taken.
    """
    judge = verifier(options.verifier or ("confidence" if context.checker is None else "checker"), context)
    candidates = Candidates(seq, context, options.n, options.temperature, judge.measures, options.seconds)
    best: tuple[tuple[bool, float, int], Candidate] | None = None
    done: list[Candidate] = []
    async with aclosing(candidates.written()) as written:
        async for candidate in written:
            done.append(candidate)
            score = await judge.score(candidate, candidates.forks[candidate.index])
            yield CandidateDone(candidate.index, candidate.text, candidate.spent, score)
            rank = candidate.whole, score, -candidate.index
            best = (rank, candidate) if best is None or rank > best[0] else best
            if options.enough is not None and candidate.whole and score >= options.enough:
                break
    assert best is not None
    (_, score, _), chosen = best
    yield CandidateChosen(chosen.index, len(done), score, options.n - len(done))
    yield Spent(candidates.spent - chosen.spent)
    for piece in accept(seq, chosen):
        yield piece
