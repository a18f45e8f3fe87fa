"""Metrics of a server: counted as requests pass, and read from the engines on demand.

They are for monitoring at `/metrics`, in Prometheus' format, and for the operator's page. Latencies and outcomes are
counted here; the engine's own counters are read at a scrape and at intervals while requests pass, so an idle server
does no work for its metrics. One registry per app: two apps in one process never mix.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from app.admission.queue_estimate import AdmittedWork, QueueEstimate
from app.admission.request_budget import RequestBudget
from app.errors import from_exception
from app.observability import tracing
from app.observability.engine_metrics import EngineCounters
from app.observability.power import WINDOW_S, PowerMeter, gpu_counters
from app.observability.time_windows import TimeWindows
from engine.errors import EngineStopped

if TYPE_CHECKING:
    from app.answering.model_registry import ModelRegistry
    from app.answering.remote_model import RemoteModel
    from app.answering.served_model import ServedModel
    from app.config import Settings
    from app.db.quotas import RemoteUse
    from engine.outputs import Stats


@dataclass(frozen=True, slots=True)
class Goals:
    """Goals of a request that counts as goodput: the wait for its first token, and then for each further one on
    average. Also the cost of an hour of the machine, and its power in watts, if those are known."""

    ttft_s: float = 2.0
    inter_token_s: float = 0.2
    price_per_hour: float | None = None
    power_watts: float | None = None

    @classmethod
    def of_settings(cls, settings: Settings) -> Self:
        return cls(
            settings.slo_ttft_ms / 1000, settings.slo_itl_ms / 1000, settings.price_per_hour, settings.power_watts
        )


class WatchedWork(Protocol):
    """A request that was let in and has not ended: `app.admission.queue_estimate.AdmittedWork`, wherever that is."""

    def got(self, tokens: int, cached: int) -> None: ...

    def end(self, *, whole: bool) -> None: ...


class Counting(Protocol):
    """Listener to requests as they pass."""

    goals: Goals

    def watch(self, endpoint: str) -> RequestWatch:
        """Of one answer that begins now."""
        ...

    def came(self, endpoint: str) -> None: ...

    def admit(self, model: str, tenant: str, prompt: int, limit: int, answers: int) -> WatchedWork:
        """Prompts of so many tokens are to be read, and for each of the answers at most `limit` written."""
        ...

    def first(self, endpoint: str, seconds: float) -> None:
        """An answer's first token came so long after the request."""
        ...

    def gap(self, endpoint: str, seconds: float) -> None:
        """A further token came so long after the one before."""
        ...

    def left(self, endpoint: str, outcome: str, seconds: float, met: bool | None) -> None:
        """It has ended; `met`: whether it kept to the goals, where that matters."""
        ...


