"""Allocates blocks for a step: reclaims them from other sequences, loads them from the tiers, honours leases.

`allocate` knows the pool and one sequence, and nothing of others that want blocks. A lease keeps the K/V of a sequence
that waits, until nearly all waits for the same thing were over: holding longer would keep memory from others for the
few that take for ever. K/V is given up at once where that would take too long. `load_blocks` decides between copying
and recomputing: which blocks of a sequence are worth bringing up from the tiers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable

from engine.core.request import SequenceState
from engine.kv_cache.block_pool import BlockPool, OutOfBlocks
from engine.kv_cache.eviction import Tier
from engine.kv_cache.offload import OffloadTiers


def allocate(seq: SequenceState, end: int, pool: BlockPool, size: int) -> tuple[int, int] | None:
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


HELD_SHARE = 0.5  # of the pool, that held sequences keep while others that wait could use it


def reclaim_victim(
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
    """Returns how much an idle sequence would miss its K/V: less than another that has more."""
    if seq.hold_until > now:
        return 2, -seq.hold_until
    return int(seq.held_at is None), seq.used_at


REMEMBERED = 64  # waits of a name
NAMES = 1024  # that are remembered; the one not used for longest is forgotten
LEARNT = 8  # waits before they are believed
QUANTILE = 0.95
MARGIN = 1.5  # what a lease is longer than that quantile
MIN_S = 0.05


class KVPins:
    """Waits by the name of what was waited for."""

    def __init__(self) -> None:
        self._waits: OrderedDict[str, deque[float]] = OrderedDict()

    def expected(self, name: str) -> float | None:
        """Seconds within which nearly all waits were over, with a margin; None while too few are known."""
        waits = self._waits.get(name)
        if waits is None or len(waits) < LEARNT:
            return None
        return max(MIN_S, MARGIN * sorted(waits)[int(QUANTILE * (len(waits) - 1) + 0.5)])

    def lease(self, names: Iterable[str], longest_s: float) -> float:
        """Seconds that K/V is kept for who waits for all of these; 0 where that would take more than `longest_s`."""
        known = [self.expected(name) for name in names]
        if not known or None in known:
            return longest_s
        seconds = max(each for each in known if each is not None)
        return seconds if seconds <= longest_s else 0.0

    def waited(self, names: Iterable[str], seconds: float) -> None:
        """The wait for all of these took so long: that of the slowest did."""
        slowest = max(names, key=lambda name: self.expected(name) or 0.0, default=None)
        if slowest is None:
            return
        waits = self._waits.setdefault(slowest, deque(maxlen=REMEMBERED))
        self._waits.move_to_end(slowest)
        waits.append(seconds)
        if len(self._waits) > NAMES:
            self._waits.popitem(last=False)


UNKNOWN_TOKEN_S = 1.0  # what a token takes while nothing is known: blocks are copied then


def load_blocks(seq: SequenceState, size: int, pool: BlockPool, tiers: OffloadTiers, token_s: float | None) -> bool:
    """Have blocks of `size` tokens that continue a sequence's K/V copied to the pool; True when it should wait.

    They must follow each other, so as many are copied as save the most time in all. `token_s`: seconds of computing a
    token, if known.
    """
    found = _below(seq, size, tiers)
    seq.fetches += 1
    following = len(seq.table) + len(found)
    if following < len(seq) // size and pool.was_evicted(seq.digest(following, size)):
        return True  # a block is on its way down: after this step it can come up
    best = saved = 0.0
    count = 0
    for at, (_, tokens, tier) in enumerate(found[: pool.available], 1):
        computing = tokens * (UNKNOWN_TOKEN_S if token_s is None else token_s)
        saved += computing - (tiers.rates.seconds(tier, tiers.host.nbytes) if tier else 0.0)
        if saved > best:
            best, count = saved, at
    for _, _, tier in found[count:]:
        if tier:
            tiers.pass_over(tier)
    tiers.fetch(seq.id, [digest for digest, _, _ in found[:count]])
    return tiers.is_waiting(seq.id)


def _below(seq: SequenceState, size: int, tiers: OffloadTiers) -> list[tuple[bytes, int, Tier | None]]:
    """Blocks that continue this sequence's K/V and lie anywhere: digest, tokens, and the tier to copy from."""
    found: list[tuple[bytes, int, Tier | None]] = []
    for index in range(len(seq.table), -(-len(seq) // size)):
        whole = (index + 1) * size <= len(seq)
        digest = seq.digest(index, size) if whole else b""
        if not tiers.knows(digest) and index == seq.tail // size and seq.tail % size:
            digest = seq.partial_digest(seq.tail, size)
        if not tiers.knows(digest):
            break
        found.append((digest, min(size, len(seq) - index * size), tiers.source(digest)))
    return found
