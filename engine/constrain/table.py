"""An automaton over tokens as a table: a mask is a copied row, a step is a search in a sorted list.

Knows nothing of how it was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from engine.constrain.matcher import Row
from engine.constrain.vocabulary import Vocabulary

ENDED = -1
_FEW = 64  # a state with more moves than this is a choice, not a text written in several ways


@dataclass(frozen=True)
class Table:
    """`masks[rows[s]]` are the bits of the tokens that state `s` takes, without the end; state 0 is the first.

    `starts[s]:starts[s + 1]` is the state's part of `tokens` (ascending) and `targets`.
    """

    masks: NDArray[np.int32]
    rows: NDArray[np.int32]
    final: NDArray[np.bool_]
    starts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    vocabulary: Vocabulary

    @property
    def size(self) -> int:
        return self.masks.nbytes + self.tokens.nbytes + self.targets.nbytes

    def matcher(self) -> TableMatcher:
        return TableMatcher(self)

    def next(self, state: int, token: int) -> int | None:
        """The state after a token; None where it may not come."""
        low, high = self.starts[state], self.starts[state + 1]
        at = low + int(np.searchsorted(self.tokens[low:high], token))
        return int(self.targets[at]) if at < high and self.tokens[at] == token else None

    def moves(self, state: int) -> int:
        """How many tokens the state takes."""
        return int(self.starts[state + 1] - self.starts[state])

    @cached_property
    def _forced(self) -> dict[int, list[int]]:
        return {}

    def forced(self, state: int) -> list[int]:
        """The tokens that must come from `state` on. Worked out once for each state that is asked about."""
        known = self._forced.get(state)
        if known is None:
            known = self._forced[state] = self._work_out(state)
        return known

    def _work_out(self, state: int) -> list[int]:
        """As the tokenizer writes the only text there is, up to where what comes after it might change that."""
        text, at = b"", state
        while not self.final[at] and (step := self._only_text(at)) is not None:
            text += step[0]
            at = step[1]
        written = self.vocabulary.tokenize(text)
        if not self.final[at] or self.moves(at):
            written = self.vocabulary.settled(text, written)
        tokens: list[int] = []
        at = state
        for token in written:
            following = self.next(at, token)
            if following is None:
                break
            tokens.append(token)
            at = following
        if not tokens and not self.final[state] and self.moves(state) == 1:
            return [int(self.tokens[self.starts[state]])]
        return tokens

    def _only_text(self, state: int) -> tuple[bytes, int] | None:
        """The shortest token, where all the others begin with it, and the state behind it."""
        low, high = self.starts[state], self.starts[state + 1]
        if not 0 < high - low <= _FEW:
            return None
        texts = [self.vocabulary.tokens[token] for token in self.tokens[low:high]]
        shortest = min(range(len(texts)), key=lambda i: len(texts[i]))
        if not all(text.startswith(texts[shortest]) for text in texts):
            return None
        return texts[shortest], int(self.targets[low + shortest])


class TableMatcher:
    """One text. See `Matcher`."""

    def __init__(self, table: Table, path: list[int] | None = None) -> None:
        self._table = table
        self._path = path or [0]  # states; ENDED after an end-of-sequence token

    def fill(self, row: Row) -> None:
        state, table = self._path[-1], self._table
        if state == ENDED:
            row[:] = 0
            return
        row[:] = table.masks[table.rows[state]]
        if table.final[state]:
            for token in table.vocabulary.eos:
                row[token >> 5] |= _BIT[token & 31]

    def accept(self, token: int) -> bool:
        state, table = self._path[-1], self._table
        if state == ENDED:
            return False
        if token in table.vocabulary.eos:
            following = ENDED if table.final[state] else None
        else:
            following = table.next(state, token)
        if following is None:
            return False
        self._path.append(following)
        return True

    def rollback(self, n: int) -> None:
        if not 0 <= n < len(self._path):
            raise ValueError(f"cannot roll back {n} of {len(self._path) - 1} tokens")
        del self._path[len(self._path) - n :]

    def forced(self) -> list[int]:
        return [] if self._path[-1] == ENDED else list(self._table.forced(self._path[-1]))

    def can_end(self) -> bool:
        return self._path[-1] != ENDED and bool(self._table.final[self._path[-1]])

    def must_end(self) -> bool:
        return self.can_end() and not self._table.moves(self._path[-1])

    def fork(self) -> Self:
        return type(self)(self._table, self._path.copy())


_BIT = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
