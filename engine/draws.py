"""What a sampler is asked of one row, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from torch import Tensor

from engine.outputs import TokenLogprob
from engine.params import Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """What the sampler must know of one row. `position` is where the drawn token will stand in its sequence."""

    sampling: Sampling
    seed: int
    stream: int
    position: int
    counts: Mapping[int, int]  # generated tokens and how often each occurred
    seen: Set[int]  # the tokens that the sequence has, for the repetition penalty
    banned: Set[int] = frozenset()  # tokens that may not be drawn now
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Token ids by row, and the log-probabilities of those rows that asked for them."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprob]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Draws that a device was told of: `token_ids` (rows,) lie there, and `fetch` waits for all of it."""

    token_ids: Tensor
    fetch: Callable[[], Drawn]
