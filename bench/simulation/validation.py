"""The simulator held to the engine: a cost fitted to one minute of a trace, and the figures of the minute after it.

Both have the same requests at the same times. The engine runs the bundled model on this machine; its answers' times are
those that a reader in its process sees.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from app.simulation.cost_model import (
    ResampledCost,
    SimulatedDevice,
    device_json,
    fit,
    fit_held_out,
    variation_of,
)
from app.simulation.fleet import FleetConfig, run
from app.simulation.recorded_trace import RecordedRequest
from bench.load.drive import drive
from bench.load.workload import TRACES, TraceRequest, at_rate
from bench.parts import Json
from bench.serve.load_client import TurnOutcome
from bench.serve.measured import percentiles
from bench.simulation.recorder import StepSample, recorded
from engine.config import STEP_TOKENS, EngineConfig
from engine.kv_cache.block_pool import chain_digest

SIZE = 16
KV_BLOCKS = 2048
SECONDS = 60.0  # to fit, and as many held out
RUNS = 2  # of the engine
SEEDS = 5  # of the simulator
MAX_LEN = 4096
GOAL = 0.10


def as_recorded(requests: Sequence[TraceRequest]) -> list[RecordedRequest]:
    """Returns the same requests for the simulator: blocks of tokens become names."""
    found = []
    for number, request in enumerate(requests):
        ids, digest = [], request.tenant.encode()
        for at in range(0, len(request.tokens), SIZE):
            digest = chain_digest(digest, request.tokens[at : at + SIZE])
            ids.append(int.from_bytes(digest[:7], "little"))
        found.append(
            RecordedRequest(
                request.at, len(request.tokens), request.new_tokens, tuple(ids), SIZE, request.tenant,
                request.priority, number=number,
            )
        )  # fmt: skip
    return found


def on_trace(name: str, load: float) -> Json:
    """Fits a cost to the first minute of a trace at a share of the machine's rate, and compares the second, which the
    engine runs several times: it differs from itself."""

    async def measure() -> Json:
        async with recorded(kv_blocks=KV_BLOCKS) as (engine, recorder):
            probe = TRACES[name](200, engine.vocab_size)
            full = await drive(engine, probe, at_once=True)
            rate = load * len(probe) / full.seconds
            count = int(rate * SECONDS)
            requests = at_rate(TRACES[name](2 * count, engine.vocab_size), rate)
            first, second = requests[:count], requests[count:]
            recorder.samples.clear()
            await drive(engine, first)
        second = [replace(each, at=each.at - second[0].at) for each in second]
        runs = []
        for _ in range(RUNS):
            async with recorded(kv_blocks=KV_BLOCKS) as (engine, again):  # each begins with an empty cache
                runs.append(EngineRun((await drive(engine, second)).outcomes, again.samples))
        return {"rate_per_s": rate, **compared(as_recorded(second), recorder.samples, runs)}

    return asyncio.run(measure())


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Outcomes that readers saw of a run, and its steps."""

    outcomes: Sequence[TurnOutcome]
    samples: Sequence[StepSample]

    def figures(self) -> Json:
        return {
            "ttft_s": percentiles([each.ttft for each in self.outcomes]),
            "itl_s": percentiles([gap for each in self.outcomes for gap in each.gaps]),
        }


def compared(
    requests: Sequence[RecordedRequest], before: Sequence[StepSample], runs: Sequence[EngineRun]
) -> Json:  # fmt: skip
    """Returns the errors of the simulator against each run: by the steps `before` it, which it is judged by, and by the
    run's own steps, which leave out that the machine was slower or faster by then. Beside them, the runs against the
    first one."""
    fitted = fit_held_out(before)
    by_before = simulated(requests, before)
    figures = [run.figures() for run in runs]
    device = SimulatedDevice("here", resampled(before), KV_BLOCKS * SIZE, STEP_TOKENS, MAX_LEN)
    return {
        "requests": len(requests), "device": device_json(device), "fit": asdict(fitted), "simulated": by_before,
        "runs": [
            {
                "engine": figure, "error": errors(figure, by_before),
                "error by its own steps": errors(figure, simulated(requests, run.samples)),
            }
            for figure, run in zip(figures, runs, strict=True)
        ],
        "runs against the first": [errors(figures[0], figure) for figure in figures[1:]],
    }  # fmt: skip


def resampled(samples: Sequence[StepSample], seed: int = 0) -> ResampledCost:
    cost = fit(samples)
    return ResampledCost(cost, variation_of(samples, cost), seed)


def simulated(requests: Sequence[RecordedRequest], samples: Sequence[StepSample]) -> Json:
    """Returns the median figures of simulations with several seeds."""
    config = EngineConfig("simulated", block_size=SIZE, kv_blocks=KV_BLOCKS)
    found: list[Json] = [
        run(FleetConfig(config, KV_BLOCKS, resampled(samples, seed), 1, "round_robin", MAX_LEN), requests).summary()
        for seed in range(SEEDS)
    ]
    return {
        what: {percent: statistics.median(each[what][percent] for each in found) for percent in ("p50", "p99")}
        for what in ("ttft_s", "itl_s")
    }


def errors(real: Json, other: Json) -> Json:
    """Returns another's relative errors of the first token's and the gaps' percentiles, and if all are within
    the goal."""
    found = {
        f"{what} {percent}": other[what][percent] / real[what][percent] - 1
        for what in ("ttft_s", "itl_s")
        for percent in ("p50", "p99")
    }
    return {**found, "within": all(abs(each) <= GOAL for each in found.values())}