class RequestWatch:
    """One request's clock: `tokens` for each arrival of an answer (of several, by index), then `end` once."""

    def __init__(self, counting: Counting, endpoint: str) -> None:
        self._counting = counting
        self._endpoint = endpoint
        self._began = time.perf_counter()
        self._latest: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._count: dict[int, int] = {}
        self._ended = False
        self._works: list[WatchedWork] = []
        self._trace = tracing.here()
        self._phases = [("queue and prefill", time.time_ns())]  # of the first answer, where somebody traces it
        self._ticket = RequestBudget.current()
        if self._ticket is not None:
            self._ticket.hold()
        counting.came(endpoint)

    def admit(self, among: Sequence[ServedModel], tenant: str, prompt: int, limit: int, answers: int = 1) -> None:
        """Prompts of so many tokens are to be read by one of these models, or by one after another, and for each of
        the answers at most `limit` tokens written.

        Raises:
            ApiError: 429: the request's key may not use so many now.
        """
        if self._ticket is not None:
            self._ticket.charge(prompt)
        self._works += [self._counting.admit(each.base, tenant, prompt, limit, answers) for each in among]

    def reading(self) -> None:
        """Its prompt is being read, as is heard of those that take several steps."""
        if self._trace is not None and len(self._phases) == 1:
            self._phases = [("queue", self._phases[0][1]), ("prefill", time.time_ns())]

    def tokens(self, index: int, count: int, cached: int = 0, part: str = "answer") -> None:
        """`count` more of an answer, or of another `part`; of its prompt, `cached` needed no reading."""
        if not count:
            return
        if self._trace is not None and index == 0 and self._phases[-1][0] != part:
            self._phases.append((part, time.time_ns()))
        for work in self._works:
            work.got(count, cached)
        if self._ticket is not None:
            self._ticket.spend(count)
        now = time.perf_counter()
        latest = self._latest.get(index)
        self._count[index] = self._count.get(index, 0) + count
        if latest is None:
            self._first[index] = now
            self._counting.first(self._endpoint, now - self._began)
        else:
            self._counting.gap(self._endpoint, (now - latest) / count)
        self._latest[index] = now

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Counts the outcome of the answer that is made inside: completed, refused, failed, or cancelled."""
        outcome = "cancelled"
        try:
            yield
            outcome = "completed"
        except Exception as error:
            outcome = "refused" if from_exception(error).status < 500 else "failed"
            raise
        finally:
            self.end(outcome)

    def end(self, outcome: str) -> None:
        if self._ended:
            return
        self._ended = True
        lasted = time.perf_counter() - self._began
        for work in self._works:
            work.end(whole=outcome == "completed" and len(self._works) == 1)
        if self._ticket is not None:
            self._ticket.leave()
        written = sum(self._count.values())
        attributes: tracing.Attributes = {"ponder.outcome": outcome, "gen_ai.usage.output_tokens": written}
        tracing.answer(self._endpoint, self._phases[0][1], self._phases, self._trace, attributes)
        met = None
        if outcome in ("completed", "failed"):
            met = outcome == "completed" and self._kept_to(self._counting.goals)
        self._counting.left(self._endpoint, outcome, lasted, met)

    def _kept_to(self, goals: Goals) -> bool:
        """Returns whether every answer came in time."""
        for index, first in self._first.items():
            further = max(1, self._count[index] - 1)
            if first - self._began > goals.ttft_s or (self._latest[index] - first) / further > goals.inter_token_s:
                return False
        return True


_LOOK_S = 0.5  # between two looks at the engines while requests pass
_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_INTER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_DURATION = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


def _power_meter(configured: float | None, devices: set[str]) -> PowerMeter:
    """A meter of a server whose engines run on these kinds of device."""
    gpus = gpu_counters() if configured is None and devices - {"cpu"} == {"cuda"} else None
    return PowerMeter(configured, measure=gpus is not None or devices <= {"cpu"}, gpus=gpus)


class ServerMetrics:
    """Counts requests and tokens."""

    def __init__(self, models: ModelRegistry, goals: Goals | None = None) -> None:
        self._models = models
        self.goals = goals or Goals()
        self.windows = TimeWindows()
        self.queue_estimates = {each.name: QueueEstimate(each.engine.config.max_running) for each in models}
        self.power = _power_meter(self.goals.power_watts, {each.engine.device.partition(":")[0] for each in models})
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

        if models.remotes:
            self._count_remotes(models.remotes.values())

    def _count_remotes(self, remotes: Iterable[RemoteModel]) -> None:
        """Counts what remote models use, each request when it has ended."""
        names, registry = ["model"], self.registry
        requests = Counter("ponder_remote_requests", "Requests to remote models.", names, registry=registry)
        tokens = Counter("ponder_remote_tokens", "Their tokens.", [*names, "direction"], registry=registry)
        cost = Counter("ponder_remote_cost", "Their cost, in the currency of their prices.", names, registry=registry)

        def count(model: str, use: RemoteUse) -> None:
            requests.labels(model).inc(use.requests)
            tokens.labels(model, "prompt").inc(use.prompt)
            tokens.labels(model, "completion").inc(use.completion)
            cost.labels(model).inc(use.cost)

        for remote in remotes:
            remote.spending.listeners.append(partial(count, remote.name))

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

    # -- engine counters

    @property
    def cost_per_million(self) -> float | None:
        """The cost of a million tokens, see `EngineCounters.cost_per_million`."""
        return self._snapshot.cost_per_million

    def energy(self) -> dict[str, Any]:
        """Returns the machine's watts, their source, and the watt-hours of a thousand tokens by those read and written
        in the last five minutes; each None where it is not known."""
        power = self.power.power()
        window = self.windows.window(WINDOW_S)
        per_s = window["prompt_tokens_per_s"] + window["generated_tokens_per_s"]
        return {
            "watts": None if power is None else power.watts,
            "source": None if power is None else power.source,
            "wh_per_thousand_tokens": power.watts / 3600 / per_s * 1000 if power is not None and per_s else None,
        }

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
