"""Drafts in a step's rows: their blocks, their recurrent states, and what is kept of both once they are verified.

A draft's K/V is written behind the sequence's own, so what is not accepted is overwritten. Of a token tree the accepted
path's K/V then moves to where it would lie without the tree: `take_moves`. A recurrent state cannot go
back: the row runs on a copy, which becomes the live state if all of the draft is accepted. Else the sequence goes on
from the state before the row, and its next row runs the accepted tokens again, without a draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.step import Row
from engine.core.token_tree import Tree
from engine.kv_cache.allocation import allocate
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.state_checkpoints import StateCheckpoints


class DraftRows:
    """Adds drafts to rows, and settles them. `size`: tokens of a block."""

    def __init__(
        self, pool: BlockPool, size: int, states: StateCheckpoints | None, groups: KVGroups | None = None
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._width = groups.width if groups else 1
        self._size = size
        self._states = states
        self._moves: list[tuple[int, int]] = []

    def add(self, row: Row, draft: Tree, most: int, spare: int) -> int:
        """Adds at most `most` tokens to a row that reaches its sequence's end, as far as they need no blocks of others
        and leave `spare` ones free. Returns how many."""
        seq, states = row.seq, self._states
        if row.end != len(seq) or row.logits == 0:
            return 0
        free = max(0, self._pool.available - spare * self._width) // self._width
        room = (len(seq.table) + free) * self._size - row.end
        tokens, parents = draft
        count = min(len(tokens), most, room)
        if states is not None:
            count = min(count, states.before_boundary(row.end))
        if count <= 0:
            return 0
        if states is not None:
            copied = states.begin_draft(seq, spare) if row.count == 1 and row.state_copy is None else None
            if copied is None:
                return 0
            row.state, row.state_copy = copied[1], copied
        allocate(seq, row.end + count, self._pool, self._size, self._groups)
        row.draft, row.parents = tokens[:count], parents[:count]
        return count

    def accept(self, row: Row, path: Sequence[int]) -> bool:
        """Settles the K/V and the state of a row of whose draft the tokens `path` were right. Returns whether the state
        stands for them: else the tokens from the row's start on run again."""
        self._moves += [(self._slot(row, at), self._slot(row, to)) for to, at in enumerate(path) if at != to]
        if self._states is None:
            return True
        count = len(path)
        whole = count == len(row.draft)
        self._states.end_draft(row.seq, row.state, row.end + count if whole else None)
        return whole

    def take_moves(self) -> list[tuple[int, int]]:
        """Returns the slots (source, destination) of K/V to copy before anything reads or writes any; none the second
        time."""
        moves, self._moves = self._moves, []
        return moves

    def _slot(self, row: Row, node: int) -> int:
        block, offset = divmod(row.end + node, self._size)
        return row.seq.table[block] * self._size + offset

    def drop(self, row: Row) -> None:
        """Gives up a row's draft that is not verified."""
        if self._states is not None and row.draft:
            self._states.end_draft(row.seq, row.state, None)
