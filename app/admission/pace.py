"""Estimates an engine's step time by its counters: a fixed part, one for each token read, one for each written.

Weighted least squares with forgetting, held to what is not negative; before anything was seen, a small machine's guess.
Knows nothing of requests.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from engine.outputs import Stats

Three = tuple[float, float, float]

GUESS: Three = (0.005, 0.0005, 0.0005)  # seconds of a step, of a token read in it, of a token written in it
_TRUST: Three = (8.0, 300.0, 30.0)  # how many of each, in a second of steps, count as much as the guess
_MEMORY_S = 20.0  # of steps, after which what was seen counts a third


class Pace:
    """`step_s`, `read_s` and `write_s`, all in seconds."""

    def __init__(self) -> None:
        self._before: Stats | None = None
        self._products = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self.step_s, self.read_s, self.write_s = GUESS

    def seen(self, stats: Stats) -> None:
        """The engine's counters at this moment."""
        before, self._before = self._before, stats
        if before is None or (seconds := stats.step_seconds - before.step_seconds) <= 0:
            return
        written = stats.generated_tokens - before.generated_tokens
        read = max(0, stats.step_tokens - before.step_tokens - written)
        counts = np.array([stats.steps - before.steps, read, written], dtype=np.float64)
        kept = math.exp(-seconds / _MEMORY_S)
        self._sums = kept * self._sums + counts  # the weight is 1 / seconds: a variance grows with time
        self._products = kept * self._products + np.outer(counts, counts) / seconds
        self._fit()

    def answers_s(self, tokens: float, side_by_side: float) -> float:
        """Seconds in which answers that are written `side_by_side` gain so many tokens, all together."""
        return tokens * (self.step_s / max(1.0, side_by_side) + self.write_s)

    def _fit(self) -> None:
        """Solve for what may not be negative: a part that would be is 0, and the others explain the rest."""
        trust = np.square(_TRUST)
        products, sums = self._products + np.diag(trust), self._sums + trust * GUESS
        parts, found = [0, 1, 2], np.zeros(3)
        while parts:
            found[:] = 0.0
            found[parts] = np.linalg.solve(products[np.ix_(parts, parts)], sums[parts])
            if found.min() >= 0:
                break
            parts.remove(int(found.argmin()))
        self.step_s, self.read_s, self.write_s = map(float, found)
