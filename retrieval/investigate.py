"""A question that one search does not cover, asked in parts: bounded in hops, in questions and in what is kept.

What splits a question and what says how well it is covered are passed in; `clauses` splits without a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrieval.fusion import best, reciprocal_ranks
from retrieval.lexical import content
from retrieval.records import Found, Hit

ENOUGH = 0.5  # coverage from which a question is asked once
HOPS = 2
QUESTIONS = 4  # for one hop

Search = Callable[[str], Found]
Coverage = Callable[[str, Sequence[Hit]], float]
Split = Callable[[str, Sequence[Hit]], Sequence[str]]

_BORDERS = re.compile(
    r"\s*(?:;|\?\s+|,?\s+and\s+(?=(?:what|when|where|who|whom|whose|why|how|which|did|was|is|are)\b))"
)


@dataclass(frozen=True, slots=True)
class Investigation:
    """What was asked, in order, and the hits of all of it, best first; `coverage` is of the whole question."""

    questions: tuple[str, ...]
    hits: tuple[Hit, ...]
    coverage: float


def clauses(question: str, hits: Sequence[Hit] = ()) -> list[str]:
    """The parts of a question that asks several things; none where it asks one."""
    parts = [part.strip(" ?.,") for part in _BORDERS.split(question)]
    parts = [part for part in parts if len(content(part)) >= 2]
    return parts if len(parts) > 1 else []


def investigate(
    search: Search,
    coverage: Coverage,
    question: str,
    split: Split = clauses,
    *,
    enough: float = ENOUGH,
    hops: int = HOPS,
    limit: int = 10,
) -> Investigation:
    """Search for a question; while it is covered too little, for what `split` makes of it and of what was found."""
    asked, rankings = [question], [search(question).hits]
    hits = rankings[0][:limit]
    covered = coverage(question, hits)
    for _ in range(hops):
        if covered >= enough:
            break
        new = [part for part in split(question, hits) if part.strip() and part not in asked][:QUESTIONS]
        if not new:
            break
        asked += new
        rankings += [search(part).hits for part in new]
        hits = _merged(rankings)[:limit]
        covered = coverage(question, hits)
    return Investigation(tuple(asked), tuple(hits), covered)


def _merged(rankings: Sequence[Sequence[Hit]]) -> tuple[Hit, ...]:
    """By reciprocal ranks: scores of different questions do not compare."""
    by_chunk = {hit.passage.id: hit for ranking in reversed(rankings) for hit in ranking}
    ranks = reciprocal_ranks([[hit.passage.id for hit in ranking] for ranking in rankings])
    return tuple(by_chunk[chunk] for chunk, _ in best(ranks, len(ranks)))
