"""Two rankings into one. Both are functions of plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DENSE_SHARE = 0.5


def min_max(scores: Mapping[int, float]) -> dict[int, float]:
    """Scores stretched to 0…1; all 1 where they are equal."""
    if not scores:
        return {}
    low, high = min(scores.values()), max(scores.values())
    return {key: (score - low) / (high - low) if high > low else 1.0 for key, score in scores.items()}


def weighted(dense: Mapping[int, float], lexical: Mapping[int, float], share: float = DENSE_SHARE) -> dict[int, float]:
    """The weighted sum of both, each stretched to 0…1; who is in one list only has nothing from the other."""
    a, b = min_max(dense), min_max(lexical)
    return {key: share * a.get(key, 0.0) + (1 - share) * b.get(key, 0.0) for key in a.keys() | b.keys()}


def reciprocal_ranks(rankings: Sequence[Sequence[int]], k: int = 60) -> dict[int, float]:
    """Reciprocal rank fusion (Cormack et al., 2009), for scores that do not compare."""
    made: dict[int, float] = {}
    for ranking in rankings:
        for rank, key in enumerate(ranking, 1):
            made[key] = made.get(key, 0.0) + 1 / (k + rank)
    return made


def best(scores: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    """The highest, best first; equal ones by number, so that an order is never chance."""
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:count]
