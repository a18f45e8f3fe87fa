"""Hits that say the same are shown once: overlapping pieces of one passage, and copies of it in other documents."""

from __future__ import annotations

from itertools import pairwise

from retrieval.lexical import terms
from retrieval.records import Hit

SAME = 0.85  # of the shorter one's word pairs
WITHIN = 0.6  # of the shorter one's characters, where both are of one document


def distinct(hits: list[Hit], count: int) -> list[Hit]:
    """The first `count` hits that do not repeat one before them."""
    kept = list[Hit]()
    pairs = list[frozenset[tuple[str, str]]]()
    for hit in hits:
        mine = _pairs(hit.passage.text)
        if not any(_repeats(hit, mine, other, theirs) for other, theirs in zip(kept, pairs, strict=True)):
            kept.append(hit)
            pairs.append(mine)
            if len(kept) == count:
                break
    return kept


def _repeats(hit: Hit, mine: frozenset[tuple[str, str]], other: Hit, theirs: frozenset[tuple[str, str]]) -> bool:
    a, b = hit.passage, other.passage
    if a.document == b.document:
        shared = min(a.end, b.end) - max(a.start, b.start)
        return shared >= WITHIN * min(a.end - a.start, b.end - b.start)
    shorter = min(len(mine), len(theirs))
    return shorter > 0 and len(mine & theirs) >= SAME * max(len(mine), len(theirs))


def _pairs(text: str) -> frozenset[tuple[str, str]]:
    words = terms(text)
    return frozenset(pairwise(words)) or frozenset((word, "") for word in words)
