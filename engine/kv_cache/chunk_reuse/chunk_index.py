"""Index of chunks whose K/V is in the pool, and its copies into sequences that have the chunk at another place.

A chunk is a span of a prompt that its client names, such as a retrieved passage. Its key is its tokens alone, under the
root of the sequence's digests: so tenants, adapters and models have chunks of their own. The index holds no blocks. It
knows the digests under which the pool finds the blocks of the prompt that the chunk was computed in; a block that was
evicted is computed again. Of a chunk that is found, the first tokens are computed as usual (LegoLink of EPIC, Hu et
al. 2024, arXiv 2410.15332), and the K/V of the others is copied with its keys rotated to the new positions. Knows
nothing of tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.core.request import SequenceState
from engine.core.step import KVMove
from engine.kv_cache.allocation import blocks_for
from engine.kv_cache.block_pool import BlockPool, chain_digest
from engine.multimodal.image_input import has_images
from engine.params import ChunkSpans

MAX_KNOWN = 4096  # that are known at once; the one used last stays longest


@dataclass(frozen=True, slots=True)
class _KnownChunk:
    """Place of a chunk in the prompt that it was computed in: its first position, and the digests of the blocks from
    that position's on which end within the chunk."""

    start: int
    digests: tuple[bytes, ...]


class ChunkIndex:
    """Chunks of one pool. `recompute_tokens` are computed at a chunk's beginning; None: nothing is reused."""

    def __init__(self, pool: BlockPool, block_size: int, recompute_tokens: int | None = None) -> None:
        self._pool, self._size, self._head = pool, block_size, recompute_tokens
        self._known: OrderedDict[bytes, _KnownChunk] = OrderedDict()
        self.held: list[tuple[int, ...]] = []  # blocks that the coming step copies from

    @classmethod
    def of(cls, config: EngineConfig, pool: BlockPool) -> ChunkIndex:
        """Returns the index of an engine, of no chunks where it reuses none."""
        return cls(pool, config.block_size, None if config.chunk_reuse is None else config.chunk_reuse.recompute_tokens)

    def name(self, seq: SequenceState, spans: ChunkSpans) -> None:
        """Marks the chunks of a fresh sequence that may be reused. Others are left out: those with an image, whose rows
        depend on more than tokens, and those of fewer tokens than would be worth a step."""
        if self._head is None:
            return
        least = 2 * self._head + self._size
        seq.chunks = tuple(
            (start, end) for start, end in spans if end - start >= least and not has_images(seq.tokens[start:end])
        )
        if seq.chunks:
            seq.approximate_from = seq.chunks[0][0]

    def stop(self, seq: SequenceState, cursor: int, end: int) -> int:
        """Returns where a row from `cursor` on must end, `end` at the latest: before the first token that is copied."""
        if self._head is None:
            return end
        for chunk in seq.chunks:
            first = chunk[0] + self._head
            if cursor < first < end and self._found(seq, chunk, first) is not None:
                return first
        return end

    def reuse(self, seq: SequenceState, logits_from: int) -> KVMove | None:
        """Returns the copy that must precede a row of the sequence, which then begins at its end; None where nothing is
        copied: K/V exists already, the job needs logits of these tokens, or the pool has no blocks for all of the
        prompt beside those that are read. These are held until `release`."""
        cursor = seq.cursor
        if self._head is None or cursor != seq.kv_len:
            return None
        chunk = next((each for each in seq.chunks if each[0] + self._head <= cursor < each[1]), None)
        move = None if chunk is None else self._found(seq, chunk, cursor)
        if move is None or logits_from < move.end:
            return None
        for block in move.blocks:
            self._pool.reuse(block, seq.priority)
        if self._pool.available <= blocks_for(len(seq), self._size, None) - len(seq.table):
            self._pool.release(move.blocks)
            return None
        self.held.append(move.blocks)
        return move

    def learn(self, seq: SequenceState, before: int) -> None:
        """Takes note of the chunks whose last whole block has got K/V; `before`: the tokens that had it already."""
        size = self._size
        for start, end in seq.chunks:
            first, last = start // size, end // size
            if before < last * size <= seq.kv_len:
                key = self._key(seq, start, end)
                digests = tuple(seq.digest(index, size) for index in range(first, last))
                known = self._known.get(key)
                if known is None or any(self._pool.find(each) is None for each in known.digests):
                    self._known[key] = _KnownChunk(start, digests)
                self._known.move_to_end(key)
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)

    def release(self) -> None:
        """Releases the blocks that the last step copied from."""
        for blocks in self.held:
            self._pool.release(blocks)
        self.held.clear()

    def _found(self, seq: SequenceState, chunk: tuple[int, int], start: int) -> KVMove | None:
        """Returns the copy of the chunk from position `start` on, as far as the pool has its blocks without a gap; None
        of less than a block."""
        known = self._known.get(self._key(seq, *chunk))
        if known is None:
            return None
        delta, size = chunk[0] - known.start, self._size
        at = (start - delta) // size
        blocks = list[int]()
        for digest in known.digests[at - known.start // size :]:
            if (block := self._pool.find(digest)) is None:
                break
            blocks.append(block)
        end = (at + len(blocks)) * size + delta
        return KVMove(start, end, delta, tuple(blocks)) if end - start >= size else None

    @staticmethod
    def _key(seq: SequenceState, start: int, end: int) -> bytes:
        return chain_digest(seq.root, seq.tokens[start:end])
