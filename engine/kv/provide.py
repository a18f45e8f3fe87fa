"""Gives a sequence blocks to write to. Knows the pool and one sequence; nothing of who else wants blocks."""

from __future__ import annotations

from engine.kv.blocks import BlockPool, OutOfBlocks
from engine.sequence import SequenceState


def provide(seq: SequenceState, end: int, pool: BlockPool, size: int) -> tuple[int, int] | None:
    """Give the sequence writable blocks of `size` tokens for positions up to `end`; return a block copy that must
    precede.

    Raises:
        OutOfBlocks: there are too few; nothing has changed then.
    """
    if end <= seq.kv_len or end <= seq.writable:
        return None
    first = seq.kv_len // size  # the first block that is written to
    shared = first < len(seq.table) and pool.is_shared(seq.table[first])
    missing = max(0, -(-end // size) - len(seq.table))
    if pool.available < missing + shared:
        raise OutOfBlocks
    copy = None
    if shared:
        copy = (seq.table[first], pool.allocate())
        pool.release(seq.table[first : first + 1])
        seq.table[first] = copy[1]
        seq.moves += 1
    elif first < len(seq.table):
        pool.make_private(seq.table[first])
    if missing:
        seq.table.extend(pool.allocate() for _ in range(missing))
    seq.writable = len(seq.table) * size
    return copy
