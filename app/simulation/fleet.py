"""A fleet of simulated engines behind a router: requests in order of arrival, and what became of them.

Each replica has the server's admission with an estimate of its queue, by the virtual clock. Requests are routed by the
policies of `ponder route`, which see each replica after the step in which the request comes. Knows nothing of files,
terminals or pictures.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from app.admission import Admission
from app.admission.queue_estimate import AdmittedWork, QueueEstimate
from app.admission.request_budget import RequestBudget
from app.auth import LOCAL
from app.config import Settings
from app.errors import ApiError
from app.routing.policies import POLICIES, PolicyName, ReplicaState
from app.simulation.cost_model import CostModel
from app.simulation.recorded_trace import RecordedRequest, prefix_root
from app.simulation.simulated_engine import SimulatedEngine, SimulatedRequest, TokenGaps
from engine.config import EngineConfig

LOOK_S = 0.5  # between two looks of admission at an engine's counters, as the server's
PERCENTS = (50, 99)
SAMPLES = 240  # points of a run's time line
_BLIND: tuple[PolicyName, ...] = ("round_robin", "random")  # policies that see no replica's state


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`replicas` of an engine with `blocks` of K/V each, behind a router. `settings`: the server's, for admission; None
    lets every request in. Requests of more than `max_model_len` tokens are refused."""

    engine: EngineConfig
    blocks: int
    cost: CostModel
    replicas: int
    router: PolicyName
    max_model_len: int
    settings: Settings | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TimeLine:
    """Sums over the fleet at moments of a run: requests that run, that wait, the share of blocks in use, and of time
    that replicas were busy since the moment before."""

    at: list[float]
    running: list[int]
    waiting: list[int]
    kv_used: list[float]
    busy: list[float]


@dataclass(frozen=True, slots=True)
class FleetResult:
    """Figures of a run. `arrivals`, `ttfts` and `e2es` are of the answered requests, in no order that
    matters; `busy` is of each replica. Times in seconds."""

    requests: int
    answered: int
    refused: int  # by admission, or since the queue was full
    too_long: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    hit_rate: float
    preemptions: int
    recomputed_tokens: int
    steps: int
    busy: list[float]
    arrivals: array[float]
    ttfts: array[float]
    e2es: array[float]
    gaps: TokenGaps
    line: TimeLine

    def summary(self) -> dict[str, object]:
        """Returns the figures as plain JSON."""
        return {
            "requests": self.requests, "answered": self.answered, "refused": self.refused, "too_long": self.too_long,
            "seconds": self.seconds, "requests_per_s": self.requests / self.seconds,
            "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens,
            "output_tokens_per_s": self.output_tokens / self.seconds,
            "ttft_s": _percentiles(self.ttfts), "e2e_s": _percentiles(self.e2es),
            "itl_s": {f"p{percent}": self.gaps.percentile(percent) for percent in PERCENTS},
            "hit_rate": self.hit_rate, "preemptions": self.preemptions, "recomputed_tokens": self.recomputed_tokens,
            "steps": self.steps, "utilisation": sum(self.busy) / len(self.busy),
            "busiest_replica": max(self.busy), "kv_used_most": max(self.line.kv_used, default=0.0),
            "waiting_most": max(self.line.waiting, default=0),
        }  # fmt: skip


class _Replica:
    """An engine with its admission."""

    def __init__(self, name: str, config: FleetConfig, answered: Callable[[SimulatedRequest], None]) -> None:
        self.name = name
        self.engine = engine = SimulatedEngine(config.engine, config.blocks, config.cost, notify=self._heard)
        self._answered = answered
        self._size = config.engine.block_size
        self._max_waiting = config.engine.max_waiting
        self._longest = config.max_model_len
        self._estimate = QueueEstimate(config.engine.max_running, lambda: engine.now)
        self._admission = None
        if config.settings is not None:
            self._admission = Admission(config.settings, {"": self._estimate})
        self._admitted: dict[SimulatedRequest, tuple[RequestBudget, AdmittedWork]] = {}
        self._looked_at = -LOOK_S

    @property
    def state(self) -> ReplicaState:
        """Returns what a policy sees of it."""
        pool = self.engine.pool
        return ReplicaState(self.name, len(self.engine.open), pool.total - pool.empty)

    def matched_blocks(self, digests: Sequence[bytes]) -> int:
        """Returns how many leading blocks of a prompt it has cached, by bisection: a prefix outlives its extensions,
        but for few that were found again."""
        find, low, high = self.engine.pool.find, 0, len(digests)
        if not high or find(digests[0]) is None:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if find(digests[middle - 1]) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def take(self, request: SimulatedRequest) -> bool:
        """Queues a request; False where it is refused."""
        engine = self.engine
        engine.now = max(engine.now, request.at)
        if self._admission is not None:
            if engine.now - self._looked_at >= LOOK_S or not engine.open:
                self._looked_at = engine.now
                self._estimate.seen(engine.stats())
            try:
                budget = self._admission.begin(LOCAL)
            except ApiError:
                return False
            limit = self._longest - request.prompt_tokens
            self._admitted[request] = budget, self._estimate.admit(request.tenant, request.prompt_tokens, limit)
        elif engine.waiting >= self._max_waiting:
            return False
        engine.submit(request)
        return True

    def _heard(self, request: SimulatedRequest) -> None:
        """Tells admission of a first token, or of an end."""
        ended = request.ended_at >= 0
        if self._admission is not None:
            budget, work = self._admitted[request]
            if ended:
                work.got(request.output_tokens - 1, request.cached_tokens)
                work.end(whole=True)
                self._admission.left(budget)
                del self._admitted[request]
            else:
                work.got(1, request.cached_tokens)
        if ended:
            self._answered(request)


