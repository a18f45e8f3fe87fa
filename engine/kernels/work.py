"""Cuts the attention of one step into pieces of like size: which queries meet which keys, and where parts are merged.

The one idea: a decode, a chunk of a prompt, a part of a long context and a prefix that many rows share are the same
thing, some queries against a range of keys in one block table. So there is one kernel, and split-KV (Dao et al. 2023,
flash-decoding) and cascade attention (Ye et al. 2024) are decided here, on the host, with numpy, once a step for all
layers. Knows shapes and block tables; nothing of tensors or of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

# Columns of a piece: its queries are `order[first_query : first_query + queries]`; they meet the keys at positions
# `first_key` to `end_key - 1` of the block table that begins at `table` in the list of all tables' blocks. The result
# goes to the output if `slot` is -1, else query i's goes to part `slot + i`.
FIRST_QUERY, QUERIES, TABLE, FIRST_KEY, END_KEY, SLOT = range(6)
COLUMNS = 6

TILE_KEYS = 64  # a piece begins at a multiple of this, so that tiles lie alike in every batch
SMALL_TILE = 16  # queries times heads that share a K/V head, of a small piece: the least that the matrix units take
MIN_KEYS = 128  # of a piece: below it, merging costs more than it saves
MIN_SHARED_KEYS = 256  # the same of a large piece, which leaves a part for each of its queries
SHARED_KEYS = 256  # that a prefix must save, over all rows that share it, to be read once for them together


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """Limits by which pieces are cut for one device and model.

    `group_heads` query heads share a K/V head; `large_tile` is the number of rows (queries times those heads) of a
    large piece, `pieces` the number that keeps the device busy. With `fixed_keys`, pieces are cut after so many keys in
    every step: then a row is summed up in the same order in every batch. Windows that are `chunked` begin at their last
    multiple, and not at so many keys before the query.
    """

    group_heads: int
    pieces: int
    large_tile: int = 64
    fixed_keys: int | None = None
    cascade: bool = True
    chunked: bool = False

    def first_tile(self, positions: NDArray[np.int64], window: int) -> NDArray[np.int64]:
        """Returns where the tile of keys begins in which a window's first key of each query lies."""
        first = positions - positions % window if self.chunked else np.maximum(0, positions - window + 1)
        return first // TILE_KEYS * TILE_KEYS

    @property
    def small_queries(self) -> int:
        return max(1, SMALL_TILE // self.group_heads)

    @property
    def large_queries(self) -> int:
        return max(1, self.large_tile // self.group_heads)


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One step's attention, for layers of one window.

    `blocks` are those of all tables. `small` and `large` are (pieces, COLUMNS), `small_rows` and `large_rows` the rows
    whose tables they read; `order` lists tokens of the batch. Token `merged[i]` is put together from the parts
    `parts[starts[i] : starts[i + 1]]`; there are `slots` parts in all.
    """

    blocks: Ints
    small: Ints
    large: Ints
    order: Ints
    merged: Ints
    starts: Ints
    parts: Ints
    slots: int
    small_rows: Ints
    large_rows: Ints
    table: int = 0  # as `Rows`


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step: `starts` (rows + 1,) tokens of the batch, `contexts` (rows,) tokens up to the row's last."""

    starts: NDArray[np.int64]
    contexts: NDArray[np.int64]
    tables: NDArray[np.int64]  # (rows, blocks)
    block_size: int
    # of branches of token trees: (rows,) positions from which K/V lies at slots of its own, (rows, tokens), and not in
    # the table; the row's context where there are none
    branches: tuple[Sequence[int], NDArray[np.int64]] | None = None
    last_keys: NDArray[np.int64] | None = None  # (tokens,) the last position that each attends to; None: its own
    table: int = 0  # the K/V group of the tables: on the device their blocks come after those of as many others

    def listed(self) -> tuple[Ints, NDArray[np.int64]]:
        """Returns all tables' blocks one after the other, and the offset of each row's first among those of all K/V
        groups. With branches, before a row's blocks are the position where its own slots begin and the number of the
        blocks, and after them the slots."""
        blocks, offsets = self._listed()
        return blocks, offsets + self.table * len(blocks)

    def _listed(self) -> tuple[Ints, NDArray[np.int64]]:
        counts = -(-self.contexts // self.block_size)
        if self.branches is not None:
            parts = [
                np.concatenate([[begin, blocks], table[:blocks], slots[: context - begin]])
                for begin, blocks, table, slots, context in zip(
                    self.branches[0], counts, self.tables, self.branches[1], self.contexts, strict=True
                )
            ]
            sizes = np.array([len(part) for part in parts])
            return np.concatenate(parts).astype(np.int32), np.cumsum(sizes) - sizes + 2
        count, width = len(self.tables), int(counts.max(initial=0))
        if count * width <= 2 * counts.sum():  # copying padding costs less than leaving it out
            return self.tables[:, :width].astype(np.int32).ravel(), np.arange(count) * width
        used = np.arange(width) < counts[:, None]
        return self.tables[:, :width][used].astype(np.int32), np.cumsum(counts) - counts


def cut(rows: Rows, limits: WorkLimits, window: int | None = None) -> AttentionWork:
    """Cuts the pieces of a step. A window of w lets the query at position p see the keys p - w + 1 to p, or, where
    windows are chunks, those from the last multiple of w.

    Queries of a row follow one another and end at its context.
    """
    queries = np.diff(rows.starts)
    decodes = np.flatnonzero(queries == 1)
    uncut = _prompts(rows, np.flatnonzero(queries > 1), limits, window)
    order = [np.arange(rows.starts[-1])]
    if limits.cascade and limits.fixed_keys is None and window is None and len(decodes) > 1:
        begin, shared = _shared(rows, decodes, limits)
        at = int(rows.starts[-1])
        for members, first, end in shared:
            order.append(rows.starts[members])
            max_queries = limits.large_queries
            for done in range(0, len(members), max_queries):
                count = min(max_queries, len(members) - done)
                uncut.append(np.array([[at + done, count, members[0], first, end, 1]]))
            at += len(members)
    else:
        begin = np.zeros(len(decodes), dtype=np.int64)
        if window is not None:
            begin = limits.first_tile(rows.contexts[decodes] - 1, window)
    if len(decodes):
        few = np.zeros((len(decodes), COLUMNS), dtype=np.int64)
        few[:, FIRST_QUERY] = rows.starts[decodes]
        few[:, QUERIES] = 1
        few[:, TABLE] = decodes
        few[:, FIRST_KEY] = begin
        few[:, END_KEY] = rows.contexts[decodes]
        few[:, SLOT] = limits.fixed_keys is not None  # one size of tile, so that sums are made alike
        uncut.append(few)
    tasks = np.concatenate(uncut) if uncut else np.zeros((0, COLUMNS), dtype=np.int64)
    return _divided(tasks, rows, np.concatenate(order), limits)


def grown(work: AttentionWork, rows: Rows) -> AttentionWork:
    """Returns `work` a token later: the same decodes, each of whose contexts has one more key, in the pieces that there
    were.

    For steps in between: after some, pieces should be cut anew.
    """
    blocks, offsets = rows.listed()
    small, large = work.small.copy(), work.large.copy()
    small[:, TABLE], large[:, TABLE] = offsets[work.small_rows], offsets[work.large_rows]
    small[:, END_KEY] += small[:, END_KEY] == rows.contexts[work.small_rows] - 1  # a row's last
    return replace(work, blocks=blocks, small=small, large=large)


def _prompts(rows: Rows, some: NDArray[np.int64], limits: WorkLimits, window: int | None) -> list[NDArray[np.int64]]:
    """Cuts tiles of queries of rows with several. The last column is 1 for a large tile."""
    found = []
    for row in some.tolist():
        first, end = int(rows.starts[row]), int(rows.starts[row + 1])
        few = limits.fixed_keys is None and end - first <= limits.small_queries
        max_queries = limits.small_queries if few else limits.large_queries
        at = np.arange(first, end, max_queries)
        until = np.minimum(at + max_queries, end)
        position = rows.contexts[row] - end  # of the token t of the batch: t + position
        tiles = np.zeros((len(at), COLUMNS), dtype=np.int64)
        tiles[:, FIRST_QUERY] = at
        tiles[:, QUERIES] = until - at
        tiles[:, TABLE] = row
        if window is not None:
            tiles[:, FIRST_KEY] = limits.first_tile(at + position, window)
        tiles[:, END_KEY] = until + position
        if rows.last_keys is not None:
            tiles[:, END_KEY] = 1 + np.maximum.reduceat(rows.last_keys[first:end], at - first)
        tiles[:, SLOT] = not few
        found.append(tiles)
    return found


Shared = tuple[NDArray[np.int64], int, int]  # rows, and the range of keys that all of them have in the same blocks


def _shared(rows: Rows, decodes: NDArray[np.int64], limits: WorkLimits) -> tuple[NDArray[np.int64], list[Shared]]:
    """Finds prefixes that decode rows share, as deep as they go, and the key from which each row is on its own."""
    begin = np.zeros(len(rows.contexts), dtype=np.int64)
    found: list[Shared] = []
    own = rows.contexts - 1  # a row's last key is its own: it was just written
    if rows.branches is not None:
        own = np.minimum(own, rows.branches[0])
    whole = own // rows.block_size

    def descend(members: NDArray[np.int64], start: int, depth: int) -> None:
        """`members` share all blocks below `depth`; the keys before block `start` are assigned."""
        max_depth = int(whole[members].min())
        tables = rows.tables[members, depth:max_depth]
        differ = np.flatnonzero((tables != tables[0]).any(0))
        depth += int(differ[0]) if len(differ) else max_depth - depth
        end = depth * rows.block_size // TILE_KEYS * TILE_KEYS
        if (end - start) * (len(members) - 1) >= SHARED_KEYS:
            found.append((members, start, end))
            begin[members] = start = end
        if depth < max_depth:
            apart(members, start, depth)
            return
        longer = members[whole[members] > depth]
        if len(longer) > 1:
            apart(longer, start, depth)

    def apart(members: NDArray[np.int64], start: int, depth: int) -> None:
        heads, which, counts = np.unique(rows.tables[members, depth], return_inverse=True, return_counts=True)
        for at in np.flatnonzero(counts > 1) if len(heads) < len(members) else ():
            descend(members[which == at], start, depth)

    apart(decodes[whole[decodes] > 0], 0, 0)
    return begin[decodes], found


def _divided(tasks: NDArray[np.int64], rows: Rows, order: NDArray[np.int64], limits: WorkLimits) -> AttentionWork:
    """Splits tasks with many keys, and assigns the parts of each query to be merged.

    On entry SLOT says whether a task is a large tile.
    """
    first, keys = tasks[:, FIRST_KEY], tasks[:, END_KEY] - tasks[:, FIRST_KEY]
    tiles = -(-keys // TILE_KEYS)
    if limits.fixed_keys is not None:
        each = np.array(limits.fixed_keys // TILE_KEYS)
        cut_from = first // limits.fixed_keys * limits.fixed_keys  # pieces end where they do in every batch
    else:
        min_tiles = np.where(tasks[:, SLOT] == 1, MIN_SHARED_KEYS, MIN_KEYS) // TILE_KEYS
        each = np.maximum(min_tiles, -(-int(tiles.sum()) // max(1, limits.pieces)))
        cut_from = first
    step = np.broadcast_to(each * TILE_KEYS, len(tasks))
    counts = np.maximum(1, -(-(tasks[:, END_KEY] - cut_from) // step))
    of = np.repeat(np.arange(len(tasks)), counts)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces = tasks[of]
    pieces[:, FIRST_KEY] = np.maximum(first[of], cut_from[of] + nth * step[of])
    pieces[:, END_KEY] = np.minimum(tasks[of, END_KEY], cut_from[of] + (nth + 1) * step[of])
    large = pieces[:, SLOT] == 1
    # a query in several pieces is merged; one in a single piece is written at once
    per_piece = pieces[:, QUERIES]
    places = np.repeat(np.arange(len(pieces)), per_piece)
    offset = np.arange(len(places)) - np.repeat(np.cumsum(per_piece) - per_piece, per_piece)
    token = order[pieces[places, FIRST_QUERY] + offset]
    met = np.bincount(token)
    several = np.zeros(len(pieces), dtype=bool)
    np.logical_or.at(several, places, met[token] > 1)
    taken = np.where(several, per_piece, 0)
    pieces[:, SLOT] = np.where(several, np.cumsum(taken) - taken, -1)
    parted = several[places]
    part, of_token = (pieces[places, SLOT] + offset)[parted], token[parted]
    by_token = np.argsort(of_token, kind="stable")
    merged, each_parts = np.unique(of_token, return_counts=True)
    order_of = np.argsort(-(pieces[:, END_KEY] - pieces[:, FIRST_KEY]), kind="stable")  # the longest begin first
    large = large[order_of]
    pieces = pieces[order_of].astype(np.int32)
    table_rows = pieces[:, TABLE].copy()
    blocks, offsets = rows.listed()
    pieces[:, TABLE] = offsets[table_rows]
    return AttentionWork(
        blocks=blocks,
        small=pieces[~large],
        large=pieces[large],
        order=order.astype(np.int32),
        merged=merged.astype(np.int32),
        starts=np.concatenate([[0], np.cumsum(each_parts)]).astype(np.int32),
        parts=part[by_token].astype(np.int32),
        slots=int(taken.sum()),
        small_rows=table_rows[~large],
        large_rows=table_rows[large],
        table=rows.table,
    )
