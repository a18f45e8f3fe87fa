"""One engine on a virtual clock: the production scheduler and block pool, on a device that computes nothing.

Requests come with the number of tokens of their answers, so no token is sampled: each is a number. A step takes the
seconds of a cost model. The loop is the engine's plain one. Most rows are decodes that change nothing which a decision
could depend on: `LazyScheduler` counts these, and gives the sequence its tokens when it next needs or fills a block,
ends or is preempted. Steps with no other rows run without it. Every decision is the scheduler's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

from app.simulation.cost_model import CostModel, StepLoad
from engine.config import EngineConfig
from engine.core.policies import Policy
from engine.core.request import SequenceState, SpanJob
from engine.core.scheduler import Scheduler
from engine.core.scheduler_stats import SchedulerStats
from engine.core.step import Row, Step
from engine.kv_cache.allocation import advance_kv
from engine.kv_cache.block_pool import BlockPool
from engine.outputs import Stats
from engine.params import GREEDY, Span

_SPAN = Span(GREEDY, ignore_eos=True)
_TOKEN = 1  # of every answer: prompts are told apart by their digests and their tail
_BINS = 200  # of gaps, for each factor e


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request to an engine: `prompt_tokens` with the chained `digests` of their full blocks, answered with
    `output_tokens`. `tail` is the number that stands for each token after these blocks: as a model that takes the
    likeliest token, equal prompts have equal answers. The rest is filled in by the engine; times in seconds, -1 for
    not yet."""

    at: float
    prompt_tokens: int
    output_tokens: int
    digests: Sequence[bytes]
    tail: int = 0
    tenant: str = ""
    priority: int = 0
    root: bytes = b""  # of the tenant's prefixes
    cached_tokens: int = 0
    first_token_at: float = -1.0
    ended_at: float = -1.0


class TokenGaps:
    """Histogram of the gaps between two tokens of an answer, in bins of half a percent."""

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}  # number of gaps by the bin

    def add(self, seconds: float, rows: int) -> None:
        at = round(math.log(seconds) * _BINS)
        self.bins[at] = self.bins.get(at, 0) + rows

    def merge(self, other: TokenGaps) -> None:
        for at, rows in other.bins.items():
            self.bins[at] = self.bins.get(at, 0) + rows

    def percentile(self, percent: float) -> float:
        """Returns the gap in seconds that so many percent of all do not exceed; 0 where there are none."""
        left = sum(self.bins.values()) * percent / 100
        for at in sorted(self.bins):
            left -= self.bins[at]
            if left <= 0:
                return math.exp(at / _BINS)
        return 0.0


@dataclass(slots=True, eq=False)
class _Sequence(SequenceState):
    """A sequence with decodes that it has not been told of: `lag` of them ran, and `left` more may."""

    lag: int = 0
    left: int = 0
    step: int = 0  # the number of the step that gave its last token


