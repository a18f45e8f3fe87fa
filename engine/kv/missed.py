"""Whose K/V will be missed least, of sequences that do not run. Knows the pool; takes nothing from anybody."""

from __future__ import annotations

from collections.abc import Collection

from engine.kv.blocks import BlockPool
from engine.sequence import SequenceState

HELD_SHARE = 0.5  # of the pool, that held sequences keep while others that wait could use it


def least_missed(
    idle: Collection[SequenceState],
    waiting: Collection[SequenceState],
    pool: BlockPool,
    now: float,
    *,
    spare_held: bool,
) -> SequenceState | None:
    """Idle sequences first: those whose lease is over, then those that have none, then held ones, the one that goes on
    last first; but `spare_held` leaves those alone that have no more than their share together. Then waiting ones that
    still have K/V of an earlier job. None where nobody has any.
    """
    if spare_held and idle:
        held = sum(len(seq.table) for seq in idle if seq.hold_until > now)
        spare_held = held <= HELD_SHARE * pool.total
    greedy = pool.greedy
    some = [seq for seq in idle if not (spare_held and seq.hold_until > now)]
    if some:
        return min(some, key=lambda seq: (seq.root not in greedy, *_missed(seq, now)))
    holders = [seq for seq in waiting if seq.table]
    return max(holders, key=lambda seq: (seq.priority, seq.arrival), default=None)


def _missed(seq: SequenceState, now: float) -> tuple[int, float]:
    """How much an idle sequence would miss its K/V: less than another that has more."""
    if seq.hold_until > now:
        return 2, -seq.hold_until
    return int(seq.held_at is None), seq.used_at
