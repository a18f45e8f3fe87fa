"""Repetition detection: whether a span's newest tokens are one pattern, again and again. Knows nothing of text."""

from __future__ import annotations

from collections import deque

from engine.params import RepetitionDetection


class RepetitionDetector:
    """Follows one span's tokens. Each costs one comparison for each size of pattern.

    A pattern of `n` tokens has been repeated `count` times when each of the newest `n * (count - 1)` tokens equals the
    one `n` tokens before it, so a run of such tokens is counted for every `n`.
    """

    def __init__(self, wanted: RepetitionDetection) -> None:
        self._sizes = range(wanted.min_pattern_size, wanted.max_pattern_size + 1)
        self._count = wanted.min_count
        self._recent = deque[int](maxlen=wanted.max_pattern_size)  # newest first
        self._runs = dict[int, int]()  # size of a pattern -> newest tokens that equal the ones that far before

    def push(self, token: int) -> bool:
        """Takes the span's next token. Returns whether the span now ends with a pattern repeated often enough."""
        runs = self._runs
        self._runs = {
            size: runs.get(size, 0) + 1
            for size, before in enumerate(self._recent, start=1)
            if before == token and size in self._sizes
        }
        self._recent.appendleft(token)
        return any(run >= size * (self._count - 1) for size, run in self._runs.items())

    def clear(self) -> None:
        """Forgets the tokens so far: no pattern reaches over this place."""
        self._recent.clear()
        self._runs.clear()
