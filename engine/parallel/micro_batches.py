"""Micro-batches of a step: while a stage runs one, the next stage runs the one before (GPipe, Huang et al. 2019).

Knows batches alone. A row that is cut goes on in the next micro-batch, whose queries see the K/V that the first one
wrote, as with chunked prefill.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import replace

from engine.model.batch import Batch, Branches


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """Splits a step into at most `count` parts of about as many tokens, in order. Rows with token trees stay whole."""
    assert not batch.windowed, "one block table serves all layers, see `memory.kv_groups`"
    tokens = len(batch.token_ids)
    bounds = [tokens * at // count for at in range(count + 1)]
    if batch.branches is not None:
        starts = batch.query_starts
        bounds = [starts[bisect_right(starts, bound) - 1] for bound in bounds]
    distinct = sorted(set(bounds))
    return [_part(batch, first, end) for first, end in itertools.pairwise(distinct)]


def _part(batch: Batch, first: int, end: int) -> Batch:
    """Returns tokens [first, end) of a batch."""
    starts, some = batch.query_starts, slice(first, end)
    rows = slice(bisect_right(starts, first) - 1, bisect_right(starts, end - 1))
    ends = [min(end, each) for each in starts[rows.start + 1 : rows.stop + 1]]
    contexts = [
        context - (whole - cut)
        for context, whole, cut in zip(
            batch.context_lens[rows], starts[rows.start + 1 : rows.stop + 1], ends, strict=True
        )
    ]
    wanted = batch.logits_at[(batch.logits_at >= first) & (batch.logits_at < end)] - first
    branches = batch.branches
    return replace(
        batch,
        token_ids=batch.token_ids[some],
        positions=batch.positions[some],
        slots=batch.slots[some],
        query_starts=(0, *(each - first for each in ends)),
        context_lens=tuple(contexts),
        block_tables=batch.block_tables[rows],
        logits_at=wanted,
        branches=None if branches is None else Branches(branches.starts[rows], branches.slots[rows]),
    )
