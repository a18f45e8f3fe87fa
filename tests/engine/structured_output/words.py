"""Constraints whose whole language is a list of token sequences: slow, obvious, and with no library behind them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from engine.structured_output.matcher import Row


class Words:
    """A compiled constraint: exactly these words, each ended by `eos`."""

    size = 1

    def __init__(self, words: Iterable[Sequence[int]], eos: int) -> None:
        self.words = [tuple(word) for word in words]
        self.eos = eos

    def matcher(self) -> WordMatcher:
        return WordMatcher(self, ())


class WordMatcher:
    def __init__(self, of: Words, taken: tuple[int, ...]) -> None:
        self._of = of
        self._taken = taken

    def following(self) -> set[int]:
        at = len(self._taken)
        whole = [(*word, self._of.eos) for word in self._of.words]
        return {word[at] for word in whole if word[:at] == self._taken and at < len(word)}

    def fill(self, row: Row) -> None:
        row[:] = 0
        for token in self.following():
            row[token >> 5] |= np.uint32(1 << (token & 31)).astype(np.int32)

    def accept(self, token: int) -> bool:
        if token not in self.following():
            return False
        self._taken += (token,)
        return True

    def rollback(self, n: int) -> None:
        assert n <= len(self._taken)
        self._taken = self._taken[: len(self._taken) - n]

    def forced(self) -> list[int]:
        ahead = WordMatcher(self._of, self._taken)
        forced: list[int] = []
        while len(following := ahead.following()) == 1 and following != {self._of.eos}:
            forced += following
            ahead.accept(forced[-1])
        return forced

    def can_end(self) -> bool:
        return self._of.eos in self.following()

    def must_end(self) -> bool:
        return self.following() == {self._of.eos}

    def fork(self) -> Self:
        return type(self)(self._of, self._taken)


def allowed(row: Row, vocabulary: int) -> set[int]:
    """The tokens whose bits are set."""
    return {token for token in range(vocabulary) if row[token >> 5] >> (token & 31) & 1}
