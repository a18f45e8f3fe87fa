"""Paged K/V block pool with reference counts, prefix caching and eviction.

Knows nothing of tensors or requests: blocks are integers, prefixes are digests. The one idea: a block without
references keeps its content, stays findable by its digest, and is evicted only when no empty block is left, the one
with the lowest eviction score first (`eviction`). Weights of adapters have blocks of the same pool (unified paging,
S-LoRA), and are evicted by the same score.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.kv_cache.eviction import EvictionOrder
from engine.kv_cache.kv_events import KVEventLog

NULL_BLOCK = 0  # never allocated: takes the writes of tokens whose K/V is already cached


class OutOfBlocks(Exception):
    """No block is free or evictable. The scheduler reclaims or preempts and tries again; callers of the engine never
    see it."""


def root_digest(secret: bytes, model: str, adapter: str, tenant: str) -> bytes:
    """Returns the root of a chain of block digests. The secret keys it, so one tenant cannot forge another's prefix."""
    digest = hashlib.blake2b(key=secret, digest_size=16)
    for part in (model, adapter, tenant):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def chain_digest(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Returns the digest of a block of tokens, full or not, after the prefix that `previous` stands for."""
    return hashlib.blake2b(array("q", tokens).tobytes(), key=previous, digest_size=16).digest()


@dataclass(slots=True)
class BlockContent:
    """A block's findable content. `root` is the start of its chain, and so identifies its tenant."""

    digest: bytes
    root: bytes = b""
    priority: int = 0  # the highest class among the sequence that computed it and those that found it
    reused: bool = False  # a sequence found it
    warmed: bool = False  # it was computed before any request asked for it, and none has found it yet


class PagedWeights(Protocol):
    """Weights that have blocks of a pool: each of these has one reference."""

    @property
    def evictable(self) -> int:
        """Counts the blocks of weights that may be evicted."""

    def lowest(self) -> float | None:
        """Returns the lowest eviction score of weights that may be evicted; None where there are none."""

    def evict(self) -> None:
        """Evicts those: releases their blocks."""

    def stats(self) -> dict[str, int]:
        """Returns its fields of `Stats`, which are numbers of blocks."""


class BlockPool:
    """`blocks` KV blocks, numbered from 1; NULL_BLOCK is never handed out.

    A block is in exactly one of three states: *used* (reference count > 0), *cached* (0, but findable by its digest) or
    *empty*. With `keeps_evicted`, `take_evicted` returns the contents of evicted blocks, so that they can be offloaded.
    """

    def __init__(self, blocks: int, share: float = 1.0) -> None:
        """`share`: fraction of the blocks that one root may have while others want them too."""
        self.total = blocks
        self._share = share
        self._owned: dict[bytes, int] = {}  # blocks that can be found, by root; kept where there is a share
        self.keeps_evicted = False
        self.weights: PagedWeights | None = None  # that have blocks here
        self.events: KVEventLog | None = None  # that others hear
        self._references = [0] * (blocks + 1)
        self._content: list[BlockContent | None] = [None] * (blocks + 1)
        self._index: dict[bytes, int] = {}
        self._empty = list(range(blocks, NULL_BLOCK, -1))  # a stack: the block used last is warm in the CPU's cache
        self._cached = EvictionOrder(blocks, share)
        self._evicted: dict[bytes, tuple[int, BlockContent]] = {}
        self._pending: set[bytes] = set()

    # -- references

    @property
    def available(self) -> int:
        """Counts the blocks that `allocate` can hand out now."""
        evictable = 0 if self.weights is None else self.weights.evictable
        return len(self._empty) + len(self._cached) + evictable

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def empty(self) -> int:
        return len(self._empty)

    def stats(self) -> dict[str, Any]:  # Any: keyword arguments of another class
        """Returns its fields of `Stats`."""
        weights = {} if self.weights is None else self.weights.stats()
        counts = {"blocks_total": self.total, "blocks_used": self.used - sum(weights.values())}
        return {**counts, "blocks_cached": self.cached, "blocks_free": self.empty, **weights}

    @property
    def used(self) -> int:
        """Counts the blocks with references, those of weights included."""
        return self.total - len(self._empty) - len(self._cached)

    def allocate(self) -> int:
        """Returns an empty block with one reference; where there is none, evicts the cached block or the weights with
        the lowest score.

        Raises:
            OutOfBlocks: every block is referenced, and no weights may be evicted.
        """
        if not self._empty:
            self._evict_weights()
        return self._allocate()

    def score(self, *, reused: bool) -> float:
        """Returns the eviction score of what is used now for the last time, or was used before too."""
        return self._cached.score(reused, 0)

    def _evict_weights(self) -> None:
        """Evicts weights that score less than the cached block that would be evicted; a tenant's block beyond its share
        is evicted before."""
        lowest = None if self.weights is None else self.weights.lowest()
        if self.weights is None or lowest is None:
            return
        greedy = self.greedy
        cached = self._cached.lowest(greedy)
        if cached is None or (lowest < cached and not greedy):
            self.weights.evict()
            self._cached.passed(len(self._empty))

    def _allocate(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            digest = self._cached.pop(self.greedy)
            if digest is None:
                raise OutOfBlocks
            block = self._index[digest]
            content = self._forget(block)
            if self.keeps_evicted and content is not None:
                self._evicted[digest] = (block, content)
        self._references[block] = 1
        return block

    def allocate_spare(self, priority: int) -> int | None:
        """Returns a block as `allocate` does, for content that no request has asked for yet; None where that would
        evict content that scores more than such content of this priority, or weights."""
        if not self._empty and not self._cached.yields(priority, self.greedy):
            return None
        return self._allocate()

    def acquire(self, block: int) -> None:
        """Adds a reference to a block that is used or cached."""
        content = self._content[block]
        if self._references[block] == 0 and content is not None:
            self._cached.take(content.digest)
        self._references[block] += 1

    def reuse(self, block: int, priority: int) -> bool:
        """Does the same for a sequence of that priority that found the block by its digest. Returns whether it is the
        first to find a warmed block."""
        content, warmed = self._content[block], False
        if content is not None:
            content.reused = True
            content.priority = min(content.priority, priority)
            warmed, content.warmed = content.warmed, False
        self.acquire(block)
        return warmed

    def release(self, table: Sequence[int], *, demoted: bool = False) -> None:
        """Drops one reference to each block of a table, deepest first, so that a prefix outlives its extensions.
        `demoted` ones without any left are evicted as those of a lower class."""
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] == 0:
                content = self._content[block]
                if content is None:
                    self._empty.append(block)
                else:
                    priority = content.priority + demoted
                    self._cached.put(content.digest, group=content.root, reused=content.reused, priority=priority)

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    # -- prefixes

    def find(self, digest: bytes) -> int | None:
        """Returns the block that holds this prefix's last tokens, computed."""
        return self._index.get(digest)

    def publish(
        self, block: int, digest: bytes, root: bytes = b"", priority: int = 0, *, reused: bool = False,
        warmed: bool = False,
    ) -> None:  # fmt: skip
        """Makes a computed block findable. When another block has the same content already, that one stays."""
        if self._content[block] is None and digest not in self._index:
            self._content[block] = BlockContent(digest, root, priority, reused or self._cached.knew(digest), warmed)
            self._index[digest] = block
            if self._share < 1:
                self._owned[root] = self._owned.get(root, 0) + 1

    def is_published(self, block: int) -> bool:
        return self._content[block] is not None

    def discard(self, digest: bytes) -> None:
        """Empties a block of this content that has no reference and was never found."""
        block = self._index.get(digest)
        content = None if block is None else self._content[block]
        if block is not None and content is not None and not (self._references[block] or content.reused):
            self._cached.take(digest)
            self._forget(block)
            self._empty.append(block)

    def make_private(self, block: int) -> None:
        """Makes the block unfindable before its only holder writes to it."""
        self._forget(block)

    def _forget(self, block: int) -> BlockContent | None:
        """Makes the block's content unfindable, and returns it."""
        content, self._content[block] = self._content[block], None
        if content is not None:
            del self._index[content.digest]
            if self.events is not None:
                self.events.removed(content.digest)
            if self._share < 1:
                self._owned[content.root] -= 1
                if not self._owned[content.root]:
                    del self._owned[content.root]
        return content

    @property
    def greedy(self) -> list[bytes]:
        """Returns the roots that have more than their share."""
        return [root for root, count in self._owned.items() if count > self._share * self.total]

    def take_evicted(self) -> list[tuple[int, BlockContent]]:
        """Returns the blocks evicted since the last call, and the contents they keep until they are written to."""
        evicted, self._evicted = self._evicted, {}
        return list(evicted.values())

    def was_evicted(self, digest: bytes) -> bool:
        """Returns whether the block was evicted since the last `take_evicted`."""
        return digest in self._evicted

    def contents(self) -> list[tuple[int, BlockContent]]:
        """Lists everything that can be found, cached blocks first, by falling eviction score."""
        cached = [self._index[digest] for digest in self._cached.keys()]  # noqa: SIM118  # not a mapping
        held = [block for block in self._index.values() if self._references[block]]
        return [(block, content) for block in (*cached, *held) if (content := self._content[block]) is not None]

    def flush_events(self) -> None:
        """Publishes what changed since the last call, where changes are published."""
        if self.events is not None:
            self.events.flush()

    def close_events(self) -> None:
        """Publishes the last changes; none may follow."""
        if self.events is not None:
            self.events.flush()
            self.events.close()
            self.events = None

    # -- blocks being computed in the coming step

    def is_pending(self, digest: bytes) -> bool:
        return digest in self._pending

    def mark_pending(self, digests: Sequence[bytes]) -> None:
        """Marks blocks as about to be computed, so that a duplicate prefill waits for them."""
        self._pending.update(digests)

    def clear_pending(self) -> None:
        self._pending.clear()

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless the pool agrees with the block tables of all sequences (O(blocks))."""
        counts = [0] * (self.total + 1)
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts[NULL_BLOCK] == 0, "the null block is in a table"
        assert counts == self._references, "reference counts differ from the tables"
        cached = [self._index[digest] for digest in self._cached.keys()]  # noqa: SIM118  # not a mapping
        states = [*self._empty, *cached, *(b for b, n in enumerate(counts) if n)]
        assert sorted(states) == list(range(1, self.total + 1)), "a block is lost or in two states"
        assert all(self._content[b] is None for b in self._empty), "an empty block has a digest"
        named = {content.digest: block for block, content in enumerate(self._content) if content is not None}
        assert named == self._index, "the index names a block of other content"
        if self._share < 1:
            roots = Counter(content.root for content in self._content if content is not None)
            assert roots == self._owned, "a root has more or fewer blocks than are counted"