class LazyScheduler(Scheduler):
    """The engine's scheduler, with rows left out of its steps that only decode one more token into a block that the
    sequence has, without filling it. `lazy_rows` counts those of the last step, `lazy_context` the tokens that they
    attend to, and `late` has those of them whose sequence had no row in the step before: its id, and the number of the
    step of its last token."""

    lazy_rows = lazy_context = number = 0

    def __init__(self, config: EngineConfig, pool: BlockPool, clock: Callable[[], float]) -> None:
        super().__init__(config, pool, clock)
        self.late: list[tuple[int, int]] = []
        self._charges = type(self._policy).charged is not Policy.charged

    def begin(self) -> Step:
        """Schedules the next step."""
        self.number += 1
        self.lazy_rows = self.lazy_context = 0
        self.late.clear()
        return self.schedule()

    def learn(self, decodes: int, reading: int, seconds: float) -> None:
        """Reports the time of a step, its lazy rows included."""
        self._policy.ran(decodes, reading, seconds)

    def allow(self, seq: _Sequence, job: SpanJob) -> None:
        """Sets the number of lazy rows that may follow the token just taken: none for one that needs a block, fills one
        or ends the answer."""
        length, size = len(seq.tokens), self._size
        fits = seq.writable >= length and (length - 1) % size and job.produced < job.max_tokens
        seq.left = min(-length % size, job.max_tokens - job.produced - 1) if fits else 0

    def steps_alike(self) -> int:
        """Returns the number of steps that may follow one in which every sequence decoded, all of whose rows are lazy:
        none while others wait."""
        return 0 if self.waiting else min((seq.left for seq in self._lazy_sequences()), default=0)

    def repeat(self, steps: int) -> None:
        """Records so many steps alike."""
        self.number += steps
        for seq in self._lazy_sequences():
            seq.left -= steps
            seq.lag += steps
            seq.step = self.number
            if self._charges:
                self._policy.charged(seq, steps)

    def _lazy_sequences(self) -> Iterator[_Sequence]:
        return cast(Iterator[_Sequence], iter(self.running.values()))

    def catch_up(self, seq: _Sequence, *, without: int = 0) -> None:
        """Gives a sequence the tokens of its lazy rows, but for the last ones."""
        if steps := seq.lag - without:
            seq.tokens.extend([_TOKEN] * steps)
            seq.generated.extend(b"\1" * steps)
            end = len(seq.tokens) - 1
            advance_kv(seq, end, self._pool, self._size, self._groups, publishes=self._config.prefix_cache)
            assert isinstance(seq.job, SpanJob)
            seq.job.produced += steps
        seq.lag = seq.left = 0

    def preempt(self, seq: SequenceState, rows: dict[int, Row]) -> int:
        assert isinstance(seq, _Sequence) and seq.job is not None
        had_row = bool(seq.lag) and seq.step == self.number and seq.id not in rows
        self.catch_up(seq, without=int(had_row))
        if had_row:
            seq.step = next((since for id, since in self.late if id == seq.id), self.number - 1)
            self.late = [each for each in self.late if each[0] != seq.id]
            self.lazy_rows -= 1
            self.lazy_context -= len(seq.tokens)
            rows[seq.id] = Row(seq, seq.cursor, 1, seq.job.logits_from(len(seq)))
        return super().preempt(seq, rows)

    def check(self) -> None:
        for seq in self._lazy_sequences():
            self.catch_up(seq)
        super().check()

    def _schedule_row(self, seq: SequenceState, max_tokens: int, rows: dict[int, Row]) -> int:
        assert isinstance(seq, _Sequence)
        if seq.left > 0 and max_tokens > 0:
            seq.left -= 1
            seq.lag += 1
            if seq.step != self.number - 1:
                self.late.append((seq.id, seq.step))
            seq.step = self.number
            self.lazy_rows += 1
            self.lazy_context += seq.cursor + seq.lag
            self._logits -= 1
            if self._charges:
                self._policy.charged(seq, 1)
            return -1
        if seq.lag:
            self.catch_up(seq)
        return super()._schedule_row(seq, max_tokens, rows)


Observer = Callable[[Step, int, float], None]  # hears each step, the rows left out of it, and its seconds


