"""How many tokens a step may have, so that those who decode beside a prefill do not wait long for their next token.

The time of a step is learnt as it runs: a fixed part and a part for each token. Knows nothing of sequences.
"""

from __future__ import annotations

STRETCH = 1.8  # without a goal: a step takes at most so many times what its decodes alone would take
LEAST = 16  # tokens of prefill in a step, whatever the goal: else a prompt would never be read
_FORGET = 0.98  # what an earlier step counts, for each later one
_LEARNT = 8  # steps before what was learnt is trusted


class Chunks:
    """`most` tokens a step, or fewer where decodes run: as many as `goal_s` seconds allow.

    Without a goal a step with decodes may take `STRETCH` times as long as they would take alone.
    """

    def __init__(self, most: int, goal_s: float | None = None, *, fixed: bool = False) -> None:
        """`fixed`: always `most`, whoever decodes."""
        self._most = most
        self._goal = goal_s
        self._fixed = fixed
        self._steps = 0
        # Weighted sums for the line seconds = a + b x tokens: of weights, tokens, seconds, tokens², tokens x seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def budget(self, decodes: int) -> int:
        """The tokens of a step in which so many sequences decode."""
        line = self.line
        if decodes == 0 or self._fixed or line is None:
            return self._most
        fixed, each = line
        goal = STRETCH * (fixed + each * decodes) if self._goal is None else self._goal
        allowed = (goal - fixed) / each if each > 0 else self._most
        return min(self._most, max(decodes + LEAST, int(allowed)))

    def ran(self, tokens: int, seconds: float) -> None:
        """A step ran so many tokens in so many seconds."""
        if tokens == 0:
            return
        self._steps += 1
        new = (1.0, float(tokens), seconds, float(tokens) ** 2, tokens * seconds)
        n, x, y, xx, xy = (_FORGET * old + add for old, add in zip(self._sums, new, strict=True))
        self._sums = (n, x, y, xx, xy)

    @property
    def token_s(self) -> float | None:
        """Seconds of each token of a step that has as many as it may; None while too little is known."""
        return None if self.line is None else self.line[0] / self._most + self.line[1]

    @property
    def line(self) -> tuple[float, float] | None:
        """Seconds of a step, and of each of its tokens; None while too little is known."""
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if self._steps < _LEARNT or spread <= 1e-9 * n * xx:
            return None
        each = max(0.0, (n * xy - x * y) / spread)
        return max(0.0, (y - each * x) / n), each
