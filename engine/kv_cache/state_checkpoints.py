"""Recurrent states of sequences: a live one each, and checkpoints at earlier positions.

K/V of a prefix can be used from any token on; a recurrent layer cannot go back, so K/V is of use only from a position
whose state is known. A sequence's live state is a slot that stands for its first `state_len` tokens. A checkpoint is a
slot that nothing writes to, found by the digest of a prefix of whole blocks: the same chain as K/V's. It is made
without a copy, by publishing the live state, which the sequence then copies before it goes on. Forks share a slot
likewise. So slots are blocks of a pool of their own, with its reference counts, eviction and offload tiers.

Checkpoints are due at the last whole block of a prompt and of an answer, where a cached prefix of K/V ends without one
(another sequence branched off there, Pan et al. 2024, Marconi), at the last whole block of a prompt's images, about
which others may ask, and every INTERVAL tokens of a long prompt; the latter are evicted first.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.request import SequenceState
from engine.kv_cache.allocation import UNKNOWN_TOKEN_S
from engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, OutOfBlocks
from engine.kv_cache.offload import OffloadTiers
from engine.outputs import StateStats, TierStats

INTERVAL = 1024  # tokens between the checkpoints of a long prompt


class StateCheckpoints:
    """The states of one engine's sequences. `pool` has their slots, each of `nbytes` bytes; `size` is the tokens of a
    K/V block. Without `publishes` there are live states alone."""

    def __init__(
        self, pool: BlockPool, size: int, *, publishes: bool, nbytes: int = 0, tiers: OffloadTiers | None = None
    ) -> None:
        self.pool = pool
        self.tiers = tiers
        self._size = size
        self._publishes = publishes
        self._nbytes = nbytes
        self._found = 0
        self._interval = -(-INTERVAL // size) * size
        self._drafting: set[int] = set()  # slots of the rows that verify a draft

    # -- live states

    def seek(self, seq: SequenceState, limit: int) -> None:
        """Moves the sequence's state and cursor to the deepest known position up to `limit`, where K/V ends or logits
        are needed: its own, a checkpoint's, or the start."""
        if seq.state_len > limit:
            self.release(seq)
        found = self._deepest(seq, limit)
        if found is not None:
            slot, position = found
            self._found += 1
            self.pool.reuse(slot, seq.priority)
            self.release(seq)
            seq.state, seq.state_len = slot, position
        seq.branch = limit // self._size * self._size
        seq.cursor = seq.state_len

    def _deepest(self, seq: SequenceState, limit: int) -> tuple[int, int] | None:
        """Finds the checkpoint nearest to `limit` and beyond the live state: its slot and position."""
        for index in self._indices(seq, limit):
            slot = self.pool.find(seq.digest(index, self._size))
            if slot is not None:
                return slot, (index + 1) * self._size
        return None

    def _indices(self, seq: SequenceState, limit: int) -> range:
        """Returns the last block of each prefix up to `limit` that goes beyond the live state, the longest first."""
        if not self._publishes:
            return range(0)
        return range(limit // self._size - 1, seq.state_len // self._size - 1, -1)

    def stop(self, seq: SequenceState) -> int:
        """Returns the position at which the sequence's next row has to end at the latest, for a checkpoint there."""
        at = seq.cursor
        if not self._publishes:
            return len(seq)
        due = (*self._kept(seq), at - at % self._interval + self._interval)
        return min((position for position in due if position > at), default=len(seq))

    def _kept(self, seq: SequenceState) -> tuple[int, ...]:
        """Returns the positions whose checkpoints are kept: the end of the last whole block before the newest token,
        whose logits a retry needs again, where other sequences branched off, and after the last image."""
        images = (end // self._size * self._size for _, end in seq.image_spans()[-1:])
        return (len(seq) - 1) // self._size * self._size, seq.branch, *images

    def is_writable(self, seq: SequenceState) -> bool:
        return seq.state != NULL_BLOCK and not (self.pool.is_shared(seq.state) or self.pool.is_published(seq.state))

    def make_writable(
        self, seq: SequenceState, others: Iterable[SequenceState] = (), *, spare: bool = False
    ) -> tuple[int, int] | None:
        """Gives the sequence a slot of its own. Returns the copy of slots that must precede the step.

        A state of `others`, which do not run, is given up where no slot is left. With `spare` a slot is taken only if
        its content scores less than this sequence's.

        Raises:
            OutOfBlocks: every slot is in use; nothing has changed then.
        """
        if self.is_writable(seq):
            return None
        slot = seq.state
        if spare:
            new = self.pool.allocate_spare(seq.priority)
            if new is None:
                raise OutOfBlocks
        else:
            if not self.pool.available:
                self._give_up(each for each in others if each is not seq)
            if not self.pool.available and slot != NULL_BLOCK and not self.pool.is_shared(slot):
                self.pool.make_private(slot)  # the checkpoint is lost
                return None
            new = self.pool.allocate()
        if slot != NULL_BLOCK:
            self.pool.release([slot])
        seq.state = new
        return slot, new

    def _give_up(self, others: Iterable[SequenceState]) -> None:
        """Releases states, the least recently used first, until a slot is available."""
        for each in sorted((seq for seq in others if seq.state), key=lambda seq: seq.used_at):
            if self.pool.available:
                return
            self.release(each)

    def advance(self, seq: SequenceState, end: int, *, decodes: bool) -> None:
        """Records that the live state stands for `end` tokens, and makes a checkpoint at the end of a block.

        While a sequence `decodes`, it keeps the newest of its checkpoints alone.
        """
        seq.state_len = end
        if end % self._size or not self._publishes:
            return
        digest = seq.digest(end // self._size - 1, self._size)
        thinned = not decodes and end not in self._kept(seq)
        self.pool.publish(seq.state, digest, seq.root, seq.priority + thinned)
        if decodes:
            if seq.rolling:
                self.pool.discard(seq.rolling)
            seq.rolling = digest

    # -- drafts

    def before_boundary(self, position: int) -> int:
        """Returns how many tokens may follow up to the next end of a block, where a checkpoint is due."""
        return self._size - position % self._size if self._publishes else self._interval

    def begin_draft(self, seq: SequenceState, spare: int) -> tuple[int, int] | None:
        """Returns the copy of slots that must precede a row with a draft, to a slot beside the live state; None where
        fewer than `spare` would be left."""
        if self.pool.available <= spare:
            return None
        slot = self.pool.allocate()
        self._drafting.add(slot)
        return seq.state, slot

    def end_draft(self, seq: SequenceState, slot: int, end: int | None) -> None:
        """Makes a draft's slot the live state, for `end` tokens, or gives it up."""
        self._drafting.remove(slot)
        if end is None:
            self.pool.release([slot])
            return
        self.pool.release([seq.state])
        seq.state = slot
        self.advance(seq, end, decodes=True)

    def share(self, child: SequenceState) -> None:
        """Adds a fork's reference to the state that it has of its parent."""
        child.cursor = child.state_len
        if child.state != NULL_BLOCK:
            self.pool.acquire(child.state)

    def truncate(self, seq: SequenceState) -> None:
        """Gives up the state of tokens that the sequence no longer has."""
        if seq.state_len > len(seq):
            self.release(seq)

    def release(self, seq: SequenceState) -> None:
        """Gives up the live state: the sequence goes on from a checkpoint."""
        if seq.state != NULL_BLOCK:
            self.pool.release([seq.state])
        seq.state, seq.state_len, seq.cursor = NULL_BLOCK, 0, 0

    def stats(self) -> StateStats:
        tiers = TierStats() if self.tiers is None else self.tiers.stats()
        return StateStats(self.pool.used, self.pool.cached, self.pool.empty, self._nbytes, self._found, tiers)

    # -- offload tiers

    def reach(self, seq: SequenceState) -> int:
        """Returns the end of the longest prefix with a checkpoint in the pool or in a tier: K/V beyond is not worth
        loading."""
        for index in self._indices(seq, len(seq)):
            digest = seq.digest(index, self._size)
            if self.pool.find(digest) is not None or (self.tiers is not None and self.tiers.knows(digest)):
                return (index + 1) * self._size
        return seq.state_len

    def load(self, seq: SequenceState, limit: int, running: int, token_s: float | None) -> bool:
        """Starts loading the deepest checkpoint up to `limit` from a tier, where that is faster than computing from the
        live state; True when the sequence should wait for it. `running` sequences may each need a slot."""
        if self.tiers is None or self.pool.available <= running:
            return False
        for index in self._indices(seq, limit):
            digest = seq.digest(index, self._size)
            if self.pool.find(digest) is not None:
                return False
            if self.pool.was_evicted(digest):
                seq.fetches += 1
                return True  # it is being offloaded: after this step it can be loaded
            if self.tiers.knows(digest):
                tokens = (index + 1) * self._size - seq.state_len
                return self._fetch(seq, digest, tokens * (UNKNOWN_TOKEN_S if token_s is None else token_s), self.tiers)
        return False

    def _fetch(self, seq: SequenceState, digest: bytes, seconds: float, tiers: OffloadTiers) -> bool:
        """Starts loading a checkpoint, if that takes less than so many seconds."""
        tier = tiers.source(digest)
        if tier is not None and tiers.rates.seconds(tier, tiers.host.nbytes) > seconds:
            tiers.pass_over(tier)
            return False
        seq.fetches += 1
        tiers.fetch(seq.id, [digest])
        return tiers.is_waiting(seq.id)

    def saves(self) -> list[tuple[int, int]]:
        """Returns the (slot, row of host memory) pairs to copy before the coming step: see `OffloadTiers.saves`."""
        return [] if self.tiers is None else self.tiers.saves()

    def save(self, pairs: list[tuple[int, int]]) -> None:
        if self.tiers is not None and pairs:
            self.tiers.save(pairs)

    def keep(self, seq: SequenceState, blocks: int) -> None:
        """Writes the deepest checkpoint of the first `blocks` blocks, whose K/V is kept, to the disk, where there is
        one. No step may be in flight."""
        if self.tiers is None or not self._publishes:
            return
        for index in range(min(blocks, len(seq) // self._size) - 1, -1, -1):
            digest = seq.digest(index, self._size)
            if self.tiers.knows(digest):
                self.tiers.keep([(self.pool.find(digest) or NULL_BLOCK, digest)], seq.root, seq.priority)
                return

    def check(self, sequences: Iterable[SequenceState]) -> None:
        """Raises AssertionError unless the pool agrees with all sequences."""
        known = list(sequences)
        for seq in known:
            assert seq.state != NULL_BLOCK or not seq.state_len, "tokens have no state that stands for them"
            assert seq.state_len <= len(seq), "a state is of tokens that the sequence does not have"
        loading = [] if self.tiers is None else self.tiers.blocks
        self.pool.check([*([seq.state] for seq in known if seq.state), loading, sorted(self._drafting)])
        if self.tiers is not None:
            self.tiers.check()
