"""A step's tokens and their K/V, divided by position among the ranks of a ring (context parallel).

Every rank has an equal part of each K/V block: of blocks of 16 tokens over two ranks, 8 and 8. A token is computed
where its K/V lies. So a prompt's tokens are striped over the ranks, which balances the causal mask (striped attention,
Brandon et al. 2023), and the scheduler's blocks, tables and copies are those of one device. Knows batches and block
tables; nothing of weights or of sending.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from engine.kv_cache.block_pool import NULL_BLOCK
from engine.model.attention import AttentionPlan
from engine.model.batch import Batch

RingKind = Literal["auto", "pass-kv", "pass-q"]  # auto: by `passes_queries`
PARTIAL_BYTES = 4  # of a number of partial attention, which is float32


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of one layer on one rank; `itemsize` is bytes of a number."""

    heads: int
    kv_heads: int
    width: int
    itemsize: int

    @property
    def query_bytes(self) -> int:
        """Returns the bytes that pass-Q sends for a token, to another rank and back: its queries, its partial attention
        and the logs of that one's sums."""
        return self.heads * (self.width * self.itemsize + (self.width + 1) * PARTIAL_BYTES)

    @property
    def kv_bytes(self) -> int:
        """Returns the bytes that pass-K/V sends to another rank for a token: its keys and values."""
        return 2 * self.kv_heads * self.width * self.itemsize


def passes_queries(queries: int, keys: int, shape: HeadShape) -> bool:
    """Returns whether pass-Q sends no more bytes than pass-K/V for a row of so many queries and keys (Yang et al.
    2024). A single query is always passed: its time is that of reading its keys, which pass-Q divides among the
    ranks."""
    return queries == 1 or queries * shape.query_bytes <= keys * shape.kv_bytes


@dataclass(frozen=True, slots=True, eq=False)
class RowKeys:
    """Rows that are attended to together, and the blocks that they attend to: either one row of any number of queries,
    or several of one query.

    `tokens` finds their queries in what a rank is given. `rows` and `columns`, (rows, blocks), index a block table;
    columns beyond a row's own blocks are hidden from it. `positions` are the queries', (rows, queries, 1).
    """

    tokens: Tensor
    rows: Tensor
    columns: Tensor
    positions: Tensor

    def blocks(self, table: Tensor) -> Tensor:
        """Returns the blocks, (rows, blocks), of a block table."""
        found = table[self.rows[:, None], self.columns.clamp(max=table.shape[1] - 1)]
        return found.masked_fill(self.columns >= table.shape[1], NULL_BLOCK)


