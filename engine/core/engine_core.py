"""The synchronous core of the engine: commands in, one step at a time, replies out.

Knows nothing of threads, event loops or HTTP. A step schedules rows, runs them on the device, samples tokens, and
replies to each job. It may be driven by a thread, a process or a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count

from engine.config import EngineConfig
from engine.core import messages as m
from engine.core.adapters import CoreAdapters
from engine.core.async_steps import DeviceThread, InFlightSteps, StepTimer
from engine.core.mixture import Mixture
from engine.core.output_processor import OutputProcessor, score_jobs
from engine.core.request import FollowerJob, ScoreJob, SequenceState, SpanJob
from engine.core.scheduler import Scheduler
from engine.core.span_state import SpanState
from engine.core.step import Row, Step
from engine.kv_cache.block_pool import BlockPool, root_digest
from engine.kv_cache.kv_connector import KVConnector
from engine.kv_cache.kv_groups import KVGroups
from engine.kv_cache.offload import OffloadTiers
from engine.kv_cache.snapshot import Snapshot, packed
from engine.kv_cache.state_checkpoints import StateCheckpoints
from engine.model.detokenizer import Utf8Decoder
from engine.model.runner import Runner
from engine.multimodal.encoder_cache import EncoderCache
from engine.outputs import FinishReason, KVTransferStats, StateStats, Stats, TierStats
from engine.speculation.speculator import Speculator
from engine.structured_output.bitmask import Constraints, Masking
from engine.structured_output.compiler import Outcome
from engine.structured_output.layout import Constrained
from engine.structured_output.matcher import CompileTimeout, ConstraintFailed, ConstraintRefused
from engine.structured_output.mode_machine import ModeMachine

KEEPING_S = 3.0  # to write K/V to the disk when the engine stops


class EngineCore:
    """Owns every sequence.

    `make_decoder` gives a fresh incremental detokeniser, `eos` the model's end-of-sequence ids, `secret` keys the
    prefix digests, and `begin_device` runs first in the thread of the overlapped loop's device. The caller has checked
    that commands are in range (see `engine.Engine`); the core only guards their order: commands for a sequence that
    closed meanwhile are dropped, since its owner may not know yet.
    """

    def __init__(
        self, config: EngineConfig, runner: Runner, pool: BlockPool, make_decoder: Callable[..., Utf8Decoder],
        eos: Sequence[int], secret: bytes, clock: Callable[[], float] = time.monotonic,
        constraints: Constraints | None = None, tiers: OffloadTiers | None = None,
        states: StateCheckpoints | None = None, model: bytes = b"", begin_device: Callable[[], None] = lambda: None,
        images: EncoderCache | None = None, speculator: Speculator | None = None, groups: KVGroups | None = None,
        adapters: CoreAdapters | None = None, value: Callable[[int], float] | None = None,
        connector: KVConnector | None = None,
    ) -> None:  # fmt: skip
        self._config, self._pool, self._tiers, self._states = config, pool, tiers, states
        self._model, self._images, self._adapters = model, images or EncoderCache(), adapters or CoreAdapters()
        self._connector = connector
        if connector is not None and tiers is not None:
            connector.offloaded = tiers.held
        self._scheduler = Scheduler(
            config, pool, clock, tiers, states, self._images, groups, self._adapters.cache, connector
        )
        self._eos = frozenset(eos)
        self._span_state = SpanState(make_decoder, self._eos)
        self._constraints = constraints
        self._masking = Masking(None if constraints is None else constraints.masks)
        self._post: Callable[[m.Command], None] = self.handle
        self._secret, self._clock = secret, clock
        self._sequences: dict[int, SequenceState] = {}
        self._deadlines: dict[int, SequenceState] = {}
        self._arrivals, self._private_ids = count(1), count(-1, -1)  # the latter of throw-away children
        self._replies: list[m.Reply] = []
        self._processor = OutputProcessor(self._span_state, self._masking, self, self._replies.append, value)
        self._overlapped = overlapped = config.loop == "overlapped" or (config.loop == "auto" and runner.queues)
        device = DeviceThread(runner, begin_device) if overlapped and not runner.queues else None
        self._speculator = speculator or Speculator((), (), 1)
        self._timer = StepTimer(clock, self._ran)
        self._steps = InFlightSteps(
            runner, device, self._scheduler, self._masking, self._processor, self._timer, clock, self._speculator,
            connector,
        )  # fmt: skip
        self._later: list[m.Command] = []  # came while the device ran

    # -- commands

    def post_with(self, post: Callable[[m.Command], None]) -> None:
        """Sets how other threads post to `handle`: constraints are compiled and K/V is copied in threads of their
        own."""
        self._post = self._adapters.cache.post = post
        for tiers in self._scheduler.tiers:
            tiers.wake = lambda: post(m.TransferDone())

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._images.pending or self._steps.in_flight or bool(self._later)

    def next_deadline(self) -> float | None:
        """Returns the time, by its clock, at which the core must wake although nothing runs."""
        times = [s.deadline for s in self._deadlines.values()]
        return min((at for at in (*times, self._scheduler.warms_at) if at is not None), default=None)

    def handle(self, command: m.Command) -> None:
        """Handles a command, or queues it while a step is in flight. Replies wait for `take_replies`."""
        if not self._steps.in_flight:
            self._handle(command)
        elif self._scheduler.loading or not isinstance(command, m.TransferDone):  # else only an offload is done
            self._later.append(command)

    def _handle(self, command: m.Command) -> None:
        match command:
            case m.AddImage():
                self._images.add(command.digest, command.tiles, command.size, command.pixels)
            case m.Open():
                if (seq := self._made(command.sequence, command)) is not None:
                    seq.remote_prefill, seq.streaming = command.remote_prefill, command.streaming
                    self._scheduler.chunks.name(seq, command.chunks)
                    self._adopt(seq, None, command.deadline_s)
            case m.Warm():
                if (seq := self._made(next(self._private_ids), command)) is not None:
                    self._scheduler.warmer.add(seq)
            case m.LoadAdapter() | m.AdapterDone() | m.UnloadAdapter():
                self._replies += self._adapters.handle(command, self._lose_adapter)
                self._scheduler.stalled = False
            case m.Restore():
                self._restore(command)
            case m.GetStats():
                self._replies.append(m.StatsReply(command.request, self.stats()))
            case m.Compile():
                self._compile(command)
            case m.CompileDone(None, request, outcome):
                self._compiled(request, outcome)
            case m.Leave():
                self._close_all("its client is gone", command.client)
            case m.Stop():
                self._close_all("the engine stopped")
                self.close()
            case m.TransferDone():
                self._scheduler.take_loaded()
            case _:
                assert command.sequence is not None
                seq_or_none = self._sequences.get(command.sequence)
                if seq_or_none is not None:
                    self._handle_for(seq_or_none, command)
                elif isinstance(command, m.Generate | m.Score | m.Snap):
                    self._replies.append(m.Closed(command.request, "the sequence is closed"))

    def take_replies(self) -> list[m.Reply]:
        replies = self._replies.copy()
        self._replies.clear()
        return replies

    def _handle_for(self, seq: SequenceState, command: m.Command) -> None:
        match command:
            case m.Append():
                seq.append(list(command.tokens), generated=command.generated)
                self._images.hold(seq.id, command.tokens)
            case m.Generate():
                self._generate(seq, command)
            case m.CompileDone():
                self._constrain(seq, command.request, command.outcome)
            case m.Score():
                self._score(seq, command)
            case m.Fork():
                scope = self._sequences.get(command.scope)
                for child_id in command.children if scope is not None else ():
                    self._adopt(self._scheduler.fork(seq, child_id, next(self._arrivals)), scope)
            case m.Truncate():
                self._scheduler.truncate(seq, command.length)
            case m.Hold():
                self._scheduler.idle.hold(seq, command.ttl_s, command.waiting_for)
            case m.Snap():
                self._replies.append(m.Snapped(command.request, self._snapshot(seq)))
            case m.Cancel():
                self._cancel(seq, command.request)
            case m.Close():
                self._close(seq, "the sequence was closed")

    def _made(self, id: int, command: m.Open | m.Warm | m.Restore) -> SequenceState | None:
        """Returns a sequence without K/V; None where its adapter has been unloaded meanwhile."""
        if (found := self._adapters.find(command.adapter)) is None:
            return None
        model = self._model.hex() or self._config.model  # its files, wherever they lie: peers have the same digests
        root = root_digest(self._secret, model, found[1], tenant := command.tenant)
        seq = SequenceState(id, [], root, next(self._arrivals), command.priority, tenant, found[0])
        seq.append(list(command.tokens), generated=False)
        return seq

    def _restore(self, command: m.Restore) -> None:
        scope = None if command.scope is None else self._sequences.get(command.scope)
        if (command.scope is not None and scope is None) or (seq := self._made(command.sequence, command)) is None:
            return  # its scope has passed its deadline meanwhile, or its adapter is gone
        seq.stream, seq.forks, seq.tail, seq.streaming = command.stream, command.forks, command.tail, command.streaming
        seq.generated = bytearray(command.generated)
        seq.counts.update(token for token, sampled in zip(seq.tokens, seq.generated, strict=True) if sampled)
        self._adopt(seq, scope, command.deadline_s)

    def _snapshot(self, seq: SequenceState) -> bytes:
        """Encodes the sequence, and puts its K/V where the next engine finds it."""
        self._scheduler.keep(seq)
        snapshot = Snapshot(
            seq.tenant, seq.priority, tuple(seq.tokens), bytes(seq.generated), seq.stream, seq.forks,
            max(seq.tail, seq.kv_len), tuple(self._images.of(seq.tokens)), self._adapters.name_of(seq),
        )  # fmt: skip
        return packed(snapshot, self._model)

    def _close_all(self, reason: str, client: int | None = None) -> None:
        for seq in list(self._sequences.values()):
            if seq.parent is None and (client is None or m.client_of(seq.id) == client):
                self._close(seq, reason)

    def _lose_adapter(self, number: int, why: str) -> None:
        """Drops the prefixes of an adapter, and closes the sequences that wait for one that cannot be loaded."""
        self._scheduler.warmer.drop_adapter(number)
        for seq in [each for each in self._scheduler.waiting.values() if why and each.adapter == number]:
            if seq.id in self._sequences:
                self._close(seq, why)

    def _compile(self, command: m.Compile) -> None:
        assert self._constraints is not None, "a core without constraints was asked to compile one"
        post, request = self._post, command.request
        made = self._constraints.compiler.get(
            command.constraint, lambda made: post(m.CompileDone(None, request, made)), command.tenant
        )
        if made is not None:
            self._compiled(request, made)

    def _compiled(self, request: int, outcome: Outcome) -> None:
        if isinstance(outcome, ConstraintRefused):
            self._replies.append(m.RequestRefused(request, outcome.reasons, isinstance(outcome, CompileTimeout)))
        else:
            self._replies.append(m.Ready(request))

    def _adopt(self, seq: SequenceState, scope: SequenceState | None, deadline_s: float | None = None) -> None:
        self._sequences[seq.id] = seq
        self._adapters.opened(seq)
        self._images.hold(seq.id, seq.tokens)
        if deadline_s is not None:
            seq.deadline = self._clock() + deadline_s
        if scope is not None:
            seq.parent = scope
            scope.children[seq.id] = seq
        if seq.deadline is not None:
            self._deadlines[seq.id] = seq

    def _generate(self, seq: SequenceState, command: m.Generate) -> None:
        span = command.span
        seq.job = job = self._span_state.begin(command, seq.text_len)
        if command.followers and not self._mix(seq, job, command):
            return
        job.speculates = job.mixture is None and seq.streaming is None and self._speculator.wanted(span)
        if span.constraint is None:
            self._submit(seq, job)
            return
        self._compile_next(seq, job, span.constraint)

    def _compile_next(self, seq: SequenceState, job: SpanJob, constraint: Constrained) -> None:
        """Compiles the next part of a span's constraint, or starts the span with all of them."""
        assert self._constraints is not None, "a core without constraints was given a span with one"
        if len(job.compiled) == len(constraint.parts):
            body, *answer = job.compiled
            job.modes = ModeMachine(constraint.layout, body, self._eos, job.stop_ids, *answer)
            self._submit(seq, job)
            return
        post, sequence, request = self._post, seq.id, job.id
        job.awaited = lambda made: post(m.CompileDone(sequence, request, made))
        outcome = self._constraints.compiler.get(constraint.parts[len(job.compiled)], job.awaited, seq.tenant)
        if outcome is not None:
            self._constrain(seq, request, outcome)

    def _mix(self, seq: SequenceState, job: SpanJob, command: m.Generate) -> bool:
        """Makes the sequence the leader of a mixture; False, and the span has failed, where a follower is closed."""
        followers = [each for id in command.followers if (each := self._sequences.get(id)) is not None]
        if len(followers) < len(command.followers):
            seq.job = None
            self._replies.append(m.RequestFailed(job.id, "a sequence of the mixture is closed", follower_closed=True))
            return False
        job.mixture = Mixture((seq.id, *command.followers), command.log_weights)
        for each in followers:
            each.job = FollowerJob(job.mixture, seq, len(each))
        return True

    def _followers(self, job: SpanJob) -> list[tuple[SequenceState, FollowerJob]]:
        """Returns the followers of a span's mixture, with their jobs."""
        ids = () if job.mixture is None else job.mixture.followers
        found = [self._sequences[id] for id in ids if id in self._sequences]
        return [(each, each.job) for each in found if isinstance(each.job, FollowerJob)]

    def _constrain(self, seq: SequenceState, request: int, outcome: Outcome) -> None:
        """Takes a compiled part of the span's constraint, or refuses the span; without effect if the span has ended
        meanwhile."""
        job = seq.job
        if not isinstance(job, SpanJob) or job.id != request or job.awaited is None:
            return
        job.awaited = None
        if isinstance(outcome, ConstraintRefused):
            self.finish(seq)
            self._compiled(request, outcome)
            return
        assert job.span.constraint is not None
        job.compiled += (outcome,)
        self._compile_next(seq, job, job.span.constraint)

    def _submit(self, seq: SequenceState, job: SpanJob) -> None:
        """Submits a span, from where another core left it."""
        try:
            self._span_state.replay(seq, job, job.delivered)
        except ConstraintFailed as failed:
            self._processor.fail(seq, job, failed)
            return
        self._scheduler.submit(seq)
        self.share(seq, job)
        for follower, _ in self._followers(job):
            self._scheduler.submit(follower)

    def _stop_waiting(self, seq: SequenceState, job: SpanJob) -> None:
        """Cancels the compilation that only this span waits for."""
        if job.awaited is not None and job.span.constraint is not None and self._constraints is not None:
            part = job.span.constraint.parts[len(job.compiled)]
            self._constraints.compiler.cancel(part, job.awaited, seq.tenant)

    def _score(self, seq: SequenceState, command: m.Score) -> None:
        """Scores candidates on throw-away children."""
        request, first, jobs = score_jobs(command.request, command.candidates, len(seq))
        for tokens, targets in jobs:
            child = self._scheduler.fork(seq, next(self._private_ids), next(self._arrivals))
            self._adopt(child, seq)
            child.append(list(tokens), generated=False)
            child.job = ScoreJob(request, first, targets)
            request.open_children += 1
            self._scheduler.submit(child)

    def _cancel(self, seq: SequenceState, request: int) -> None:
        job = seq.job
        if isinstance(job, SpanJob) and job.id == request:
            self._end_span(seq, job, "cancelled")
            return
        for child in list(seq.children.values()):
            if isinstance(child.job, ScoreJob) and child.job.request.id == request:
                self.drop(child)

    def _close(self, seq: SequenceState, reason: str) -> None:
        """Closes a scope: the descendants first, then the sequence itself."""
        for child in list(seq.children.values()):
            self._close(child, reason)
        match seq.job:
            case SpanJob() as job:
                self._stop_waiting(seq, job)
                self.finish(seq)
                self._replies.append(m.Closed(job.id, reason))
            case FollowerJob(_, leader):
                assert isinstance(leader.job, SpanJob)
                request, why = leader.job.id, f"a sequence of the mixture closed: {reason}"
                self._stop_waiting(leader, leader.job)
                self.finish(leader)
                self._replies.append(m.RequestFailed(request, why, follower_closed=True))
            case ScoreJob() as job:
                job.request.open_children -= 1
                if job.request.open_children == 0:
                    self._replies.append(m.Closed(job.request.id, reason))
        self.drop(seq)

    def finish(self, seq: SequenceState) -> None:
        """Ends the sequence's job, and those of its followers."""
        followers = self._followers(seq.job) if isinstance(seq.job, SpanJob) else []
        if isinstance(seq.job, SpanJob) and seq.job.speculates:
            self._speculator.ended(seq, seq.job)
        for each in (seq, *(follower for follower, _ in followers)):
            self._scheduler.finish(each)

    def drop(self, seq: SequenceState) -> None:
        """Removes the sequence."""
        self._scheduler.release(seq)
        self._images.release(seq.id)
        self._speculator.forget(seq)
        if self._sequences.pop(seq.id, None) is not None:
            self._adapters.closed(seq)
        self._deadlines.pop(seq.id, None)
        if seq.parent is not None:
            seq.parent.children.pop(seq.id, None)

    def resample(self, seq: SequenceState) -> None:
        """Discards the token that the sequence sampled last."""
        self._scheduler.rewind(seq)

    def sampled(self, seq: SequenceState, at: int) -> None:
        """Tells the proposers which row of the step's logits a sequence's newest token came from."""
        self._speculator.sampled(seq, at)

    def verified(self, row: Row, path: Sequence[int]) -> None:
        """Takes over the tokens of a row's draft that were sampled themselves."""
        self._scheduler.accepted(row, path)
        self._speculator.verified(row, path, ended=row.seq.job is None)

    def park(self, seq: SequenceState) -> None:
        """Parks a member of a mixture until the others have delivered."""
        self._scheduler.park(seq)

    def share(self, seq: SequenceState, job: SpanJob) -> None:
        """Appends the tokens of a leader's span to its followers, as far as they lack them."""
        for follower, following in self._followers(job):
            follower.append(seq.tokens[job.prompt_tokens + len(follower) - following.start :], generated=True)

    def unpark(self, seq: SequenceState, job: SpanJob) -> None:
        """Queues the members of a mixture again that waited for the others."""
        for each in (seq, *(follower for follower, _ in self._followers(job))):
            self._scheduler.unpark(each)

    # -- steps

    def _ran(self, step: Step, seconds: float) -> None:
        self._scheduler.ran(step, seconds)
        self._speculator.ran(step, seconds)
        self._pool.flush_events()

    def step(self) -> None:
        """Runs one step, or nothing when there is no work. The overlapped loop collects the step in flight, launches
        the next one, and emits the outputs of the former meanwhile; with async scheduling it launches before it
        collects."""
        if not self._overlapped:
            self._expire()
            self._steps.launch()
            self._steps.collect()
        elif self._later or self._due() or not self._steps.schedule_ahead():
            self._steps.collect()
            self._catch_up()
            self._steps.launch()
        self._processor.emit_outputs()
        self._timer.wait()

    def settle(self) -> None:
        """Collects the step in flight, emits its outputs, and handles queued commands. The plain loop has nothing to
        settle."""
        self._steps.collect()
        self._processor.emit_outputs()
        self._catch_up()
        self._timer.wait()

    def _catch_up(self) -> None:
        """Handles the commands that came while a step was in flight, and closes the sequences whose deadline has
        passed. All samples are emitted before: a command refers to a sequence as its client knows it."""
        if self._later or self._due():
            self._processor.emit_outputs()
            later, self._later = self._later, []
            for command in later:
                self._handle(command)
            self._expire()

    def _due(self) -> list[SequenceState]:
        """Returns the sequences that have reached their deadline."""
        now = self._clock() if self._deadlines else 0.0
        return [s for s in self._deadlines.values() if s.deadline is not None and s.deadline <= now]

    def _expire(self) -> None:
        expired = self._due()
        for seq in expired:  # children inherit the deadline: their spans end with it, not with their parent's closing
            if isinstance(seq.job, SpanJob):
                self._end_span(seq, seq.job, "deadline")
        for seq in expired:
            if seq.id in self._sequences:
                self._close(seq, "its deadline passed")

    def _end_span(self, seq: SequenceState, job: SpanJob, finish: FinishReason) -> None:
        """Ends a span from outside."""
        self._stop_waiting(seq, job)
        self.finish(seq)
        self._processor.emit(seq, job, self._span_state.finish(job, finish, None))

    # -- statistics

    def stats(self) -> Stats:
        scheduler, images, generated = self._scheduler, self._images, self._processor.generated
        return Stats(
            waiting=len(scheduler.waiting), running=len(scheduler.running), sequences=len(self._sequences),
            **self._pool.stats(), block_size=self._config.block_size, kv_groups=scheduler.width,
            generated_tokens=generated.total(), adapters=self._adapters.stats(generated), **self._timer.stats(),
            held=scheduler.idle.held, encoded_tokens=images.encoded_tokens, encoder_seconds=images.encoder_seconds,
            **asdict(scheduler.counters), tiers=TierStats() if self._tiers is None else self._tiers.stats(),
            states=StateStats() if self._states is None else self._states.stats(),
            kv_transfer=KVTransferStats() if self._connector is None else self._connector.stats(),
            speculation=self._speculator.stats(),
        )  # fmt: skip

    def close(self) -> None:
        """Keeps the K/V that the next start can use, and ends the threads below. No step may follow."""
        self._steps.close()
        self._adapters.cache.close()
        self._pool.close_events()
        for tiers in self._scheduler.tiers:
            tiers.close(KEEPING_S)

    def check(self) -> None:
        """Raises AssertionError unless the block pool agrees with every sequence's table."""
        self._scheduler.check()
