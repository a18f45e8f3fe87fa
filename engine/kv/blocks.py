"""The pool of KV blocks: who references which, what a free one still holds, and where a prefix can be found.

Knows nothing of tensors or requests: blocks are integers, prefixes are digests. The one idea: a block that nobody
references keeps its content, stays findable by its digest, and is taken for something else only when no empty one is
left, the least recently released first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from engine.batch import NULL_BLOCK


class OutOfBlocks(Exception):
    """No block is free or evictable. The scheduler makes room and tries again; callers of the engine never see it."""


def root_digest(secret: bytes, model: str, adapter: str, tenant: str) -> bytes:
    """Where a chain of block digests starts. The secret keys it, so one tenant cannot forge another's prefix."""
    digest = hashlib.blake2b(key=secret, digest_size=16)
    for part in (model, adapter, tenant):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def chain_digest(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a full block of tokens after the prefix that `previous` stands for."""
    return hashlib.blake2b(array("q", tokens).tobytes(), key=previous, digest_size=16).digest()


class BlockPool:
    """`blocks` KV blocks, numbered from 1; NULL_BLOCK is never handed out.

    A block is in exactly one of three states: *used* (reference count > 0), *cached* (0, but findable by its digest)
    or *empty*.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._references = [0] * (blocks + 1)
        self._digest: list[bytes | None] = [None] * (blocks + 1)
        self._index: dict[bytes, int] = {}
        self._empty = list(range(blocks, NULL_BLOCK, -1))  # a stack: the block used last is warm in the CPU's cache
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self._pending: set[bytes] = set()

    # -- references

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._empty) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def empty(self) -> int:
        return len(self._empty)

    @property
    def used(self) -> int:
        return self.total - self.available

    def allocate(self) -> int:
        """An empty block with one reference, evicting the oldest cached one when there is none.

        Raises:
            OutOfBlocks: every block is referenced.
        """
        if self._empty:
            block = self._empty.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._unindex(block)
        else:
            raise OutOfBlocks
        self._references[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """One more reference to a block that is used or cached."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """Give up one reference to each block of a table, deepest first, so that a prefix outlives its extensions."""
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._digest[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    # -- prefixes

    def find(self, digest: bytes) -> int | None:
        """The block that holds this prefix's last tokens, computed."""
        return self._index.get(digest)

    def publish(self, block: int, digest: bytes) -> None:
        """Make a computed, full block findable. When another block has the same content already, that one stays."""
        if self._digest[block] is None and digest not in self._index:
            self._digest[block] = digest
            self._index[digest] = block

    def make_private(self, block: int) -> None:
        """Before its only holder writes to a block: what it held can no longer be found."""
        self._unindex(block)

    def _unindex(self, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            del self._index[digest]
            self._digest[block] = None

    # -- blocks being computed in the coming step

    def is_pending(self, digest: bytes) -> bool:
        return digest in self._pending

    def claim(self, digests: Sequence[bytes]) -> None:
        """Say that these blocks are about to be computed, so that a twin waits for them."""
        self._pending.update(digests)

    def clear_claims(self) -> None:
        self._pending.clear()

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables of all sequences (O(blocks))."""
        counts = [0] * (self.total + 1)
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts[NULL_BLOCK] == 0, "the null block is in a table"
        assert counts == self._references, "reference counts differ from the tables"
        states = [*self._empty, *self._cached, *(b for b, n in enumerate(counts) if n)]
        assert sorted(states) == list(range(1, self.total + 1)), "a block is lost or in two states"
        assert all(self._digest[b] is None for b in self._empty), "an empty block has a digest"
        assert all(self._digest[b] is not None for b in self._cached), "a cached block has no digest"
        assert all(self._digest[b] == d for d, b in self._index.items()), "the index names a block of other content"
