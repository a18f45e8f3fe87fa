"""Allocates K/V blocks: copy-on-write, reclaim from other sequences, KV pins, and the choice of loading or recomputing.

`allocate` knows the pool and one sequence, and nothing of others that want blocks. A KV pin with a TTL keeps the K/V of
a sequence that waits (for a tool) until nearly all earlier waits for the same thing were over: a longer pin would keep
memory from others for the few that take for ever. K/V is given up at once where that would take too long. `load_blocks`
compares loading a sequence's offloaded blocks from the tiers with computing them again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable

from engine.core.request import SequenceState
from engine.kv_cache.block_pool import NULL_BLOCK, BlockContent, BlockPool, OutOfBlocks
from engine.kv_cache.eviction import Tier
from engine.kv_cache.offload import OffloadTiers


def allocate(seq: SequenceState, end: int, pool: BlockPool, size: int) -> tuple[int, int] | None:
    """Allocates writable blocks of `size` tokens for positions up to `end`. Returns the block copy that must precede
    the step: a shared block is copied on write.

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


def match_prefix(seq: SequenceState, size: int, pool: BlockPool) -> tuple[bool, int]:
    """Takes over the cached blocks that continue a sequence's K/V, which ends with a block. Returns whether it should
    wait for a duplicate prefill, and the tokens that were warmed and are found for the first time."""
    waits, warmed = False, 0
    for index in range(len(seq.table), len(seq) // size):
        digest = seq.digest(index, size)
        block = pool.find(digest)
        if block is None:
            waits = pool.is_pending(digest)
            break
        warmed += size * pool.reuse(block, seq.priority)
        seq.table.append(block)
        seq.kv_len += size
    if seq.tail // size == len(seq.table) and seq.tail > seq.kv_len:
        block = pool.find(seq.partial_digest(seq.tail, size))
        if block is not None:
            pool.reuse(block, seq.priority)
            seq.table.append(block)
            seq.kv_len = seq.tail
    return waits, warmed


def blocks_of(seq: SequenceState, size: int, tiers: OffloadTiers) -> list[tuple[int, bytes]]:
    """Lists the blocks of a sequence's K/V with their digests, the last one's of the part that is full. Where its table
    ends earlier, those that follow in the pool come next, then those in the tiers alone, as NULL_BLOCK."""
    full, part = divmod(seq.kv_len, size)
    digests = [seq.digest(index, size) for index in range(full)]
    if part:
        return list(zip(seq.table, [*digests, seq.partial_digest(seq.kv_len, size)], strict=False))
    found = list(zip(seq.table, digests, strict=False))
    found.extend((tiers.pool.find(digest) or NULL_BLOCK, digest) for digest, _, _ in _offloaded(seq, size, tiers, full))
    return found


def tail_of(seq: SequenceState, size: int) -> tuple[int, BlockContent]:
    """Returns the last block of K/V that ends inside it, as the sequence drops it: that may be found in a tier."""
    seq.tail = seq.kv_len
    return seq.table[seq.kv_len // size], BlockContent(seq.partial_digest(seq.tail, size), seq.root, seq.priority)


PINNED_SHARE = 0.5  # of the pool, that pinned sequences keep while others that wait could use it


def reclaim_victim(
    idle: Collection[SequenceState],
    waiting: Collection[SequenceState],
    pool: BlockPool,
    now: float,
    *,
    spare_pinned: bool,
) -> SequenceState | None:
    """Chooses the sequence that loses its K/V: of the idle ones first those with an expired pin, then those without a
    pin, then pinned ones, the one that resumes last first. `spare_pinned` leaves pinned ones alone while together they
    have no more than their share. Then waiting ones that still have K/V of an earlier job. None where no sequence has
    any."""
    if spare_pinned and idle:
        pinned = sum(len(seq.table) for seq in idle if seq.pinned_until > now)
        spare_pinned = pinned <= PINNED_SHARE * pool.total
    greedy = pool.greedy
    candidates = [seq for seq in idle if not (spare_pinned and seq.pinned_until > now)]
    if candidates:
        return min(candidates, key=lambda seq: (seq.root not in greedy, *_reclaim_rank(seq, now)))
    holders = [seq for seq in waiting if seq.table]
    return max(holders, key=lambda seq: (seq.priority, seq.arrival), default=None)


def _reclaim_rank(seq: SequenceState, now: float) -> tuple[int, float]:
    """Ranks an idle sequence by how much it would miss its K/V, lowest first."""
    if seq.pinned_until > now:
        return 2, -seq.pinned_until
    return int(seq.pinned_at is None), seq.used_at


REMEMBERED = 64  # waits of a name
NAMES = 1024  # names that are remembered; the least recently used is forgotten
LEARNT = 8  # waits before they are trusted
QUANTILE = 0.95
MARGIN = 1.5  # a pin's TTL over that quantile
MIN_S = 0.05


class KVPins:
    """Learns how long waits take, by the name of the awaited thing, and sets the TTL of KV pins."""

    def __init__(self) -> None:
        self._waits: OrderedDict[str, deque[float]] = OrderedDict()

    def expected(self, name: str) -> float | None:
        """Returns the seconds within which nearly all waits were over, with a margin; None while too few are known."""
        waits = self._waits.get(name)
        if waits is None or len(waits) < LEARNT:
            return None
        return max(MIN_S, MARGIN * sorted(waits)[int(QUANTILE * (len(waits) - 1) + 0.5)])

    def ttl_s(self, names: Iterable[str], max_s: float) -> float:
        """Returns the TTL in seconds of a pin for a sequence that waits for all of these; 0 where the wait would take
        more than `max_s`."""
        known = [self.expected(name) for name in names]
        if not known or None in known:
            return max_s
        seconds = max(each for each in known if each is not None)
        return seconds if seconds <= max_s else 0.0

    def waited(self, names: Iterable[str], seconds: float) -> None:
        """Learns that the wait for all of these took so long: it is attributed to the slowest."""
        slowest = max(names, key=lambda name: self.expected(name) or 0.0, default=None)
        if slowest is None:
            return
        waits = self._waits.setdefault(slowest, deque(maxlen=REMEMBERED))
        self._waits.move_to_end(slowest)
        waits.append(seconds)
        if len(self._waits) > NAMES:
            self._waits.popitem(last=False)


UNKNOWN_TOKEN_S = 1.0  # seconds of a token while nothing is known: blocks are loaded then


def load_blocks(
    seq: SequenceState, size: int, pool: BlockPool, tiers: OffloadTiers, token_s: float | None, end: int | None = None
) -> bool:
    """Starts loading the blocks of `size` tokens that continue a sequence's K/V, up to position `end`; True when the
    sequence should wait for them.

    They must follow each other, so the number that saves the most time in all is loaded. `token_s`: seconds of
    computing a token, if known.
    """
    token_s = UNKNOWN_TOKEN_S if token_s is None else token_s
    found = _offloaded(seq, size, tiers, len(seq.table))
    seq.fetches += 1
    following = len(seq.table) + len(found)
    if following < len(seq) // size and pool.was_evicted(seq.digest(following, size)):
        return True  # a block is being offloaded: after this step it can be loaded
    if end is not None:
        del found[max(0, end // size - len(seq.table)) :]
    best = saved = 0.0
    count = 0
    for at, (_, tokens, tier) in enumerate(found[: pool.available], 1):
        saved += tokens * token_s - (tiers.rates.seconds(tier, tiers.host.nbytes) if tier else 0.0)
        if saved > best:
            best, count = saved, at
    for _, _, tier in found[count:]:
        if tier:
            tiers.pass_over(tier)
    tiers.fetch(seq.id, [digest for digest, _, _ in found[:count]])
    return tiers.is_waiting(seq.id)


def _offloaded(seq: SequenceState, size: int, tiers: OffloadTiers, first: int) -> list[tuple[bytes, int, Tier | None]]:
    """Lists the blocks from number `first` on that are in the pool or a tier: digest, tokens, and the tier to copy
    from."""
    found: list[tuple[bytes, int, Tier | None]] = []
    for index in range(first, -(-len(seq) // size)):
        whole = (index + 1) * size <= len(seq)
        digest = seq.digest(index, size) if whole else b""
        if not tiers.knows(digest) and index == seq.tail // size and seq.tail % size:
            digest = seq.partial_digest(seq.tail, size)
        if not tiers.knows(digest):
            break
        found.append((digest, min(size, len(seq) - index * size), tiers.source(digest)))
    return found


class IdleSequences(dict[int, SequenceState]):
    """Sequences, by id, that have no job but K/V worth keeping; and the KV pins of those that wait for something."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._pins = KVPins()

    @property
    def held(self) -> int:
        """Counts the sequences whose K/V is pinned."""
        now = self._clock()
        return sum(seq.pinned_until > now for seq in self.values())

    def hold(self, seq: SequenceState, max_s: float, waiting_for: tuple[str, ...]) -> None:
        """Pins the K/V of a sequence that waits for tools, until they are expected to be done, or not at all."""
        seq.pinned_at = self._clock()
        seq.pinned_tokens = seq.kv_len
        seq.waiting_for = waiting_for
        seq.pinned_until = seq.pinned_at + self._pins.ttl_s(waiting_for, max_s)

    def resumed(self, seq: SequenceState) -> None:
        """Learns from the wait of a sequence that has a job again, if it had one."""
        if seq.pinned_at is not None:
            self._pins.waited(seq.waiting_for, seq.queued_at - seq.pinned_at)
