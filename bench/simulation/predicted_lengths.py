"""Shortest job first by predicted length (Fu et al. 2024, arXiv 2408.15792), on recorded traces and the virtual clock.

The work of a request is the rest of its prompt and its answer, in prompt tokens. The answer's length is the trace's own
(`oracle`), or predicted from what an engine has seen so far: of the prompt's length and the answer before in the same
conversation. Not part of the engine, as it does not pay: docs/scale.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

import numpy as np

from app.simulation.cost_model import load_device
from app.simulation.recorded_trace import RecordedRequest, load_trace, prefix_root
from app.simulation.simulated_engine import SimulatedEngine, SimulatedRequest
from bench.parts import Json
from bench.report import student_interval
from engine.config import EngineConfig, PolicyName
from engine.core.policies.policy import Policy, PrefillBudget, StepCosts, StepGrant, each, parted
from engine.core.request import SequenceState, SpanJob

ORDERS = ("decode-first", "fcfs", "shortest-first", "predicted", "oracle")
WINDOWS = 6
AGEING_S = 10.0
FORGET = 0.9995  # weight of an earlier answer in the predictor's fit, for each later one
_FIRST = math.log(256)  # of an answer, before any has ended
_MAX_LOG = math.log(1e5)


class LengthPredictor:
    """Least squares on logarithms, with forgetting: of the prompt's length, and of the newest answer of the same
    conversation, which is found by the digests of the prompt's blocks."""

    def __init__(self) -> None:
        self._answers: dict[bytes, float] = {}  # log of an answer's length, by the last digest of its prompt
        self._inverse = np.eye(4)
        self._weights = np.array([_FIRST, 0.0, 0.0, 0.0])
        self.errors: list[tuple[float, float]] = []  # predicted and real logarithms

    def predict(self, prompt_tokens: int, digests: Sequence[bytes]) -> float:
        """Returns the tokens of an answer to a prompt."""
        return math.exp(min(max(float(self._weights @ self._features(prompt_tokens, digests)), 0.0), _MAX_LOG))

    def learn(self, prompt_tokens: int, digests: Sequence[bytes], tokens: int) -> None:
        seen, value = self._features(prompt_tokens, digests), math.log(tokens)
        self.errors.append((float(self._weights @ seen), value))
        spread = self._inverse @ seen
        gain = spread / (FORGET + seen @ spread)
        self._weights += gain * (value - self._weights @ seen)
        self._inverse = (self._inverse - np.outer(gain, spread)) / FORGET
        if digests:
            self._answers[digests[-1]] = value

    def _features(self, prompt_tokens: int, digests: Sequence[bytes]) -> np.ndarray:
        before = next((self._answers[digest] for digest in reversed(digests) if digest in self._answers), None)
        return np.array([1.0, math.log1p(prompt_tokens), before is not None, before or 0.0])


class ShortestPredicted(Policy):
    """Decodes, then the prefill with the least work. Waiting for `AGEING_S` counts as a step's tokens fewer, as in
    `ShortestFirst`: a request is overtaken only by those that come before its work has aged away."""

    def __init__(self, chunks: PrefillBudget, max_tokens: int, expected: Callable[[SequenceState], float]) -> None:
        """`expected`: the tokens of a sequence's answer."""
        super().__init__(AGEING_S, chunks)
        self._max_tokens, self._expected = max_tokens, expected

    def turns(
        self, running: Collection[SequenceState], waiting: Collection[SequenceState], now: float
    ) -> Iterator[StepGrant]:
        decodes, prefills = parted(running)
        costs = self._chunks.costs or StepCosts(0.0, 1.0, 1.0)
        ratio = (costs.decode + costs.step / max(1, len(decodes))) / max(costs.read, 1e-9)

        def left(seq: SequenceState) -> tuple[float, int]:
            produced = seq.job.produced if isinstance(seq.job, SpanJob) else 0
            work = seq.remaining + ratio * max(1.0, self._expected(seq) - produced)
            return work - self._max_tokens * (now - seq.queued_at) / self._ageing_s, seq.arrival

        yield from each(decodes)
        yield from each(sorted([*prefills, *waiting], key=left))


