"""Continuous batching: schedules the tokens of the next step. Knows nothing of tensors, text or clients.

One rule: every sequence with a job lets its cursor catch up with its tokens, within the step's token budget. A decode
is one token behind, a (chunked) prefill many, a hit of the prefix cache fewer, a preempted sequence all of them again.

A policy decides the order of turns and the tokens of a step. No waiting sequence is overtaken for want of free blocks:
a large prompt could wait for ever. When blocks run out, K/V is reclaimed from idle sequences first, then by preemption
of a running one that the policy chooses. A preempted sequence is recomputed from its cached or offloaded blocks; there
is no swap. When nothing runs at all, prefixes that are likely to be asked for are read (`prefix_warming`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.config import EngineConfig
from engine.core.adapter_cache import AdapterCache
from engine.core.policies import policy_of
from engine.core.prefix_warming import PrefixWarmer
from engine.core.request import PrefillJob, SequenceState
from engine.core.scheduler_stats import SchedulerStats
from engine.core.step import Row, Step
from engine.core.token_tree import NO_DRAFTS, Tree
from engine.kv_cache.allocation import (
    IdleSequences,
    advance_kv,
    allocate,
    blocks_for,
    fork_kv,
    keep_blocks,
    load_blocks,
    match_prefix,
    reclaim_victim,
    tail_of,
)
from engine.kv_cache.block_pool import BlockContent, BlockPool, OutOfBlocks
from engine.kv_cache.chunk_reuse.chunk_index import ChunkIndex
from engine.kv_cache.kv_connector import KVConnector
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.offload import OffloadTiers
from engine.kv_cache.state_checkpoints import StateCheckpoints
from engine.kv_cache.streaming.context_shift import forget_for_job, shift_context
from engine.multimodal.encoder_cache import EncoderCache
from engine.speculation.draft_rows import DraftRows

MAX_LOGITS = 512  # rows of logits in a step, unless it has more sequences: each takes a vocabulary of memory
MAX_STEPS_AHEAD = 16  # steps scheduled ahead in a row while sequences wait: none could be admitted before
MAX_FETCHES = 8  # times that a job waits for loads, before it recomputes missing blocks


class Scheduler:
    """Turns sequences with jobs into steps, and keeps their block tables. `tiers`: the offload tiers below the pool,
    `states`: of a model with recurrent layers, `images`: of one that sees, `connector`: to engines that prefill."""

    def __init__(
        self, config: EngineConfig, pool: BlockPool, clock: Callable[[], float], tiers: OffloadTiers | None = None,
        states: StateCheckpoints | None = None, images: EncoderCache | None = None, groups: KVGroups | None = None,
        adapters: AdapterCache | None = None, connector: KVConnector | None = None,
    ) -> None:  # fmt: skip
        self._config, self._policy, self._size = config, policy_of(config), config.block_size
        self._pool, self._clock, self._tiers, self._connector = pool, clock, tiers, connector
        self._states, self._groups, self.chunks = states, groups, ChunkIndex.of(config, pool)
        self.width = groups.width if groups else 1  # blocks of a table's entry
        below = (tiers, None if states is None else states.tiers, connector)
        self.tiers: list[OffloadTiers | KVConnector] = [each for each in below if each is not None]
        self._max_running = config.max_running if states is None else min(config.max_running, states.pool.total)
        self.draft_rows = DraftRows(pool, config.block_size, states, groups)
        self._tails: list[tuple[int, BlockContent]] = []  # partial blocks that were dropped in this step
        self.stalled = False  # nothing can run before a block is loaded
        self._logits = MAX_LOGITS  # left for this step
        self.waiting: dict[int, SequenceState] = {}
        self.running: dict[int, SequenceState] = {}  # in order of admission
        self.idle = IdleSequences(clock)
        if connector is not None:
            connector.jobs, connector.token_s = (self.running, self.waiting), lambda: self._policy.token_s
        self.counters = SchedulerStats()
        self.images = images or EncoderCache()  # a sequence waits for those that it has to read
        self.adapters = adapters or AdapterCache()  # and for its own
        self.warmer = PrefixWarmer(pool, config.block_size, config.step_tokens, states, groups)
        self._now = 0.0  # of the current step
        self._full = self._soon = False  # none is admitted in this step; a waiting one may be in the next
        self._steps_ahead = 0  # steps scheduled ahead since waiting sequences were considered

    # -- commands of the core

    def submit(self, seq: SequenceState) -> None:
        """Queues a sequence that has a job. Its cursor moves back to the job's first logits. No step may be in
        flight."""
        self._pool.release(seq.trim(self._size))  # of a token that did not come: cached blocks may follow there
        forget_for_job(seq, self._pool, self._size)
        self.idle.pop(seq.id, None)
        seq.queued_at = self._clock()
        self.idle.resumed(seq)
        seq.admitted, seq.fetches, seq.rolling = False, 0, b""
        self.warmer.drop_prefixes_of(seq)
        self.rewind(seq)
        seq.own_tokens = seq.kv_len if self._states is None else seq.state_len
        self.waiting[seq.id] = seq
        self.stalled = False

    @property
    def warms_at(self) -> float | None:
        """Returns the time at which the next prefix is warmed, if nothing comes before."""
        return None if self.running or self.waiting else self.warmer.starts_at

    def finish(self, seq: SequenceState) -> None:
        """Ends the job; K/V stays until the sequence closes or its blocks are needed."""
        seq.job = None
        self.park(seq)

    def park(self, seq: SequenceState) -> None:
        """Makes a sequence idle. In a mixture one waits so for the others' logits: it holds no place, and its blocks
        may be reclaimed, so that the others can always run. No step may be in flight."""
        seq.used_at = self._clock()
        self._forget(seq)
        if seq.table:
            self.idle[seq.id] = seq

    def unpark(self, seq: SequenceState) -> None:
        """Queues a parked sequence again, if it is; it keeps its turn. No step may be in flight."""
        if seq.id not in self.running and seq.id not in self.waiting:
            self.idle.pop(seq.id, None)
            self.rewind(seq)
            self.waiting[seq.id] = seq
            self.stalled = False

    def release(self, seq: SequenceState) -> None:
        """Releases all blocks of a closed sequence to the pool."""
        self._forget(seq)
        self.idle.pop(seq.id, None)
        self._pool.release(seq.drop_kv())
        if self._states is not None:
            self._states.release(seq)

    def keep(self, seq: SequenceState) -> None:
        """Writes the sequence's K/V to the disk, where there is one. No step may be in flight."""
        if self._tiers is not None:
            kept = keep_blocks(seq, self._size, self._tiers, self._groups)
            if self._states is not None:
                self._states.keep(seq, kept)

    def truncate(self, seq: SequenceState, length: int) -> None:
        self._pool.release(seq.truncate(length, self._size))
        if self._states is not None:
            self._states.truncate(seq)
        self.stalled = False

    def fork(self, seq: SequenceState, child_id: int, arrival: int) -> SequenceState:
        """Forks a child that shares all of the parent's blocks (copy-on-write). No step may be in flight."""
        child = fork_kv(seq, child_id, arrival, self._pool, self._size)
        if self._states is not None:
            self._states.share(child)
        if child.table:
            child.used_at = self._clock()
            self.idle[child_id] = child
        return child

    @property
    def has_work(self) -> bool:
        """Returns whether a step would do something. A finished load changes this by `take_loaded`."""
        if self.stalled:
            return False
        if self.running or self.waiting:
            return bool(self.running) or any(not self._waits(seq) for seq in self.waiting.values())
        return (at := self.warmer.starts_at) is not None and self._clock() >= at

    @property
    def loading(self) -> bool:
        """Returns whether a sequence waits for its adapter, or for blocks from a tier."""
        return self.adapters.loading or any(tiers.blocks for tiers in self.tiers)

    def take_loaded(self) -> None:
        """Takes in the tiers' results: sequences that wait for a loaded block take it, before others can."""
        for served in [tiers.collect() for tiers in self.tiers]:
            if served is not None:
                self.stalled = False
                for id in served & self.waiting.keys():
                    self._match(self.waiting[id])

    def save(self, step: Step) -> None:
        """Copies what the step overwrites to the tiers, before it runs."""
        if self._tiers is not None and step.saves:
            self._tiers.save(step.saves)
        if self._states is not None:
            self._states.save(step.state_saves)

    def check(self) -> None:
        """Raises AssertionError unless the pools and the tiers agree with every sequence known here."""
        known = [*self.waiting.values(), *self.running.values(), *self.idle.values(), *self.warmer.prefixes]
        tables = [*(seq.blocks for seq in known), *self.adapters.tables, *self.chunks.held]
        below = [each for each in (self._tiers, self._connector) if each is not None]
        self._pool.check([*tables, *(each.blocks for each in below)])
        for each in below:
            each.check()
        if self._states is not None:
            self._states.check(known)

    # -- one step

    def schedule(self, drafts: Mapping[int, Tree] = NO_DRAFTS) -> Step:
        """Chooses the next step's rows and allocates their blocks. `drafts`: proposed tokens by sequence, which run as
        far as the step has tokens, logits and empty blocks left: nothing is reclaimed or preempted for them."""
        self.take_loaded()
        self._pool.clear_pending()
        self.chunks.release()
        rows: dict[int, Row] = {}
        self._now, self._logits = self._clock(), MAX_LOGITS
        self._full, self._soon, self._steps_ahead = False, False, 0
        if not self.running and not self.waiting:
            warmed = self.warmer.row(self.adapters.bring)
            return self._step([] if warmed is None else [warmed])
        self.warmer.pause(self._now)
        self.adapters.plan(self.running, self.waiting.values(), self)
        waiting = dict(self.waiting)  # a sequence preempted in this step is not admitted in it again
        budget = self._policy.budget(self.running.values(), waiting.values())
        for seq, max_tokens in self._policy.turns(list(self.running.values()), list(waiting.values()), self._now):
            if seq.id in waiting and seq.id in self.waiting and not self._full and not self._waits(seq):
                budget += self._admit(seq, rows)
            if seq.id in self.running:
                budget += self._schedule_row(seq, budget if max_tokens is None else min(budget, max_tokens), rows)
                if seq.id in drafts and seq.id in rows:
                    self._draft(rows, seq, drafts[seq.id])
            if budget <= 0:
                self._soon |= not self._full
                break
        return self._step(list(rows.values()))

    def schedule_ahead(self, step: Step) -> Step | None:
        """Schedules the step after one in flight that samples in every row: its sequences go on, by tokens that are not
        known yet. `step` is completed, as the device runs steps in order.

        None, and nothing has changed, where that cannot be decided: the next step depends on the tokens, other
        sequences may run too, or blocks are short.
        """
        if self._states is not None or (self.waiting and (self._soon or self._steps_ahead >= MAX_STEPS_AHEAD)):
            return None  # a row that is discarded would have advanced a state
        following = step.going_on(running=len(self.running), waiting=bool(self.waiting))
        if not following or self._pool.available < self.width * sum(len(s) >= s.writable for _, s in following):
            return None
        self.complete(step)
        self._steps_ahead += 1
        rows: list[Row] = []
        for at, seq in following:
            copies = allocate(seq, len(seq) + 1, self._pool, self._size, self._groups)
            rows.append(Row(seq, len(seq), 1, len(seq), copies, sampled_at=at))
            self._policy.charged(seq, 1)
        return self._step(rows)

    def ran(self, step: Step, seconds: float) -> None:
        """Reports the time of a step, sampling included: policies learn from it, or the size of the next chunk that is
        warmed."""
        if any(isinstance(row.seq.job, PrefillJob) for row in step.rows[:1]):
            self.warmer.took(step.tokens, seconds)
            return
        decodes = sum(row.count == 1 for row in step.rows)
        self._policy.ran(decodes, step.tokens - decodes, seconds)

    def complete(self, step: Step) -> None:
        """Records a step that ran, or that will run before any later launch: its tokens have K/V, and full blocks are
        published to the prefix cache. A row whose job has ended meanwhile is discarded: it wrote beyond the sequence's
        K/V."""
        for row in step.rows:
            seq = row.seq
            if seq.job is None and (not row.state or seq.state != row.state):
                self.draft_rows.drop(row)
                continue
            if isinstance(seq.job, PrefillJob):
                self.counters.warmed_tokens += row.count
                self.warmer.ran(row)
                continue
            end, before = row.end, seq.kv_len
            advance_kv(seq, end, self._pool, self._size, self._groups, publishes=self._config.prefix_cache)
            self.chunks.learn(seq, before)
            self.counters.computed(row)
            self.adapters.computed(row)
            if self._states is not None and not row.draft:
                self._states.advance(seq, end, decodes=row.count == 1 and end == len(seq))
        self.chunks.release()
        for tiers in self.tiers:
            tiers.ran()

    def accepted(self, row: Row, path: Sequence[int]) -> None:
        """Records that the tokens `path` of a row's draft are the sequence's, so that their K/V is valid."""
        seq = row.seq
        advance_kv(seq, row.end + len(path), self._pool, self._size, self._groups, publishes=self._config.prefix_cache)
        if not self.draft_rows.accept(row, path):
            seq.cursor = seq.state_len

    # -- parts

    def _draft(self, rows: dict[int, Row], seq: SequenceState, draft: Tree) -> None:
        """Adds a draft to a sequence's row. Prompts have the budget beside decodes; drafts have the rest of a step."""
        most = self._config.step_tokens + len(rows) - len(self.running) - sum(row.width for row in rows.values())
        drafted = self.draft_rows.add(rows[seq.id], draft, min(most, self._logits), len(self.running))
        self._logits -= drafted
        self._policy.charged(seq, drafted)

    def _step(self, rows: list[Row]) -> Step:
        step = Step(rows, sum(row.width for row in rows))
        if self._tiers is not None:
            step.saves = self._tiers.saves(self._tails)
            self._tails.clear()
        if self._states is not None:
            step.state_saves = self._states.saves()
        self.stalled = not rows and self.loading
        return step

    def _schedule_row(self, seq: SequenceState, max_tokens: int, rows: dict[int, Row]) -> int:
        """Adds a row for a running sequence, or extends its row, by at most `max_tokens` tokens (chunked prefill).
        Returns the change of the budget: preemption gives tokens back."""
        before = rows.get(seq.id)
        if before is not None and before.draft:
            return 0  # it has all of its tokens
        shift = None if seq.streaming is None else shift_context(seq, self._pool, self._size, self.chunks.held)
        length, cursor, states = len(seq.tokens), seq.cursor, self._states
        assert seq.job is not None
        logits_from = seq.job.logits_from(length)
        writable = length <= seq.writable and (states is None or states.is_writable(seq))
        if before is None and length - cursor == 1 and writable and max_tokens > 0:  # most are decodes
            rows[seq.id] = Row(seq, cursor, 1, logits_from, state=seq.state)
            self._logits -= 1
            self._policy.charged(seq, 1)
            return -1
        had, logits, move = (0, 0, shift or self.chunks.reuse(seq, logits_from)) if before is None else before.extended
        cursor, self._logits = (cursor if move is None else move.end), self._logits + logits
        count = min(length - cursor, had + max_tokens, max(0, logits_from - cursor) + max(1, self._logits))
        if states is not None:
            count = min(count, states.stop(seq) - cursor)
        count = self.chunks.stop(seq, cursor, self.images.whole(seq, cursor + count)) - cursor
        freed, state_copy = 0, None
        while True:
            try:
                if states is not None:
                    state_copy = states.make_writable(seq, [*self.idle.values(), *self.waiting.values()]) or state_copy
                copies = allocate(seq, cursor + count, self._pool, self._size, self._groups)
                break
            except OutOfBlocks:
                has_state = states is None or states.is_writable(seq)
                if has_state and (self._reclaim(seq) or self.adapters.yield_reserved()):
                    continue
                greedy = self._pool.greedy  # tenants above their share lose their K/V first
                others = [each for each in self.running.values() if each.root in greedy] or self.running.values()
                victim = self._policy.victim(others, self._now)
                freed += self.preempt(victim, rows)
                if victim is seq:
                    return freed
        if before is not None:
            copies, state_copy = copies or before.copies, state_copy or before.state_copy
        rows[seq.id] = row = Row(seq, cursor, count, logits_from, copies, None, seq.state, state_copy, move=move)
        self._logits -= row.logits
        if length - cursor > 1 and self._config.prefix_cache:
            blocks = range(seq.kv_len // self._size, length // self._size)
            self._pool.mark_pending([seq.digest(index, self._size) for index in blocks])
        self._policy.charged(seq, count - had)
        return freed - (count - had)

    def _admit(self, seq: SequenceState, rows: dict[int, Row]) -> int:
        """Admits a waiting sequence, if its adapter is resident and it fits or the policy preempts another. Returns the
        tokens given back."""
        if not self.adapters.place(seq):
            return 0
        freed = self._fit(seq, rows)
        if seq.id not in self.running:
            self.adapters.left(seq)
        return freed

    def _fit(self, seq: SequenceState, rows: dict[int, Row]) -> int:
        freed = 0
        while len(self.running) >= self._max_running:
            victim = self._policy.victim_for(self.running.values(), seq, self._now)
            if victim is None:
                self._full = not self._policy.preempts  # else another sequence may be admitted
                return freed
            freed += self.preempt(victim, rows)
        if self._match(seq):
            self._soon = True
            return freed  # another sequence prefills the same block in this step
        while not self._free_blocks_for(seq):
            victim = self._policy.victim_for(self.running.values(), seq, self._now)
            if victim is None:
                self._full = not self.adapters.reserved(seq)  # those go first
                return freed
            freed += self.preempt(victim, rows)
        loads = self._load_blocks(seq) or (self._connector is not None and self._connector.load(seq))
        if loads or self.images.encodes(seq):
            self._soon = True
            return freed  # others run meanwhile
        del self.waiting[seq.id]
        self.running[seq.id] = seq
        self.adapters.admitted(seq)
        self.counters.admitted(seq, seq.kv_len if self._states is None else seq.cursor)
        return freed

    def preempt(self, seq: SequenceState, rows: dict[int, Row]) -> int:
        """Preempts a running sequence. Returns the tokens that it had in this step, of `rows`."""
        self._soon = True
        row = rows.pop(seq.id, None)
        self.counters.preemptions += 1
        del self.running[seq.id]
        self.adapters.left(seq)
        seq.turned_at = self._now
        self._drop(seq, copying=row is not None and bool(row.copies))
        self.waiting[seq.id] = seq
        if row is None:
            return 0
        self.draft_rows.drop(row)
        self._policy.charged(seq, -row.width)
        return row.width

    def _free_blocks_for(self, seq: SequenceState) -> bool:
        """Returns whether a waiting sequence fits whole beside the running ones; reclaims idle ones' blocks for it."""
        if self._config.reserve_tokens is not None:
            reserved = blocks_for(self._config.reserve_tokens, self._size, self._groups)
            return not self.running or (len(self.running) + 1) * reserved <= self._pool.total
        growth = len(self.running) * self.width  # each running sequence may need one more block soon
        while self._pool.available < self.blocks_to_admit(seq) + growth + self.adapters.reserved(seq):
            if not self._reclaim(seq, spare_pinned=bool(self.running)):
                # alone it fits: the core refuses longer ones
                return not (self.running or self.loading or self.adapters.reserved(seq))
        return True

    def blocks_to_admit(self, seq: SequenceState) -> int:
        """Returns the blocks that the admission of a waiting sequence takes beside its adapter's."""
        return blocks_for(len(seq), self._size, self._groups) - seq.held + self.width

    def make_room(self, seq: SequenceState, *, preempting: bool) -> bool:
        """Reclaims an idle sequence's K/V for the adapter of a waiting one, or preempts a running one; False where
        there is none. No step may be in flight."""
        reclaimed = self._reclaim(seq, spare_pinned=bool(self.running))
        if preempts := not reclaimed and preempting and bool(self.running):
            self.preempt(self._policy.victim(self.running.values(), self._now), {})
        return reclaimed or preempts

    def _match(self, seq: SequenceState) -> bool:
        """Takes over the cached blocks that continue this K/V; True when it should wait for a duplicate prefill."""
        waits = False
        if self._config.prefix_cache and not seq.moved and seq.kv_len == len(seq.table) * self._size:
            waits, warmed = match_prefix(seq, self._size, self._pool, self._groups)
            self.counters.warmed_hit_tokens += warmed
        self.rewind(seq)
        return waits

    def _waits(self, seq: SequenceState) -> bool:
        loads = self.adapters.is_waiting(seq) or self.images.is_waiting(seq.id)
        return loads or any(tiers.is_waiting(seq.id) for tiers in self.tiers)

    def _load_blocks(self, seq: SequenceState) -> bool:
        """Starts loading blocks that continue this K/V, where that beats recomputing; True when it should wait."""
        if self._tiers is None or seq.fetches >= MAX_FETCHES:
            return False
        states, token_s = self._states, self._policy.token_s
        end = None if states is None else states.reach(seq)
        whole = not seq.moved and seq.kv_len == len(seq.table) * self._size
        if whole and load_blocks(seq, self._size, self._pool, self._tiers, token_s, end, self._groups):
            return True
        return states is not None and states.load(seq, self._rewound(seq), len(self.running), token_s)

    def _rewound(self, seq: SequenceState) -> int:
        """Returns the position of the job's next logits, or K/V's end if that is earlier."""
        assert seq.job is not None
        return min(seq.kv_len, seq.job.logits_from(len(seq)))

    def rewind(self, seq: SequenceState) -> None:
        """Moves the cursor to the job's next logits, to K/V's end or, of recurrent layers, to a known state if one of
        these is earlier."""
        seq.cursor = self._rewound(seq)
        if self._groups:
            seq.cursor = self._groups.cover(seq, seq.cursor, self._pool)
        if self._states is not None:
            self._states.seek(seq, seq.cursor)

    def _reclaim(self, keeper: SequenceState, *, spare_pinned: bool = False) -> bool:
        """Reclaims the K/V of the sequence that misses it least, of those that do not run; False when there is none.
        `spare_pinned`: of pinned ones only those beyond their share."""
        holders = [s for s in self.waiting.values() if s is not keeper]
        seq = reclaim_victim(self.idle.values(), holders, self._pool, self._clock(), spare_pinned=spare_pinned)
        if seq is None:
            return False
        self.idle.pop(seq.id, None)
        self._drop(seq)
        return True

    def _drop(self, seq: SequenceState, *, copying: bool = False) -> None:
        """Drops a sequence's K/V. Full blocks stay cached; a partial one is offloaded at once, where there are tiers,
        unless it was to be copied in this step and so holds nothing yet."""
        seq.tail = seq.tail if seq.tail > seq.kv_len else 0
        if self._tiers is not None and seq.kv_len % self._size and not (seq.tail or copying or seq.moved):
            self._tails += tail_of(seq, self._size, self._groups)
        self._pool.release(seq.drop_kv())
        if self._states is not None:
            self._states.release(seq)

    def _forget(self, seq: SequenceState) -> None:
        if self.running.pop(seq.id, None) is not None:
            self.adapters.left(seq)
        self.waiting.pop(seq.id, None)
        self.stalled, self._soon = False, True
        self.warmer.pause(self._clock())
        for tiers in self.tiers:
            tiers.forget(seq.id)