class SimulatedEngine:
    """One engine: `advance` runs steps until a time, `submit` queues a request between two of them."""

    def __init__(
        self, config: EngineConfig, blocks: int, cost: CostModel, observer: Observer | None = None,
        notify: Callable[[SimulatedRequest], None] = lambda request: None, *, lazy: bool = True,
    ) -> None:  # fmt: skip
        """`blocks`: of the K/V pool; `notify` hears of a request's first token and of its end; `lazy`: whether rows are
        left out of steps."""
        self.now = 0.0
        self.busy_s = 0.0
        self.steps = self.step_tokens = self.generated_tokens = 0
        self.pool = BlockPool(blocks, config.kv_tenant_share)
        self.gaps = TokenGaps()
        self.open: dict[int, SimulatedRequest] = {}  # by the id of its sequence
        self._config, self._cost, self._observer, self._notify, self._lazy = config, cost, observer, notify, lazy
        self._scheduler = LazyScheduler(config, self.pool, lambda: self.now)
        self._steady = False  # every running sequence decoded in the last step, and nothing else happened
        self._context = 0  # tokens that the next step attends to, if it is like the last one
        self._step_ends = [0.0]  # by the number of the step
        self._numbers = count(1)

    @property
    def counters(self) -> SchedulerStats:
        return self._scheduler.counters

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    def stats(self) -> Stats:
        """Returns the counters that admission reads."""
        return Stats(
            waiting=self.waiting, running=self.running, blocks_total=self.pool.total,
            block_size=self._config.block_size, generated_tokens=self.generated_tokens, steps=self.steps,
            step_tokens=self.step_tokens, step_seconds=self.busy_s,
        )  # fmt: skip

    def submit(self, request: SimulatedRequest) -> None:
        """Queues a request now: at the clock's time, or later where the request comes later."""
        self.now = max(self.now, request.at)
        number = next(self._numbers)
        tokens, size = request.prompt_tokens, self._config.block_size
        seq = _Sequence(
            number, [request.tail] * tokens, request.root, number, request.priority, request.tenant,
            generated=bytearray(tokens), digests=list(request.digests[: tokens // size]),
        )  # fmt: skip
        seq.job = SpanJob(number, _SPAN, 0, request.output_tokens, frozenset(), tokens, greedy=True)
        self.open[number] = request
        self._steady = False
        self._scheduler.submit(seq)

    def advance(self, until: float) -> None:
        """Runs steps until one ends at `until` or later, or nothing is left to run."""
        scheduler = self._scheduler
        while self.now < until and (scheduler.running or scheduler.waiting):
            if self._steady and (steps := scheduler.steps_alike()):
                self._repeat(steps, until)
            else:
                self._step()

    def check(self) -> None:
        """Raises AssertionError unless the pool agrees with every sequence's table."""
        self._scheduler.check()

    # -- parts

    def _step(self) -> None:
        scheduler = self._scheduler
        step = scheduler.begin()
        decodes, context, prefill, pairs = scheduler.lazy_rows, scheduler.lazy_context, 0, 0
        assert step.rows or decodes, "there is work but no row: a request can never fit"
        for row in step.rows:
            if row.count == 1:
                decodes += 1
                context += row.start + 1
            else:
                prefill += row.count
                pairs += row.count * row.start + row.count * (row.count + 1) // 2
        seconds = self._cost.seconds(StepLoad(prefill, decodes, context, pairs))
        began, self.now = self.now, self.now + seconds
        seconds = self.now - began  # as a clock would measure it
        self._step_ends.append(self.now)
        self.busy_s += seconds
        self.steps += 1
        self.step_tokens += decodes + prefill
        scheduler.complete(step)
        running = len(scheduler.running)
        usual = self._take(step, seconds)
        self._steady = not prefill and decodes == running == len(scheduler.running)
        self._context = context + decodes
        if usual:
            self.gaps.add(seconds, usual)
        scheduler.learn(decodes, prefill, seconds)
        if self._observer is not None:
            self._observer(step, scheduler.lazy_rows, seconds)

    def _repeat(self, most: int, until: float) -> None:
        """Runs steps in which every sequence only decodes, at most so many."""
        rows, cost, learn, steps = len(self._scheduler.running), self._cost, self._scheduler.learn, 0
        while steps < most and self.now < until:
            began, self.now = self.now, self.now + cost.seconds(StepLoad(0, rows, self._context, 0))
            seconds = self.now - began
            self._step_ends.append(self.now)
            self._context += rows
            self.busy_s += seconds
            self.gaps.add(seconds, rows)
            learn(rows, 0, seconds)
            steps += 1
            if self._observer is not None:
                self._observer(Step(), rows, seconds)
        self.steps += steps
        self.step_tokens += steps * rows
        self.generated_tokens += steps * rows
        self._scheduler.repeat(steps)

    def _take(self, step: Step, seconds: float) -> int:
        """Gives the rows that have reached the end of their sequences a token each. Returns the number of tokens, lazy
        rows' too, whose answer had one in the step before."""
        scheduler, now, number = self._scheduler, self.now, self._scheduler.number
        usual = scheduler.lazy_rows - len(scheduler.late)
        self.generated_tokens += scheduler.lazy_rows
        for _, since in scheduler.late:
            self.gaps.add(now - self._step_ends[since], 1)
        for row in step.rows:
            seq = row.seq
            if row.start + row.count != len(seq.tokens):
                continue
            job = seq.job
            assert isinstance(job, SpanJob) and isinstance(seq, _Sequence)
            request = self.open[seq.id]
            job.produced += 1
            self.generated_tokens += 1
            seq.tokens.append(_TOKEN)
            seq.generated.append(1)
            if job.produced == 1:
                request.first_token_at, request.cached_tokens = now, seq.cached_tokens
                self._notify(request)
            elif seq.step == number - 1:
                usual += 1
            else:
                self.gaps.add(now - self._step_ends[seq.step], 1)
            seq.step = number
            if job.produced >= job.max_tokens:
                request.ended_at = now
                scheduler.finish(seq)
                scheduler.release(seq)
                del self.open[seq.id]
                self._notify(request)
            elif self._lazy:
                scheduler.allow(seq, job)
        return usual
