"""Prefix warming: prefills what is likely to be asked for next into the prefix cache, while nothing else runs.

Prefixes wait here until no sequence has had work for `IDLE_S` seconds; the oldest is then read in chunks of some
`CHUNK_S` seconds, as a request that comes meanwhile waits for one. As soon as a sequence has work, the blocks are
released, where they stay cached, and the prefix waits again. Empty blocks are taken, and those that the eviction policy
values less; where there are none, the prefix is dropped. Warming marks no block as reused: nobody has asked for it yet.
Knows nothing of chats, nor of the sequences that run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.core.request import PrefillJob, SequenceState
from engine.core.step import Row
from engine.kv_cache.allocation import advance_kv, match_prefix
from engine.kv_cache.block_pool import BlockPool, OutOfBlocks
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.state_checkpoints import StateCheckpoints

IDLE_S = 0.2  # a program that sends its next request at once never meets a chunk; a person takes longer
CHUNK_S = 0.02  # of a chunk of more than MIN_TOKENS
MIN_TOKENS = 16  # of a chunk on any device
MAX_PREFIXES = 32  # that wait; the oldest is dropped for one more


class PrefixWarmer:
    """Warms the prefixes of one core."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_tokens: int,
        states: StateCheckpoints | None = None,
        groups: KVGroups | None = None,
    ) -> None:
        """`max_tokens`: of a chunk."""
        self._states = states
        self._groups = groups
        self._pool = pool
        self._size = block_size
        self._max_tokens = max_tokens
        self._chunk = min(MIN_TOKENS, max_tokens)
        self.prefixes: deque[SequenceState] = deque()  # in order of arrival
        self._idle_since = 0.0

    def add(self, seq: SequenceState) -> None:
        """Queues the whole blocks of a sequence that has tokens and no K/V."""
        whole = len(seq) - len(seq) % self._size
        seq.truncate(whole, self._size)
        if len(self.prefixes) >= MAX_PREFIXES:
            self._drop(self.prefixes[0])
        if whole:
            seq.job = PrefillJob()
            self.prefixes.append(seq)

    @property
    def starts_at(self) -> float | None:
        """Returns the time from which a chunk may run, if nothing else does; None where no prefix waits."""
        return self._idle_since + IDLE_S if self.prefixes else None

    def pause(self, now: float) -> None:
        """Releases all blocks: a sequence has work, or had until now. No step may be in flight."""
        self._idle_since = now
        if self.prefixes and self.prefixes[0].table:
            self._release(self.prefixes[0])

    def drop_prefixes_of(self, seq: SequenceState) -> None:
        """Drops the prefixes that a sequence goes on from: it reads them itself."""
        for prefix in list(self.prefixes):
            last = len(prefix) // self._size - 1
            if len(seq) >= len(prefix) and seq.digest(last, self._size) == prefix.digest(last, self._size):
                self._drop(prefix)

    def drop_adapter(self, adapter: int) -> None:
        """Drops the prefixes of an adapter that is unloaded. No step may be in flight."""
        for prefix in [each for each in self.prefixes if each.adapter == adapter]:
            self._drop(prefix)

    def row(self, bring: Callable[[SequenceState], bool] = lambda seq: True) -> Row | None:
        """Returns the next chunk with its blocks allocated; None where no prefix is left, or its adapter has still to
        come in, as `bring` says. A prefix whose adapter has no room is dropped."""
        while self.prefixes:
            seq = self.prefixes[0]
            try:
                if not bring(seq):
                    return None
            except OutOfBlocks:
                self._drop(seq)
                continue
            self._take_cached(seq)
            if self._states is not None:
                self._states.seek(seq, seq.kv_len)
            start = seq.cursor
            end = self._allocate(seq, min(len(seq), start + self._chunk))
            copy = None
            if self._states is not None and end > start:
                end = min(end, self._states.stop(seq))
                try:
                    copy = self._states.make_writable(seq, spare=True)
                except OutOfBlocks:
                    end = start
            if end > start:
                return Row(seq, start, end - start, logits_from=len(seq), state=seq.state, state_copy=copy)
            self._drop(seq)  # all of it is cached, or the memory is short
        return None

    def ran(self, row: Row) -> None:
        """Publishes the blocks that a chunk has filled."""
        seq, size = row.seq, self._size
        advance_kv(seq, row.end, self._pool, size, self._groups, warmed=True)
        if self._states is not None:
            self._states.advance(seq, row.end, decodes=False)
        if row.end == len(seq):
            self._drop(seq)

    def took(self, tokens: int, seconds: float) -> None:
        """Learns the size of the next chunk from the time of one: twice as many tokens where they fit `CHUNK_S`, half
        as many where these did not."""
        if seconds > CHUNK_S:
            self._chunk = max(min(MIN_TOKENS, self._max_tokens), tokens // 2)
        elif 2 * seconds < CHUNK_S:
            self._chunk = min(self._max_tokens, max(self._chunk, 2 * tokens))

    # -- parts

    def _take_cached(self, seq: SequenceState) -> None:
        if seq.kv_len % self._size:
            return  # in the middle of a block of its own
        match_prefix(seq, self._size, self._pool, self._groups, reuses=False)
        seq.cursor = seq.kv_len

    def _allocate(self, seq: SequenceState, end: int) -> int:
        """Allocates blocks for positions up to `end`, as far as there are spare ones; returns where they end."""
        width = self._groups.width if self._groups else 1
        while len(seq.table) * self._size < end:
            blocks = [block for _ in range(width) if (block := self._pool.allocate_spare(seq.priority)) is not None]
            if len(blocks) < width:
                self._pool.release(blocks)
                break
            seq.table.append(blocks[0])
            if self._groups:
                seq.windowed.append(tuple(blocks[1:]))
        seq.writable = len(seq.table) * self._size
        return min(end, seq.writable)

    def _drop(self, seq: SequenceState) -> None:
        self._release(seq)
        self.prefixes.remove(seq)

    def _release(self, seq: SequenceState) -> None:
        self._pool.release(seq.drop_kv())
        if self._states is not None:
            self._states.release(seq)