@dataclass(frozen=True, slots=True)
class RingRows:
    """The rows of a step as one window sees them, by the kind of their attention.

    Of pass-K/V: `passed`, whose `tokens` are places among this rank's tokens. Of pass-Q: `own` are such places, too,
    `counts` all ranks' numbers of queries, and `tokens` of `queried` are places among these, rank by rank.
    """

    passed: tuple[RowKeys, ...]
    queried: tuple[RowKeys, ...]
    own: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row as one window sees it: from its block `first` on, `count` blocks matter."""

    index: int
    queries: int
    first: int
    count: int


class ContextDivision:
    """The division of one step among the `ranks` of a ring, of which this is number `rank`. Each has `part` tokens of a
    block."""

    def __init__(self, batch: Batch, part: int, rank: int, ranks: int, kind: RingKind = "auto") -> None:
        assert batch.branches is None and batch.features is None, "see `check_parallel`, and `engine.builder`"
        self._batch, self._part, self._kind = batch, part, kind
        self._rank, self._size = rank, part * ranks
        owner = batch.positions % self._size // part
        self._tokens = [(owner == each).nonzero().flatten() for each in range(ranks)]
        self._rows: dict[tuple[int | None, HeadShape], RingRows] = {}
        self._masks: dict[tuple[int | None, RowKeys, int], Tensor] = {}

    @property
    def own(self) -> Tensor:
        """Returns this rank's tokens of the step, ascending."""
        return self._tokens[self._rank]

    @cached_property
    def wanted(self) -> list[Tensor]:
        """Returns each rank's tokens whose logits are needed, as places among its own."""
        needed = torch.zeros(len(self._batch.token_ids), dtype=torch.bool)
        needed[self._batch.logits_at] = True
        return [needed[each].nonzero().flatten() for each in self._tokens]

    def in_order(self, states: Tensor) -> Tensor:
        """Returns states that came rank by rank, as `wanted` has them, in the order of the batch's `logits_at`."""
        came = torch.cat([each[at] for each, at in zip(self._tokens, self.wanted, strict=True)])
        return states[self._places(came)[self._batch.logits_at]]

    def shard(self) -> ContextShard:
        """Returns this rank's batch. One without a token runs a token that writes to the null block."""
        batch, own = self._batch, self.own
        ids, positions = batch.token_ids[own], batch.positions[own]
        if not len(own):
            ids = positions = own.new_zeros(1)
        return ContextShard(
            ids,
            positions,
            self._local(batch.slots),
            (0,) * len(batch.query_starts),
            batch.context_lens,
            batch.block_tables,
            self.wanted[self._rank],
            in_place=False,
            windowed=tuple((table, self._local(slots)) for table, slots in batch.windowed),
            first_key=batch.first_key,
            division=self,
        )

    def rows(self, plan: AttentionPlan, window: int | None, shape: HeadShape) -> RingRows:
        """Returns the rows for layers of this window and heads."""
        if (window, shape) not in self._rows:
            self._rows[window, shape] = self._planned(plan, window, shape)
        return self._rows[window, shape]

    def mask(self, keys: RowKeys, source: int, plan: AttentionPlan, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns the additive mask of the keys that rank `source` has, (rows, queries, keys).

        Hidden ones have a large negative number: where a rank has no key that a query sees, its part counts nothing
        beside others, and is no NaN.
        """
        if (window, keys, source) not in self._masks:
            starts = keys.columns * self._size + source * self._part
            key = (starts[:, :, None] + torch.arange(self._part)).flatten(1)[:, None]
            hidden = (key > keys.positions) | (key < self._batch.first_key)
            if window is not None:
                hidden |= key < plan.first_key(keys.positions, window)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min / 2)
            self._masks[window, keys, source] = mask
        return self._masks[window, keys, source]

    # -- parts

    def _local(self, slots: Tensor) -> Tensor:
        """Returns the slots of this rank's tokens in its part of the blocks."""
        own = slots[self.own] if len(self.own) else slots.new_zeros(1)
        return own // self._size * self._part + own % self._part

    def _places(self, tokens: Tensor) -> Tensor:
        """Returns of each token of the step its place among `tokens`; of others any number."""
        places = torch.zeros(len(self._batch.token_ids), dtype=torch.int64)
        places[tokens] = torch.arange(len(tokens))
        return places

    def _planned(self, plan: AttentionPlan, window: int | None, shape: HeadShape) -> RingRows:
        batch, starts = self._batch, self._batch.query_starts
        passed, queried = list[_Row](), list[_Row]()
        for index, context in enumerate(batch.context_lens):
            queries = starts[index + 1] - starts[index]
            if not queries:
                continue
            seen = 0 if window is None else plan.first_key(context - queries, window)
            first = max(0, batch.first_key, seen) // self._size
            row = _Row(index, queries, first, -(-context // self._size) - first)
            by_queries = passes_queries(queries, row.count * self._size, shape)
            if self._kind != "auto":
                by_queries = self._kind == "pass-q"
            (queried if by_queries else passed).append(row)
        given = [self._of_rows(each, queried) for each in self._tokens]
        mine, all_given = self._places(self.own), self._places(torch.cat(given))
        alike: dict[tuple[int, int], list[_Row]] = {}  # of one query and about as many blocks: one call
        for row in queried:
            alike.setdefault((0, row.count.bit_length()) if row.queries == 1 else (1, row.index), []).append(row)
        everything = torch.arange(len(batch.token_ids))
        return RingRows(
            tuple(self._keys([row], self._of_rows(self.own, [row]), mine) for row in passed),
            tuple(self._keys(rows, self._of_rows(everything, rows), all_given) for rows in alike.values()),
            mine[given[self._rank]],
            tuple(len(each) for each in given),
        )

    def _of_rows(self, tokens: Tensor, rows: list[_Row]) -> Tensor:
        """Returns those of `tokens`, which ascend, that are of the rows."""
        starts = self._batch.query_starts
        borders = [[starts[row.index], starts[row.index + 1]] for row in rows]
        bounds = torch.searchsorted(tokens, torch.tensor(borders, dtype=torch.int64)).tolist()
        return torch.cat([tokens[:0], *(tokens[first:end] for first, end in bounds)])

    def _keys(self, rows: list[_Row], tokens: Tensor, places: Tensor) -> RowKeys:
        firsts = torch.tensor([row.first for row in rows])
        columns = firsts[:, None] + torch.arange(max(row.count for row in rows))
        index = torch.tensor([row.index for row in rows])
        count = len(tokens) // len(rows)
        return RowKeys(places[tokens], index, columns, self._batch.positions[tokens].view(len(rows), count, 1))


@dataclass(frozen=True, slots=True)
class ContextShard(Batch):
    """A rank's tokens of a step. Its rows have no queries: attention over them is of the whole step, by `division`."""

    division: ContextDivision | None = None