class _Sampler:
    """Samples the fleet at equal distances of time."""

    def __init__(self, replicas: Sequence[_Replica]) -> None:
        self.line = TimeLine([], [], [], [], [])
        self._replicas = replicas
        self._every, self._due, self._busy = 1.0, 0.0, 0.0

    def is_due(self, now: float) -> bool:
        return now >= self._due

    def sample(self, now: float) -> None:
        """Takes a sample. Where there are too many, every second one goes, and they are due half as often."""
        line, engines = self.line, [each.engine for each in self._replicas]
        busy = sum(each.busy_s for each in engines)
        since = now - (line.at[-1] if line.at else 0.0)
        line.at.append(now)
        line.running.append(sum(each.running for each in engines))
        line.waiting.append(sum(each.waiting for each in engines))
        line.kv_used.append(sum(each.pool.used / each.pool.total for each in engines) / len(engines))
        line.busy.append(min(1.0, (busy - self._busy) / (since * len(engines))) if since else 0.0)
        self._busy = busy
        if len(line.at) >= 2 * SAMPLES:
            line.busy[:] = [(a + b) / 2 for a, b in zip(line.busy[::2], line.busy[1::2], strict=True)]
            for values in (line.at, line.running, line.waiting, line.kv_used):
                del values[::2]
            self._every *= 2
        self._due = now + self._every


def run(
    config: FleetConfig, requests: Iterable[RecordedRequest], progress: Callable[[int], None] = lambda count: None
) -> FleetResult:
    """Runs a fleet until every answer has ended; `progress` hears the number of requests that have come.

    Raises:
        TraceError: the trace's blocks are no whole number of the engine's.
    """
    answered: list[SimulatedRequest] = []
    arrivals, ttfts, e2es = array("d"), array("d"), array("d")
    replicas = {name: _Replica(name, config, answered.append) for name in map(str, range(config.replicas))}
    policy, blind, sampler = POLICIES[config.router], config.router in _BLIND, _Sampler([*replicas.values()])
    size, pool_tokens = config.engine.block_size, config.blocks * config.engine.block_size
    longest = min(config.max_model_len, pool_tokens)
    count = refused = too_long = prompt = output = 0
    last = 0.0

    def collect() -> None:
        for each in answered:
            arrivals.append(each.at)
            ttfts.append(each.first_token_at - each.at)
            e2es.append(each.ended_at - each.at)
        answered.clear()

    for recorded in requests:
        count, last = count + 1, recorded.at
        if recorded.prompt_tokens + recorded.output_tokens > longest:
            too_long += 1
            continue
        digests = recorded.digests(size)
        due = sampler.is_due(last)
        if due or not blind:
            for each in replicas.values():
                each.engine.advance(last)
        if due:
            sampler.sample(last)
        states = [each.state for each in replicas.values()]
        prefix_aware = config.router == "prefix_aware"
        matched = {name: each.matched_blocks(digests) for name, each in replicas.items()} if prefix_aware else {}
        replica = replicas[policy(states, matched, count - 1 + config.seed)]
        replica.engine.advance(last)
        request = SimulatedRequest(
            last, recorded.prompt_tokens, recorded.output_tokens, digests, recorded.tail, recorded.tenant,
            recorded.priority, prefix_root(recorded.tenant),
        )  # fmt: skip
        if replica.take(request):
            prompt, output = prompt + recorded.prompt_tokens, output + recorded.output_tokens
        else:
            refused += 1
        if count % 256 == 0:
            collect()
            progress(count)
    for each in replicas.values():
        each.engine.advance(float("inf"))
    collect()
    progress(count)
    engines, gaps = [each.engine for each in replicas.values()], TokenGaps()
    for engine in engines:
        gaps.merge(engine.gaps)
    seconds = max(last, *(engine.now for engine in engines), 1e-9)
    counters = [engine.counters for engine in engines]
    queried = sum(each.prefix_query_tokens for each in counters)
    return FleetResult(
        count, len(ttfts), refused, too_long, seconds, prompt, output,
        sum(each.prefix_hit_tokens for each in counters) / max(1, queried),
        sum(each.preemptions for each in counters), sum(each.recomputed_tokens for each in counters),
        sum(engine.steps for engine in engines), [engine.busy_s / seconds for engine in engines],
        arrivals, ttfts, e2es, gaps, sampler.line,
    )  # fmt: skip


def _percentiles(values: array[float]) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(values, percent)) if values else 0.0 for percent in PERCENTS}
