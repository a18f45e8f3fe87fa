"""Sampling requests of a step, the sampled tokens, and the random keys of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.outputs import TokenLogprob
from engine.params import Sampling

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling parameters and state of one row. `position` is the sampled token's position in its sequence."""

    sampling: Sampling
    seed: int
    stream: int
    position: int
    counts: Mapping[int, int]  # generated tokens and their numbers of occurrences
    seen: Set[int]  # the tokens that the sequence has, for the repetition penalty
    banned: Set[int] = frozenset()  # tokens that may not be sampled now
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Token ids by row, and the log-probabilities of the rows that request them."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob]


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """Samples that a device may still be computing: `token_ids` (rows,) lie there, and `fetch` waits for all of it."""

    token_ids: Tensor
    fetch: Callable[[], SampledTokens]


_MASK64 = (1 << 64) - 1


def mix64(*values: int) -> int:
    """Hashes integers into 64 bits: the finaliser of splitmix64 (Steele, Lea, Flood 2014), folded over the values."""
    state = 0
    for value in values:
        state = (state + (value & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state


def children_of(candidates: Sequence[Sequence[int]]) -> int:
    """Returns how many children `score_jobs` makes: the sequence has forked so many times more."""
    longer = sum(len(candidate) > 1 for candidate in candidates)
    return longer + (longer < len(candidates) or not candidates)  # the value head is read on one
