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
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.offload import OffloadTiers


def allocate(
    seq: SequenceState, end: int, pool: BlockPool, size: int, groups: KVGroups | None = None
) -> tuple[tuple[int, int], ...]:
    """Allocates writable blocks of `size` tokens for positions up to `end`, in all `groups`. Returns the block copies
    that must precede the step: shared blocks are copied on write.

    Raises:
        OutOfBlocks: there are too few; nothing has changed then.
    """
    if end <= seq.kv_len or end <= seq.writable:
        return ()
    first = seq.kv_len // size  # the first block that is written to
    begun = [] if first >= len(seq.table) else [seq.table[first], *(seq.windowed[first] if groups else ())]
    shared = [block for block in begun if pool.is_shared(block)]
    missing = max(0, -(-end // size) - len(seq.table))
    if pool.available < missing * (groups.width if groups else 1) + len(shared):
        raise OutOfBlocks
    copies = {block: pool.allocate() for block in shared}
    for block in begun:
        if block not in copies:
            pool.make_private(block)
    if copies:
        pool.release(shared)
        seq.table[first] = copies.get(begun[0], begun[0])
        if groups:
            seq.windowed[first] = tuple(copies.get(block, block) for block in begun[1:])
        seq.moves += 1
    for _ in range(missing):
        seq.table.append(pool.allocate())
        if groups:
            seq.windowed.append(tuple(pool.allocate() for _ in range(groups.count)))
    seq.writable = len(seq.table) * size
    return tuple(copies.items())


def advance_kv(
    seq: SequenceState, end: int, pool: BlockPool, size: int, groups: KVGroups | None = None,
    *, publishes: bool = True, warmed: bool = False,
) -> None:  # fmt: skip
    """Records that the tokens before `end` have K/V: makes the blocks that they fill findable, and frees those of
    windowed groups whose window has passed."""
    old, seq.cursor = seq.kv_len, end
    seq.kv_len = max(old, end)
    if publishes and not seq.moved:
        _publish(seq, range(old // size, seq.kv_len // size), pool, size, groups, warmed=warmed)
    if groups:
        groups.slide(seq, pool)


def _publish(
    seq: SequenceState, indices: Iterable[int], pool: BlockPool, size: int, groups: KVGroups | None, *, warmed: bool
) -> None:
    for index in indices:
        digest = seq.digest(index, size)
        pool.publish(seq.table[index], digest, seq.root, seq.priority, warmed=warmed)
        _announce(seq, index, pool, size)
        if groups:
            for block, each in zip(seq.windowed[index], groups.digests(digest), strict=False):
                pool.publish(block, each, seq.root, seq.priority, warmed=warmed)


def _announce(seq: SequenceState, index: int, pool: BlockPool, size: int) -> None:
    """Logs that the sequence's full block `index` can be found, where events are published."""
    if (events := pool.events) is not None:
        digest = seq.digest(index, size)
        if not events.announced(digest) and pool.find(digest) is not None:
            parent = seq.digests[index - 1] if index else None
            events.stored(digest, parent, seq.tokens[index * size : (index + 1) * size], seq.adapter)


def match_prefix(
    seq: SequenceState, size: int, pool: BlockPool, groups: KVGroups | None = None, *, reuses: bool = True
) -> tuple[bool, int]:
    """Takes over the cached blocks that continue a sequence's K/V, which ends with a block; as `reuses` says, for a
    request. Returns whether it should wait for a duplicate prefill, and the tokens that were warmed and are found for
    the first time."""
    warmed, found = 0, list[int]()

    def acquire(block: int) -> bool:
        if reuses:
            return pool.reuse(block, seq.priority)
        pool.acquire(block)
        return False

    for index in range(len(seq.table), len(seq) // size):
        block = pool.find(seq.digest(index, size))
        if block is None:
            break
        found.append(block)
    if groups and found:
        end, first = groups.reach(
            seq, len(seq.table) + len(found), lambda at: groups.find(seq.digest(at, size), pool) is not None
        )
        del found[max(0, end - len(seq.table)) :]
        if found:
            groups.take(seq, end, first, pool, acquire)
    for index, block in enumerate(found, len(seq.table)):
        warmed += size * acquire(block)
        _announce(seq, index, pool, size)  # it may have come from an offload tier, which knows no tokens
    seq.table += found
    seq.kv_len += size * len(found)
    following = len(seq.table)
    waits = following < len(seq) // size and pool.is_pending(seq.digest(following, size))
    if seq.tail // size == following and seq.tail > seq.kv_len:
        digest = seq.partial_digest(seq.tail, size)
        block, windowed = pool.find(digest), groups.find(digest, pool) if groups else ()
        if block is not None and windowed is not None:
            for each in (block, *windowed):
                acquire(each)
            seq.table.append(block)
            if groups:
                seq.windowed.append(windowed)
            seq.kv_len = seq.tail
    return waits, warmed


def blocks_for(tokens: int, size: int, groups: KVGroups | None) -> int:
    """Returns the most blocks that a sequence of so many tokens has at once."""
    return -(-tokens // size) if groups is None else groups.blocks_for(tokens)


def blocks_of(
    seq: SequenceState, size: int, tiers: OffloadTiers, groups: KVGroups | None = None
) -> list[tuple[int, bytes]]:
    """Lists the blocks of a sequence's K/V with their digests, the last one's of the part that is full. Where its table
    ends earlier, those that follow in the pool come next, then those in the tiers alone, as NULL_BLOCK. The blocks of
    windowed groups come last."""
    full, part = divmod(seq.kv_len, size)
    digests = [seq.digest(index, size) for index in range(full)]
    if part:
        digests.append(seq.partial_digest(seq.kv_len, size))
    found = list(zip(seq.table, digests, strict=False))
    if not part:
        lost = [digest for digest, _, _ in _offloaded(seq, size, tiers, full)]
        digests += lost
        found += [(tiers.pool.find(digest) or NULL_BLOCK, digest) for digest in lost]
    if groups:
        windowed = [each for digest in digests[seq.window_from :] for each in groups.digests(digest)]
        held = dict(zip(windowed, (block for each in seq.windowed[seq.window_from :] for block in each), strict=False))
        found += [(held.get(each) or tiers.pool.find(each) or NULL_BLOCK, each) for each in windowed]
    return found


def fork_kv(seq: SequenceState, child_id: int, arrival: int, pool: BlockPool, size: int) -> SequenceState:
    """Forks a child that shares all of a sequence's blocks (copy-on-write)."""
    pool.release(seq.trim(size))
    child = seq.fork(child_id, arrival)
    for block in child.blocks:
        pool.acquire(block)
    return child


def keep_blocks(seq: SequenceState, size: int, tiers: OffloadTiers, groups: KVGroups | None = None) -> int:
    """Has the tiers keep a sequence's K/V after the engine has stopped; returns the number of its blocks."""
    kept = blocks_of(seq, size, tiers, groups)
    tiers.keep(kept, seq.root, seq.priority)
    return len(kept)


def tail_of(seq: SequenceState, size: int, groups: KVGroups | None = None) -> list[tuple[int, BlockContent]]:
    """Returns the last block of K/V that ends inside it, of each group, as the sequence drops it: that may be found in
    a tier."""
    seq.tail = seq.kv_len
    digest, last = seq.partial_digest(seq.tail, size), seq.kv_len // size
    digests = [digest, *(groups.digests(digest) if groups else ())]
    blocks = [seq.table[last], *(seq.windowed[last] if groups else ())]
    contents = (BlockContent(each, seq.root, seq.priority) for each in digests)
    return list(zip(blocks, contents, strict=False))


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
        pinned = sum(seq.held for seq in idle if seq.pinned_until > now)
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
    seq: SequenceState, size: int, pool: BlockPool, tiers: OffloadTiers, token_s: float | None,
    end: int | None = None, groups: KVGroups | None = None,
) -> bool:  # fmt: skip
    """Starts loading the blocks of `size` tokens that continue a sequence's K/V, up to position `end`; True when the
    sequence should wait for them.

    They must follow each other, so the number that saves the most time in all is loaded; with `groups`, all that can be
    gone on from or none. `token_s`: seconds of computing a token, if known.
    """
    token_s = UNKNOWN_TOKEN_S if token_s is None else token_s
    found = _offloaded(seq, size, tiers, len(seq.table))
    seq.fetches += 1
    following = len(seq.table) + len(found)
    if following < len(seq) // size and pool.was_evicted(seq.digest(following, size)):
        return True  # a block is being offloaded: after this step it can be loaded
    if end is not None:
        del found[max(0, end // size - len(seq.table)) :]
    if groups and found:
        found += _offloaded_windows(seq, size, tiers, groups, found)
    best = saved = 0.0
    count = 0
    for at, (_, tokens, tier) in enumerate(found[: pool.available], 1):
        saved += tokens * token_s - (tiers.rates.seconds(tier, tiers.host.nbytes) if tier else 0.0)
        if saved > best:
            best, count = saved, at
    if groups:
        count = len(found) if saved > 0 and len(found) <= pool.available else 0
    for _, _, tier in found[count:]:
        if tier:
            tiers.pass_over(tier)
    tiers.fetch(seq.id, [digest for digest, _, _ in found[:count]])
    return tiers.is_waiting(seq.id)


Offloaded = list[tuple[bytes, int, Tier | None]]  # digests, tokens, and the tiers to copy from


def _offloaded_windows(
    seq: SequenceState, size: int, tiers: OffloadTiers, groups: KVGroups, found: Offloaded
) -> Offloaded:
    """Cuts the blocks in `found`, which continue a sequence's K/V, to those whose windows are in the pool or a tier
    too; returns the blocks of these windows."""
    held, whole = len(seq.table), len(found)
    if found and seq.tail % size and seq.tail // size == held + whole - 1:
        whole -= found[-1][0] == seq.partial_digest(seq.tail, size)
    end, first = groups.reach(
        seq, held + whole, lambda at: all(tiers.knows(each) for each in groups.digests(seq.digest(at, size)))
    )
    lacking = (at for at in range(first, end) if not seq.window_from <= at < len(seq.windowed))
    digests = [seq.digest(at, size) for at in lacking]
    if end < held + whole or not all(tiers.knows(each) for each in groups.digests(found[-1][0])):
        del found[max(0, end - held) :]
    elif whole < len(found):
        digests.append(found[-1][0])
    windows = [each for digest in digests for each in groups.digests(digest)] if found else []
    return [(each, 0, tiers.source(each)) for each in windows]


def _offloaded(seq: SequenceState, size: int, tiers: OffloadTiers, first: int) -> Offloaded:
    """Lists the blocks from number `first` on that are in the pool or a tier: digest, tokens, and the tier to copy
    from."""
    found: Offloaded = []
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
