"""Frees the K/V of what an endless sequence forgets, and moves what stays to its new positions (StreamingLLM).

A sequence's `tokens` are those that it sees, so their indices are their positions in the cache, and nothing else that
runs a sequence knows of this. While it generates, kept keys are rotated back by the distance that they move, in place,
or on copies of blocks that others share. That K/V depends on forgotten tokens, so no digest of tokens names it: it is
never published. Where it is lost, and where the text grew by tokens that were given, what is seen is computed as a text
of its own, which is published like any. Knows tables and blocks, and no tensors.
"""

from __future__ import annotations

from engine.core.request import SequenceState
from engine.core.step import KVMove
from engine.kv_cache.block_pool import BlockPool


def shift_context(
    seq: SequenceState, pool: BlockPool, size: int, held: list[tuple[int, ...]]
) -> KVMove | None:  # fmt: skip
    """Makes an endless sequence forget what its window has passed. Returns the move that must precede its next row;
    None where there is none to make, as no K/V behind the forgotten tokens exists, or the pool has no blocks for copies
    of shared ones: it is computed then. `held` gets blocks that are copied from, until the step has run."""
    assert seq.streaming is not None
    count = seq.streaming.forgotten(seq.text_len) - len(seq.forgotten)
    if count <= 0:
        return None
    first, gone = seq.streaming.sinks // size, count // size
    seq.kv_len = end = min(seq.cursor, seq.kv_len)
    pool.release(seq.trim(size))
    pool.release(seq.table[first : first + gone])
    kept = seq.table[first + gone :]
    del seq.table[first:]
    shared = [block for block in kept if pool.is_shared(block)]
    if pool.available < len(shared):
        pool.release(kept)
        kept, shared = [], []
    seq.forget(count, size)
    if not kept:
        _compute_again(seq, end - count)
        return None
    for block in kept:
        if block in shared:
            seq.table.append(pool.allocate())
        else:
            pool.make_private(block)
            seq.table.append(block)
    if shared:
        held.append(tuple(shared))
    seq.kv_len = seq.cursor = end - count
    seq.moved = True
    return KVMove(seq.streaming.sinks, seq.kv_len, -count, tuple(kept))


def forget_for_job(seq: SequenceState, pool: BlockPool, size: int) -> None:
    """Makes an endless sequence forget what its window has passed before a job begins. K/V behind the sinks is dropped:
    given tokens are many, and what is seen of them is computed as a text of its own."""
    if seq.streaming is None or (count := seq.streaming.forgotten(seq.text_len) - len(seq.forgotten)) <= 0:
        return
    end = seq.kv_len
    pool.release(seq.table[seq.streaming.sinks // size :])
    del seq.table[seq.streaming.sinks // size :]
    seq.forget(count, size)
    _compute_again(seq, end - count)


def _compute_again(seq: SequenceState, end: int) -> None:
    """Leaves K/V of the sinks alone; tokens before position `end` had some."""
    assert seq.streaming is not None
    seq.preempted_at = max(seq.preempted_at, end)
    seq.kv_len = seq.cursor = min(seq.kv_len, seq.streaming.sinks)
    seq.moved = False
