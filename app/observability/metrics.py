"""Metrics for an operator's monitoring at `/metrics`, in Prometheus' format, and for the operator's page.

Latencies and outcomes are counted here as requests pass; the engine's own counters are read when a scrape asks, and
every few seconds while requests pass, so an idle server does no work for its metrics. One registry per app: two apps in
one process never mix.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from app.admission.queue_estimate import AdmittedWork, QueueEstimate
from app.observability.engine_metrics import EngineCounters
from app.observability.request_metrics import Goals, RequestWatch
from app.observability.time_windows import TimeWindows
from engine.errors import EngineStopped

if TYPE_CHECKING:
    from app.answering.model_registry import ModelRegistry
    from engine.outputs import Stats

_LOOK_S = 0.5  # between two looks at the engines while requests pass
_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_INTER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_DURATION = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Meter:
    """Counts what passes."""

    def __init__(self, models: ModelRegistry, goals: Goals | None = None) -> None:
        self._models = models
        self.goals = goals or Goals()
        self.windows = TimeWindows()
        self.queue_estimates = {each.name: QueueEstimate(each.engine.config.max_running) for each in models}
        self._looked_at = 0.0
        self.answering = 0
        self._looking: asyncio.Task[None] | None = None
        self.registry = CollectorRegistry()
        self._snapshot = EngineCounters(models, self.queue_estimates, self.windows, self.goals.price_per_hour)
        self.registry.register(self._snapshot)
        ProcessCollector(registry=self.registry)  # memory, CPU, open files
        self.ttft = Histogram(
            "ponder_time_to_first_token_seconds", "From a request's arrival to its first token.", ["endpoint"],
            registry=self.registry, buckets=_TTFT,
        )  # fmt: skip
        self.inter_token = Histogram(
            "ponder_inter_token_latency_seconds", "Between two tokens of one answer, as its reader gets them.",
            ["endpoint"], registry=self.registry, buckets=_INTER_TOKEN,
        )  # fmt: skip
        self.duration = Histogram(
            "ponder_request_duration_seconds", "From a request's arrival to its end.", ["endpoint"],
            registry=self.registry, buckets=_DURATION,
        )  # fmt: skip
        self.outcomes = Counter(
            "ponder_requests", "Requests that ended, by how: completed, cancelled, refused (4xx) or failed.",
            ["endpoint", "outcome"], registry=self.registry,
        )  # fmt: skip
        self.slo = Counter(
            "ponder_slo_requests", "Completed requests (and failed: missed), by whether they met the goals for "
            "the first token and between tokens. Goodput is the rate of those that did.",
            ["endpoint", "result"], registry=self.registry,
        )  # fmt: skip
        self.refused = Counter(
            "ponder_requests_rejected", "Requests turned away before anything was made of them, by the limit.",
            ["reason"], registry=self.registry,
        )  # fmt: skip
        self.in_flight = Gauge(
            "ponder_requests_in_flight", "Requests being answered, whether running or waiting.", registry=self.registry
        )

    # -- as `Counting`

    def watch(self, endpoint: str) -> RequestWatch:
        return RequestWatch(self, endpoint)

    def came(self, endpoint: str) -> None:
        self.in_flight.inc()
        self.passed(1)

    def admit(self, model: str, tenant: str, prompt: int, limit: int, answers: int) -> AdmittedWork:
        return self.queue_estimates[model].admit(tenant, prompt, limit, answers)

    def first(self, endpoint: str, seconds: float) -> None:
        self.ttft.labels(endpoint).observe(seconds)
        self.windows.observed("ttft", seconds)
        self.passed()

    def gap(self, endpoint: str, seconds: float) -> None:
        self.inter_token.labels(endpoint).observe(seconds)
        self.windows.observed("inter_token", seconds)
        self.passed()

    def left(self, endpoint: str, outcome: str, seconds: float, met: bool | None) -> None:
        self.in_flight.dec()
        self.passed(-1)
        self.windows.observed("duration", seconds)
        self.windows.ended(outcome)
        self.duration.labels(endpoint).observe(seconds)
        self.outcomes.labels(endpoint, outcome).inc()
        if met is not None:
            self.slo.labels(endpoint, "met" if met else "missed").inc()

    # -- what it looks up itself

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
                self.queue_estimates[served.name].seen(stats)
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
