"""Requests to measure with: prompts and answers of mixed lengths, the same for every contestant of a run."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    prompt: tuple[int, ...]
    new_tokens: int  # generated exactly, end of sequence or not


def mixed(count: int, vocab: int, *, seed: int = 0, longest: int = 512) -> list[Request]:
    """`count` requests whose lengths spread as chat's do: log-normal, prompts around 100 tokens, answers around 80.

    `longest` bounds prompt and answer together, for models with a short context.
    """
    rng = random.Random(seed)

    def length(median: float, spread: float, low: int, high: int) -> int:
        return max(low, min(high, round(rng.lognormvariate(0, spread) * median)))

    requests = []
    for _ in range(count):
        new = length(80, 0.7, 8, longest // 2)
        prompt = length(100, 0.8, 4, longest - new)
        requests.append(Request(tuple(rng.randrange(10, vocab) for _ in range(prompt)), new))
    return requests