def compared(path: Path, rate: float, places: int, block_size: int, size: int) -> Json:
    """Each order on several windows of a trace, of `size` requests at so many a second, the same for all. Returns for
    each order the means over the windows, and the 95% interval of its difference from `decode-first`, paired by window.
    """
    requests = load_trace(path)
    step = (len(requests) - size) // (WINDOWS - 1)
    parts = [at_rate(requests[at * step : at * step + size], rate) for at in range(WINDOWS)]
    found = {name: [one_window(part, name, places, block_size) for part in parts] for name in ORDERS}
    base = found[ORDERS[0]]
    made: Json = {"requests": size, "rate_per_s": rate, "windows": WINDOWS}
    for name, rows in found.items():
        made[name] = {
            key: {
                "mean": float(np.mean([row[key] for row in rows])),
                "against": student_interval([row[key] - before[key] for row, before in zip(rows, base, strict=True)]),
            }
            for key in base[0]
        }
        if name == "predicted":
            made[name]["correlation"] = float(np.mean([row["correlation"] for row in rows]))
    return made


def at_rate(requests: Sequence[RecordedRequest], rate: float) -> list[RecordedRequest]:
    """Returns requests whose arrivals are stretched to so many a second."""
    first, times = requests[0].at, len(requests) / rate / (requests[-1].at - requests[0].at)
    return [replace(each, at=(each.at - first) * times) for each in requests]


def one_window(requests: Sequence[RecordedRequest], order: str, places: int, block_size: int) -> dict[str, float]:
    """Returns the figures of one replica that starts empty, in seconds."""
    device = load_device("h200-measured")
    named = cast(PolicyName, order if order in get_args(PolicyName) else ORDERS[0])
    config = EngineConfig(
        device.name, block_size=block_size, max_batch_tokens=device.max_batch_tokens, max_running=places,
        max_waiting=len(requests), policy=named, ageing_s=AGEING_S,
    )  # fmt: skip
    predictor = LengthPredictor()

    def notify(request: SimulatedRequest) -> None:
        if request.ended_at >= 0:
            predictor.learn(request.prompt_tokens, request.digests, request.output_tokens)

    engine = SimulatedEngine(config, device.kv_tokens // block_size, device.cost, notify=notify)
    asked: dict[int, SimulatedRequest] = engine.open
    guesses: dict[int, float] = {}

    def expected(seq: SequenceState) -> float:
        request = asked[seq.id]
        if order == "oracle":
            return request.output_tokens
        if seq.id not in guesses:
            guesses[seq.id] = predictor.predict(request.prompt_tokens, request.digests)
        return guesses[seq.id]

    if named != order:  # the engine's own are known by name
        budget = PrefillBudget(config.step_tokens)
        engine._scheduler._policy = ShortestPredicted(budget, config.step_tokens, expected)
    sent = [
        SimulatedRequest(
            each.at, each.prompt_tokens, each.output_tokens, each.digests(block_size), each.tail, each.tenant,
            each.priority, prefix_root(each.tenant),
        )
        for each in requests
        if each.prompt_tokens + each.output_tokens <= device.max_model_len
    ]  # fmt: skip
    for request in sent:
        engine.advance(request.at)
        engine.submit(request)
    engine.advance(math.inf)
    whole = np.array([each.ended_at - each.at for each in sent])
    first = np.array([each.first_token_at - each.at for each in sent])
    made, real = np.array(predictor.errors).T
    return {
        "e2e mean": whole.mean(), "e2e p50": np.percentile(whole, 50), "e2e p99": np.percentile(whole, 99),
        "ttft mean": first.mean(), "ttft p99": np.percentile(first, 99), "ttft longest": first.max(),
        "gap p99": engine.gaps.percentile(99), "correlation": np.corrcoef(made, real)[0, 1],
    }  # fmt: skip
