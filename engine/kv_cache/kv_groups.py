"""K/V groups: layers with a window keep the K/V inside of it alone, in blocks of their own of the same pool.

The layers that see the whole context are one group, and those with a window are cut into groups of as many layers, so
that a block of any group has the same bytes and all share one pool (vLLM's hybrid KV cache manager). A sequence has a
block table for each group. The windowed ones all see the same tokens: `SequenceState.windowed` has, for each block of
the table, their blocks, or nothing where the window has passed. A prefix can be gone on from where the first group has
all of its blocks and the windowed ones have those that the next query sees. Knows tables and digests, and no tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.core.request import SequenceState
from engine.kv_cache.block_pool import BlockPool
from engine.model.model_spec import ModelSpec

MAX_PADDING = 1 / 6  # of a model's layers: the places that its last windowed group leaves empty
_SLACK = 3  # blocks that a window begins, ends and is kept longer in


def group_digest(digest: bytes, group: int) -> bytes:
    """Returns the digest of a windowed group's block, of the prefix that `digest` stands for."""
    return hashlib.blake2b(digest, digest_size=16, salt=group.to_bytes(2, "little")).digest()


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of a model. `count` windowed ones; of each layer `tables` has its group, 0 of those that see all, and
    `places` its place among the `layers` of a block. A block has `size` tokens, and no step has more than `step_tokens`
    of a sequence."""

    window: int
    chunked: bool
    layers: int
    count: int
    tables: tuple[int, ...]
    places: tuple[int, ...]
    size: int
    step_tokens: int

    @classmethod
    def of(cls, spec: ModelSpec, size: int, max_len: int, step_tokens: int) -> KVGroups | None:
        """Returns a model's groups; None where one table serves all layers: no window is shorter than `max_len`, all
        layers have one or less than half, windows or the layers' K/V differ, some are no attention, or too many places
        would be empty."""
        windowed = [at for at, window in enumerate(spec.windows) if window is not None and window < max_len]
        full = spec.layers - len(windowed)
        others = spec.recurrent_layers or spec.conv_layers or spec.latent is not None or spec.uneven_kv
        if others or not 0 < full <= len(windowed) or len({spec.windows[at] for at in windowed}) > 1:
            return None
        count = -(-len(windowed) // full)
        if (1 + count) * full - spec.layers > MAX_PADDING * spec.layers:
            return None
        window = spec.windows[windowed[0]]
        assert window is not None
        tables, places = [0] * spec.layers, [0] * spec.layers
        for nth, at in enumerate(windowed):
            tables[at], places[at] = 1 + nth // full, nth % full
        for nth, at in enumerate(at for at in range(spec.layers) if not tables[at]):
            places[at] = nth
        return cls(window, spec.chunked, full, count, tuple(tables), tuple(places), size, step_tokens)

    @property
    def width(self) -> int:
        """Counts the blocks that each `size` new tokens take."""
        return 1 + self.count

    def first_block(self, position: int) -> int:
        """Returns the first block that a query at `position` sees through the window."""
        first = position - position % self.window if self.chunked else position - self.window + 1
        return max(0, first) // self.size

    def blocks_for(self, tokens: int) -> int:
        """Returns the most blocks that a sequence of so many tokens has at once, in all groups."""
        blocks = -(-tokens // self.size)
        return blocks + self.count * min(blocks, -(-(self.window + self.step_tokens) // self.size) + _SLACK)

    def max_tokens(self, blocks: int) -> int:
        """Returns the longest sequence, in whole blocks, that fits alone in a pool of so many."""
        low, high = 0, blocks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_for(middle * self.size) <= blocks else (low, middle - 1)
        return low * self.size

    def digests(self, digest: bytes) -> list[bytes]:
        """Returns the digests of the windowed groups' blocks."""
        return [group_digest(digest, group) for group in range(1, self.width)]

    def find(self, digest: bytes, pool: BlockPool) -> tuple[int, ...] | None:
        """Returns the windowed groups' blocks of a prefix's last tokens; None where the pool lacks one."""
        found = []
        for each in self.digests(digest):
            block = pool.find(each)
            if block is None:
                return None
            found.append(block)
        return tuple(found)

    def reach(self, seq: SequenceState, blocks: int, has: Callable[[int], bool]) -> tuple[int, int]:
        """Returns the longest prefix of at most `blocks` blocks whose window is held or, by block, there as `has` says:
        its blocks, and the first one in its window."""
        end, index = blocks, blocks - 1
        while end > 0:
            first = self.first_block(min(end * self.size, len(seq) - 1))
            while index >= first and (seq.window_from <= index < len(seq.windowed) or has(index)):
                index -= 1
            if index < first:
                return end, first
            end, index = index, index - 1
        return 0, 0

    def take(self, seq: SequenceState, end: int, first: int, pool: BlockPool, acquire: Callable[[int], object]) -> None:
        """Makes the window of a sequence begin with block `first`, for a prefix of `end` blocks; `reach` says that the
        pool has what the sequence lacks."""
        windowed: list[tuple[int, ...]] = []
        for index in range(first, end):
            blocks = seq.windowed[index] if index < len(seq.windowed) else ()
            if not blocks:
                blocks = self.find(seq.digest(index, self.size), pool) or ()
                for block in blocks:
                    acquire(block)
            windowed.append(blocks)
        self._free(seq, range(seq.window_from, min(first, len(seq.windowed))), pool)
        pool.release([block for blocks in seq.windowed[end:] for block in blocks])
        seq.windowed = [()] * first + windowed
        seq.window_from = first
        seq.moves += 1

    def cover(self, seq: SequenceState, position: int, pool: BlockPool) -> int:
        """Makes the window of a query at `position`, up to K/V's end, held again. Returns the position to go on from:
        where the pool lacks some of it, or it would be that of many steps, K/V is cut to a prefix that can be gone on
        from, the longest."""
        first, size = self.first_block(position), self.size
        if seq.window_from <= first:
            return position

        def has(index: int) -> bool:
            whole = (index + 1) * size <= seq.kv_len
            return whole and self.find(seq.digest(index, size), pool) is not None

        def acquire(block: int) -> None:
            pool.reuse(block, seq.priority)

        near = seq.kv_len - position <= self.step_tokens
        if near and all(has(index) for index in range(first, seq.window_from)):
            self.take(seq, len(seq.windowed), first, pool, acquire)
            return position
        end, first = self.reach(seq, position // size, has)
        seq.preempted_at = max(seq.preempted_at, seq.kv_len)
        seq.kv_len = seq.cursor = end * size
        self.take(seq, end, first, pool, acquire)
        pool.release(seq.table[end:])
        del seq.table[end:]
        seq.writable = 0
        return seq.kv_len

    def slide(self, seq: SequenceState, pool: BlockPool) -> None:
        """Frees the blocks outside of the window of all that a sequence has still to compute. One more stays, for a cut
        of few tokens; those that are found by digests stay cached, and are evicted before others."""
        first = self.first_block(max(0, min(seq.cursor, seq.kv_len) - 1)) - 1
        if first > seq.window_from:
            self._free(seq, range(seq.window_from, first), pool)
            seq.window_from = first

    def _free(self, seq: SequenceState, indices: Iterable[int], pool: BlockPool) -> None:
        freed: list[int] = []
        for index in indices:
            freed += seq.windowed[index]
            seq.windowed[index] = ()
        pool.release(freed, demoted=True)
