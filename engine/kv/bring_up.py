"""Copy or compute: which blocks of a sequence are worth bringing up from the tiers. Knows nothing of who runs when."""

from __future__ import annotations

from engine.kv.blocks import BlockPool
from engine.kv.rates import Tier
from engine.kv.tiers import Tiers
from engine.sequence import SequenceState

UNKNOWN_TOKEN_S = 1.0  # what a token takes while nothing is known: blocks are copied then


def bring_up(seq: SequenceState, size: int, pool: BlockPool, tiers: Tiers, token_s: float | None) -> bool:
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


def _below(seq: SequenceState, size: int, tiers: Tiers) -> list[tuple[bytes, int, Tier | None]]:
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
