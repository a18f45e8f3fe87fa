"""What an operator's monitoring reads at `/metrics`, in Prometheus' format, and what the operator's page is told.

Latencies and outcomes are counted here as requests pass; the engine's own counters are read when a scrape asks, and
every few seconds while requests pass, so an idle server does no work for its metrics. One registry per app: two apps in
one process never mix.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.admission.backlog import Backlog, Work
from app.admission.ticket import Ticket
from app.windows import Windows
from engine.errors import EngineStopped

if TYPE_CHECKING:
    from app.auto import Auto
    from app.models import Models
    from app.served import Served
    from engine.outputs import Stats

_LOOK_S = 0.5  # between two looks at the engines while requests pass
_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_INTER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_DURATION = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Meter:
    """Counts what passes. `watch()` one of these per answer."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self.windows = Windows()
        self.backlogs = {each.name: Backlog(each.engine.config.max_running) for each in models}
        self._looked_at = 0.0
        self.answering = 0
        self._looking: asyncio.Task[None] | None = None
        self.registry = CollectorRegistry()
        self._snapshot = _EngineCounters(models)
        self.registry.register(self._snapshot)
        self.ttft = Histogram(
            "ponder_time_to_first_token_seconds", "From a request's arrival to its first token.",
            registry=self.registry, buckets=_TTFT,
        )  # fmt: skip
        self.inter_token = Histogram(
            "ponder_inter_token_latency_seconds", "Between two tokens of one answer, as its reader gets them.",
            registry=self.registry, buckets=_INTER_TOKEN,
        )  # fmt: skip
        self.duration = Histogram(
            "ponder_request_duration_seconds", "From a request's arrival to its end.", ["endpoint"],
            registry=self.registry, buckets=_DURATION,
        )  # fmt: skip
        self.outcomes = Counter(
            "ponder_requests", "Requests that ended, by how: completed, cancelled, refused (4xx) or failed.",
            ["endpoint", "outcome"], registry=self.registry,
        )  # fmt: skip
        self.refused = Counter(
            "ponder_requests_rejected", "Requests turned away before anything was made of them, by the limit.",
            ["reason"], registry=self.registry,
        )  # fmt: skip
        self.in_flight = Gauge(
            "ponder_requests_in_flight", "Requests being answered, whether running or waiting.", registry=self.registry
        )

    def watch(self, endpoint: str) -> Watch:
        return Watch(self, endpoint)

    async def look(self) -> dict[str, Stats | None]:
        """Every engine's counters, by model, noted in the windows; None of one that has stopped."""
        seen: dict[str, Stats | None] = {}
        for served in self._models:
            try:
                seen[served.name] = stats = await served.engine.stats()
            except EngineStopped:
                seen[served.name] = None
            else:
                self.windows.counted(served.name, stats)
                self.backlogs[served.name].seen(stats)
        return seen

    def passed(self, change: int = 0) -> None:
        """A request came (1), ended (-1) or got on."""
        idle = not self.answering
        self.answering += change
        self.windows.busy(self.answering)
        now = time.monotonic()
        due = idle or not self.answering or now - self._looked_at >= _LOOK_S
        if due and (self._looking is None or self._looking.done()):
            self._looked_at = now
            self._looking = asyncio.create_task(self._look(), name="engine counters")

    async def _look(self) -> None:
        await self.look()

    def refusal(self, reason: str) -> None:
        """A request was turned away."""
        self.refused.labels(reason).inc()

    async def exposition(self) -> bytes:
        """The text of a scrape.

        Raises:
            EngineStopped: an engine is not there to be asked.
        """
        self._snapshot.stats = {served.name: await served.engine.stats() for served in self._models}
        return generate_latest(self.registry)


