"""Schedules the tokens of the next step. Knows nothing of tensors, text or clients.

One rule: every sequence with a job lets its cursor catch up with its tokens, within the step's token budget. A decode
is one token behind, a prefill many, a prefix hit fewer, a preempted sequence all of them again.

Whose turn it is and how many tokens a step has, a policy says. Nobody who waits is overtaken for want of blocks: a
large prompt could wait for ever. When blocks run out, K/V goes first from idle sequences, then from a running one that
the policy names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.core.policies import policy_of
from engine.core.request import SequenceState
from engine.core.step import Row, Step
from engine.kv_cache.allocation import KVPins, allocate, load_blocks, reclaim_victim
from engine.kv_cache.block_pool import BlockContent, BlockPool, OutOfBlocks
from engine.kv_cache.offload import OffloadTiers

MAX_LOGITS = 512  # of a step, unless it has more sequences: each takes a vocabulary of memory
MAX_FOLLOWED = 16  # steps in a row without looking at who waits: nobody could be let in before
MAX_FETCHES = 8  # times that a job waits for blocks to come up, before it computes what is missing


@dataclass(slots=True)
class SchedulerStats:
    """Counters of the scheduler, since start."""

    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    resumed: int = 0
    resumed_late: int = 0
    resumed_tokens: int = 0
    resumed_reused_tokens: int = 0


class Scheduler:
    """Turns sequences with jobs into steps, and keeps their block tables. `tiers` lie below the pool."""

    def __init__(
        self, config: EngineConfig, pool: BlockPool, clock: Callable[[], float], tiers: OffloadTiers | None = None
    ) -> None:
        self._config = config
        self._policy = policy_of(config)
        self._size = config.block_size
        self._pool = pool
        self._clock = clock
        self._tiers = tiers
        self._leases = KVPins()
        self._tails: list[tuple[int, BlockContent]] = []  # partial blocks that were dropped in this step
        self._stalled = False  # nothing can run before a block has come up
        self._logits = MAX_LOGITS  # left for this step
        self.waiting: dict[int, SequenceState] = {}
        self.running: dict[int, SequenceState] = {}  # in order of admission
        self.idle: dict[int, SequenceState] = {}  # no job, but K/V worth keeping
        self.counters = SchedulerStats()
        self._now = 0.0  # of the step that is being made
        self._full = False  # nobody else is admitted in this step
        self._soon = False  # somebody who waits may be admitted in the next one
        self._followed = 0  # steps that were made since without asking who may

    # -- what the core tells it

    def submit(self, seq: SequenceState) -> None:
        """The sequence has a job. Its cursor moves back to where the job's first logits are. No step may be under
        way."""
        self._trim(seq)
        self.idle.pop(seq.id, None)
        seq.queued_at = self._clock()
        if seq.held_at is not None:
            self._leases.waited(seq.waiting_for, seq.queued_at - seq.held_at)
        seq.admitted = False
        seq.fetches = 0
        seq.own_tokens = seq.kv_len
        self._rewind(seq)
        self.waiting[seq.id] = seq
        self._stalled = False

    def hold(self, seq: SequenceState, longest_s: float, waiting_for: tuple[str, ...]) -> None:
        """The sequence will go on once something is over: its K/V is kept until then, or not at all."""
        seq.held_at = self._clock()
        seq.held_tokens = seq.kv_len
        seq.waiting_for = waiting_for
        seq.hold_until = seq.held_at + self._leases.lease(waiting_for, longest_s)

    @property
    def held(self) -> int:
        """Sequences whose K/V is kept for them while they wait for something."""
        now = self._clock()
        return sum(seq.hold_until > now for seq in self.idle.values())

    def finish(self, seq: SequenceState) -> None:
        """The job is over; K/V stays until the sequence closes or its blocks are needed."""
        seq.job = None
        seq.used_at = self._clock()
        self._forget(seq)
        if seq.table:
            self.idle[seq.id] = seq

    def again(self, seq: SequenceState) -> None:
        """The logits of the sequence's last token are wanted once more."""
        self._rewind(seq)

    def release(self, seq: SequenceState) -> None:
        """The sequence is gone: all its blocks go back to the pool now."""
        self._forget(seq)
        self.idle.pop(seq.id, None)
        self._pool.release(seq.drop_kv())

    def keep(self, seq: SequenceState) -> None:
        """Put the sequence's K/V on the disk, where there is one. No step may be under way."""
        if self._tiers is not None:
            full, part = divmod(seq.kv_len, self._size)
            digests = [seq.digest(index, self._size) for index in range(full)]
            if part:
                digests.append(seq.partial_digest(seq.kv_len, self._size))
            self._tiers.keep(zip(seq.table, digests, strict=False), seq.root, seq.priority)

    def truncate(self, seq: SequenceState, length: int) -> None:
        self._pool.release(seq.truncate(length, self._size))
        self._stalled = False

    def fork(self, seq: SequenceState, child_id: int, arrival: int) -> SequenceState:
        """A child that shares all of the parent's blocks; whoever writes to a shared one first copies it. No step may
        be under way."""
        self._trim(seq)
        child = seq.fork(child_id, arrival)
        for block in child.table:
            self._pool.acquire(block)
        if child.table:
            child.used_at = self._clock()
            self.idle[child_id] = child
        return child

    @property
    def has_work(self) -> bool:
        """Returns whether a step would do something. Blocks that come up from a tier are told by `came_up`."""
        if self._stalled:
            return False
        return bool(self.running) or any(not self._waits(seq) for seq in self.waiting.values())

    @property
    def stalled(self) -> bool:
        """Returns whether nothing can run before blocks have come up."""
        return self._stalled

    @property
    def bringing_up(self) -> bool:
        """Returns whether somebody waits for blocks."""
        return self._tiers is not None and bool(self._tiers.blocks)

    def came_up(self) -> None:
        """The tiers' worker has done something: who waited for a block takes it, before others can."""
        served = None if self._tiers is None else self._tiers.collect()
        if served is not None:
            self._stalled = False
            for id in served & self.waiting.keys():
                self._match(self.waiting[id])

    def tables(self) -> list[list[int]]:
        """Block tables of every sequence known here, and blocks on their way up, for `BlockPool.check`."""
        tables = [s.table for group in (self.waiting, self.running, self.idle) for s in group.values()]
        return tables if self._tiers is None else [*tables, self._tiers.blocks]

    def fits(self, tokens: int) -> bool:
        """Returns whether a sequence of this many tokens could ever run, alone in the pool."""
        return -(-tokens // self._size) <= self._pool.total

    # -- one step

    def schedule(self) -> Step:
        """Choose the next step's rows and give them their blocks."""
        self.came_up()
        self._pool.clear_claims()
        rows: dict[int, Row] = {}
        self._now, self._logits = self._clock(), MAX_LOGITS
        self._full, self._soon, self._followed = False, False, 0
        waiting = dict(self.waiting)  # what is sent away in this step does not come back in it
        budget = self._policy.budget(self.running.values(), waiting.values())
        for seq, most in self._policy.turns(list(self.running.values()), list(waiting.values()), self._now):
            if seq.id in waiting and seq.id in self.waiting and not self._full and not self._waits(seq):
                budget += self._admit(seq, rows)
            if seq.id in self.running:
                budget += self._schedule_row(seq, budget if most is None else min(budget, most), rows)
            if budget <= 0:
                self._soon |= not self._full
                break
        return self._step(list(rows.values()))

    def schedule_ahead(self, step: Step) -> Step | None:
        """The step after one that draws in every row and is under way: who runs in it goes on, by a token that nobody
        knows yet. `step` is completed, as the device takes all that it is told from now on after it.

        None, and nothing has changed, where that cannot be said: it takes the tokens to tell what comes next, others
        may run, too, or blocks are short.
        """
        if self.waiting and (self._soon or self._followed >= MAX_FOLLOWED):
            return None
        running = [(at, row.seq, row.seq.job) for at, row in enumerate(step.rows) if row.seq.job is not None]
        if len(running) != len(self.running):
            return None
        following: list[tuple[int, SequenceState]] = []
        for at, seq, job in running:
            goes_on = job.goes_on()
            if goes_on is None or (self.waiting and not goes_on):  # there will be a place
                return None
            if goes_on:
                following.append((at, seq))
        needed = sum(len(seq) >= seq.writable for _, seq in following)
        if not following or self._pool.available < needed:
            return None
        self.complete(step)
        self._followed += 1
        rows: list[Row] = []
        for at, seq in following:
            length = len(seq)
            copy = allocate(seq, length + 1, self._pool, self._size)
            rows.append(Row(seq, length, 1, length, copy, drawn_at=at))
            self._policy.charged(seq, 1)
        return self._step(rows)

    def ran(self, step: Step, seconds: float) -> None:
        """Reports the time of a step, sampling included: policies learn from it."""
        decodes = sum(row.count == 1 for row in step.rows)
        self._policy.ran(decodes, step.tokens - decodes, seconds)

    def complete(self, step: Step) -> None:
        """The step ran, or will have before anything that the device is told from now on: its tokens have K/V, and
        blocks that became full can be found. A row whose job has ended meanwhile is thrown away: what it wrote lies
        beyond the sequence's K/V.
        """
        size, publishes = self._size, self._config.prefix_cache
        for row in step.rows:
            seq = row.seq
            if seq.job is None:
                continue
            old, end = seq.kv_len, row.start + row.count
            seq.cursor = end
            if end > old:
                seq.kv_len = end
            if row.count == 1 and row.start >= seq.preempted_at:  # a decode, as most are
                self.counters.prompt_tokens += not seq.generated[row.start]
            else:
                again = max(0, min(end, seq.preempted_at) - row.start)
                self.counters.recomputed_tokens += again
                self.counters.prompt_tokens += seq.generated.count(0, row.start + again, end)
            if publishes and end // size > old // size:
                for index in range(old // size, end // size):
                    self._pool.publish(seq.table[index], seq.digest(index, size), seq.root, seq.priority)
        if self._tiers is not None:
            self._tiers.ran()

    # -- parts

    def _step(self, rows: list[Row]) -> Step:
        step = Step(rows, sum(row.count for row in rows))
        if self._tiers is not None:
            step.saves = self._tiers.saves(self._tails)
            self._tails.clear()
            self._stalled = not rows and bool(self._tiers.blocks)
        return step

    def _schedule_row(self, seq: SequenceState, most: int, rows: dict[int, Row]) -> int:
        """Add a row for a running sequence, or make its row longer, by `most` tokens at most. Returns the change of the
        budget: preempting gives tokens back.
        """
        before = rows.get(seq.id)
        length, cursor = len(seq.tokens), seq.cursor
        assert seq.job is not None
        logits_from = seq.job.logits_from(length)
        if before is None and length - cursor == 1 and length <= seq.writable and most > 0:  # a decode, as most are
            rows[seq.id] = Row(seq, cursor, 1, logits_from)
            self._logits -= 1
            self._policy.charged(seq, 1)
            return -1
        had = 0 if before is None else before.count
        self._logits += 0 if before is None else before.logits
        silent = max(0, logits_from - cursor)
        count = min(length - cursor, had + most, silent + max(1, self._logits))
        freed = 0
        while True:
            try:
                copy = allocate(seq, cursor + count, self._pool, self._size)
                break
            except OutOfBlocks:
                if self._reclaim(seq):
                    continue
                victim = self._policy.victim(self._first_to_lose(), self._now)
                freed += self._send_away(victim, rows)
                if victim is seq:
                    return freed
        if copy is None and before is not None:
            copy = before.copy
        rows[seq.id] = row = Row(seq, cursor, count, logits_from, copy)
        self._logits -= row.logits
        if length - cursor > 1:
            self._claim(seq)
        self._policy.charged(seq, count - had)
        return freed - (count - had)

    def _admit(self, seq: SequenceState, rows: dict[int, Row]) -> int:
        """Let a waiting sequence run, if there is room or the policy makes some. Returns the tokens given back."""
        freed = 0
        while len(self.running) >= self._config.max_running:
            victim = self._policy.gives_way(self.running.values(), seq, self._now)
            if victim is None:
                self._full = not self._policy.makes_way  # else there may be a place for another
                return freed
            freed += self._send_away(victim, rows)
        if self._match(seq):
            self._soon = True
            return freed  # a twin computes the next block of its prefix in this step
        while not self._make_room(seq):
            victim = self._policy.gives_way(self.running.values(), seq, self._now)
            if victim is None:
                self._full = True
                return freed
            freed += self._send_away(victim, rows)
        if self._bring_up(seq):
            self._soon = True
            return freed  # others run meanwhile
        del self.waiting[seq.id]
        self.running[seq.id] = seq
        self._count_admission(seq)
        return freed

    def _send_away(self, seq: SequenceState, rows: dict[int, Row]) -> int:
        """Preempt a sequence. Returns the tokens that it had in this step."""
        self._soon = True
        row = rows.pop(seq.id, None)
        self._preempt(seq, copying=row is not None and row.copy is not None)
        if row is None:
            return 0
        self._policy.charged(seq, -row.count)
        return row.count

    def _make_room(self, seq: SequenceState) -> bool:
        """Returns whether the whole of a waiting sequence fits beside the running ones, taking from idle ones if need
        be."""
        if self._config.reserve_tokens is not None:
            reserved = -(-self._config.reserve_tokens // self._size)
            return not self.running or (len(self.running) + 1) * reserved <= self._pool.total
        growth = len(self.running)  # each running sequence may need one more block soon
        needed = -(-len(seq) // self._size) - len(seq.table) + 1
        while self._pool.available < needed + growth:
            if not self._reclaim(seq, spare_held=bool(self.running)):
                return not (self.running or self.bringing_up)  # alone it fits: the core refused what cannot
        return True

    def _match(self, seq: SequenceState) -> bool:
        """Take over the cached blocks that continue this sequence's K/V; True when it should wait for a twin."""
        if not self._config.prefix_cache or seq.kv_len != len(seq.table) * self._size:
            return False
        waits = False
        for index in range(len(seq.table), len(seq) // self._size):
            digest = seq.digest(index, self._size)
            block = self._pool.find(digest)
            if block is None:
                waits = self._pool.is_pending(digest)
                break
            self._pool.reuse(block, seq.priority)
            seq.table.append(block)
            seq.kv_len += self._size
        if seq.tail // self._size == len(seq.table) and seq.tail > seq.kv_len:
            block = self._pool.find(seq.partial_digest(seq.tail, self._size))
            if block is not None:
                self._pool.reuse(block, seq.priority)
                seq.table.append(block)
                seq.kv_len = seq.tail
        self._rewind(seq)
        return waits

    def _waits(self, seq: SequenceState) -> bool:
        return self._tiers is not None and self._tiers.is_waiting(seq.id)

    def _bring_up(self, seq: SequenceState) -> bool:
        """Have blocks that continue this sequence's K/V brought up, where that is faster than computing them; True when
        it should wait for them.
        """
        if self._tiers is None or seq.fetches >= MAX_FETCHES or seq.kv_len != len(seq.table) * self._size:
            return False
        return load_blocks(seq, self._size, self._pool, self._tiers, self._policy.token_s)

    def _rewind(self, seq: SequenceState) -> None:
        """Put the cursor where the next logits are wanted, or where K/V ends if that is earlier."""
        assert seq.job is not None
        seq.cursor = min(seq.kv_len, seq.job.logits_from(len(seq)))

    def _count_admission(self, seq: SequenceState) -> None:
        if seq.admitted:
            return
        seq.admitted = True
        seq.cached_tokens = seq.cursor
        if seq.held_at is not None:
            self.counters.resumed += 1
            self.counters.resumed_late += seq.queued_at > seq.hold_until
            self.counters.resumed_tokens += seq.held_tokens
            self.counters.resumed_reused_tokens += min(seq.kv_len, seq.held_tokens)
            seq.held_at, seq.hold_until = None, 0.0
        self.counters.prefix_query_tokens += len(seq) - seq.own_tokens
        self.counters.prefix_hit_tokens += max(0, seq.cursor - seq.own_tokens)

    def _claim(self, seq: SequenceState) -> None:
        if self._config.prefix_cache:
            first, last = seq.kv_len // self._size, len(seq) // self._size
            self._pool.claim([seq.digest(index, self._size) for index in range(first, last)])

    def _reclaim(self, keeper: SequenceState, *, spare_held: bool = False) -> bool:
        """Take the K/V that will be missed least from a sequence that does not run; False when there is none.
        `spare_held`: of held ones only what they have beyond their share.
        """
        now = self._clock()
        holders = [s for s in self.waiting.values() if s is not keeper]
        seq = reclaim_victim(self.idle.values(), holders, self._pool, now, spare_held=spare_held)
        if seq is None:
            return False
        self.idle.pop(seq.id, None)
        self._drop(seq)
        return True

    def _first_to_lose(self) -> Collection[SequenceState]:
        """Running sequences: those of tenants that have more than their share, if there are such."""
        greedy = self._pool.greedy
        return [seq for seq in self.running.values() if seq.root in greedy] or self.running.values()

    def _preempt(self, seq: SequenceState, *, copying: bool) -> None:
        self.counters.preemptions += 1
        del self.running[seq.id]
        self._drop(seq, copying=copying)
        self.waiting[seq.id] = seq

    def _drop(self, seq: SequenceState, *, copying: bool = False) -> None:
        """Take a sequence's K/V. Full blocks stay findable; a partial one goes down a tier at once, where there are
        tiers, unless it was to be copied in this step and so holds nothing yet.
        """
        seq.tail = seq.tail if seq.tail > seq.kv_len else 0
        if self._tiers is not None and seq.kv_len % self._size and not (seq.tail or copying):
            seq.tail = seq.kv_len
            content = BlockContent(seq.partial_digest(seq.tail, self._size), seq.root, seq.priority)
            self._tails.append((seq.table[seq.kv_len // self._size], content))
        self._pool.release(seq.drop_kv())

    def _trim(self, seq: SequenceState) -> None:
        """Take the block that was for a token which did not come: blocks of the cache may stand there."""
        self._pool.release(seq.trim(self._size))

    def _forget(self, seq: SequenceState) -> None:
        self.running.pop(seq.id, None)
        self.waiting.pop(seq.id, None)
        self._stalled, self._soon = False, True
        if self._tiers is not None:
            self._tiers.forget(seq.id)
