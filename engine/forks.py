"""How forks are numbered, on either side of the border between a core and its clients: draws are keyed by it.

Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

_MASK64 = (1 << 64) - 1


def mix64(*values: int) -> int:
    """Hash integers into 64 bits: the finaliser of splitmix64 (Steele, Lea, Flood 2014), folded over the values."""
    state = 0
    for value in values:
        state = (state + (value & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state


def children_of(candidates: Sequence[Sequence[int]]) -> int:
    """How many children `score_jobs` makes: the sequence has forked so many times more."""
    longer = sum(len(candidate) > 1 for candidate in candidates)
    return longer + (longer < len(candidates))