class Watch:
    """One request's clock: `tokens` for each arrival of an answer (of several, by index), then `end` once."""

    def __init__(self, meter: Meter, endpoint: str) -> None:
        self._meter = meter
        self._endpoint = endpoint
        self._began = time.perf_counter()
        self._latest: dict[int, float] = {}
        self._ended = False
        self._works: list[Work] = []
        self._ticket = Ticket.current()
        if self._ticket is not None:
            self._ticket.hold()
        meter.in_flight.inc()
        meter.passed(1)

    def admit(self, among: Sequence[Served], tenant: str, prompt: int, limit: int, answers: int = 1) -> None:
        """Prompts of so many tokens are to be read by one of these models, or by one after another, and for each of
        the answers at most `limit` tokens written.

        Raises:
            ApiError: 429: the request's key may not use so many now.
        """
        if self._ticket is not None:
            self._ticket.charge(prompt)
        self._works += [self._meter.backlogs[each.name].admit(tenant, prompt, limit, answers) for each in among]

    def tokens(self, index: int, count: int, cached: int = 0) -> None:
        """`count` more of an answer; of its prompt, `cached` needed no reading."""
        if not count:
            return
        for work in self._works:
            work.got(count, cached)
        if self._ticket is not None:
            self._ticket.spend(count)
        now = time.perf_counter()
        latest = self._latest.get(index)
        if latest is None:
            self._meter.ttft.observe(now - self._began)
            self._meter.windows.observed("ttft", now - self._began)
        else:
            self._meter.inter_token.observe((now - latest) / count)
            self._meter.windows.observed("inter_token", (now - latest) / count)
        self._latest[index] = now
        self._meter.passed()

    def end(self, outcome: str) -> None:
        if self._ended:
            return
        self._ended = True
        lasted = time.perf_counter() - self._began
        for work in self._works:
            work.end(whole=outcome == "completed" and len(self._works) == 1)
        if self._ticket is not None:
            self._ticket.leave()
        self._meter.in_flight.dec()
        self._meter.passed(-1)
        self._meter.windows.observed("duration", lasted)
        self._meter.windows.ended(outcome)
        self._meter.duration.labels(self._endpoint).observe(lasted)
        self._meter.outcomes.labels(self._endpoint, outcome).inc()


_GAUGES = {
    "requests_running": ("Sequences in the engine's batch.", "running"),
    "requests_waiting": ("Sequences waiting for the engine.", "waiting"),
    "sequences_open": ("Open sequence handles, idle ones included.", "sequences"),
}
_BLOCKS = {"used": "blocks_used", "cached": "blocks_cached", "free": "blocks_free"}
_COUNTERS = {
    "prompt_tokens": ("Prompt tokens computed (prefix cache hits excluded).", "prompt_tokens"),
    "generation_tokens": ("Tokens generated.", "generated_tokens"),
    "recomputed_tokens": ("Tokens computed again after a preemption.", "recomputed_tokens"),
    "prefix_cache_query_tokens": ("Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
    "prefix_cache_hit_tokens": ("Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    "preemptions": ("Sequences that lost their KV to others.", "preemptions"),
    "engine_steps": ("Steps of the engine.", "steps"),
    "engine_step_tokens": ("Tokens through the model, all steps together.", "step_tokens"),
    "engine_step_seconds": ("Seconds spent in steps.", "step_seconds"),
}


class _EngineCounters(Collector):
    """The engines' newest statistics as metrics, labelled by model where there are several."""

    def __init__(self, models: Models) -> None:
        self.stats: dict[str, Stats] = {}  # by model
        self._auto = models.auto
        self._labels = ["model"] if len(models) > 1 else []

    def collect(self) -> Iterator[Metric]:
        if not self.stats:
            return
        told = [([model] if self._labels else [], stats) for model, stats in self.stats.items()]
        for name, (text, field) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"ponder_{name}", text, labels=self._labels)
            for model, stats in told:
                gauge.add_metric(model, getattr(stats, field))
            yield gauge
        blocks = GaugeMetricFamily("ponder_kv_blocks", "KV blocks by state.", labels=[*self._labels, "state"])
        for model, stats in told:
            for state, field in _BLOCKS.items():
                blocks.add_metric([*model, state], getattr(stats, field))
        yield blocks
        for name, (text, field) in _COUNTERS.items():
            counter = CounterMetricFamily(f"ponder_{name}", text, labels=self._labels)
            for model, stats in told:
                counter.add_metric(model, getattr(stats, field))
            yield counter
        if self._auto is not None:
            yield self._answers(self._auto)

    def _answers(self, auto: Auto) -> Metric:
        answers = CounterMetricFamily(
            "ponder_auto_answers", "Answers written for the model `auto`: given, or escalated to the next model.",
            labels=["model", "outcome"],
        )  # fmt: skip
        for served in auto.rungs:
            for outcome, passed in (("given", True), ("escalated", False)):
                answers.add_metric([served.name, outcome], auto.counts[served.name, passed])
        return answers
