"""The simulator held to the engine: a cost fitted to one minute of a trace, and the figures of the minute after it.

Both have the same requests at the same times. The engine runs the bundled model on this machine; its answers' times are
those that a reader in its process sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace

from app.simulation.cost_model import SimulatedDevice, device_json, fit_held_out
from app.simulation.fleet import FleetConfig, run
from app.simulation.recorded_trace import RecordedRequest
from bench.load.drive import drive
from bench.load.workload import TRACES, TraceRequest, at_rate
from bench.parts import Json
from bench.serve.measured import percentiles
from bench.simulation.recorder import recorded
from engine.config import STEP_TOKENS, EngineConfig
from engine.kv_cache.block_pool import chain_digest

SIZE = 16
KV_BLOCKS = 2048
SECONDS = 60.0  # to fit, and as many held out
LOAD = 0.5  # of the engine's rate with everything at once
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


def on_trace(name: str) -> Json:
    """Fits a cost to the first minute of a trace at half of the machine's rate, and compares the second."""

    async def measure() -> Json:
        async with recorded(kv_blocks=KV_BLOCKS) as (engine, recorder):
            probe = TRACES[name](200, engine.vocab_size)
            full = await drive(engine, probe, at_once=True)
            rate = LOAD * len(probe) / full.seconds
            count = int(rate * SECONDS)
            requests = at_rate(TRACES[name](2 * count, engine.vocab_size), rate)
            first, second = requests[:count], requests[count:]
            recorder.samples.clear()
            await drive(engine, first)
        fitted = fit_held_out(recorder.samples)
        second = [replace(each, at=each.at - second[0].at) for each in second]
        async with recorded(kv_blocks=KV_BLOCKS) as (engine, _):  # both begin with an empty cache
            driven = await drive(engine, second)
        device = SimulatedDevice("here", fitted.cost, KV_BLOCKS * SIZE, STEP_TOKENS, MAX_LEN)
        config = EngineConfig("simulated", block_size=SIZE, kv_blocks=KV_BLOCKS)
        fleet = FleetConfig(config, KV_BLOCKS, fitted.cost, 1, "round_robin", MAX_LEN)
        simulated = run(fleet, as_recorded(second)).summary()
        outcomes = driven.outcomes
        real = {
            "ttft_s": percentiles([each.ttft for each in outcomes]),
            "itl_s": percentiles([gap for each in outcomes for gap in each.gaps]),
        }
        return {
            "requests": len(second), "rate_per_s": rate, "device": device_json(device), "fit": asdict(fitted),
            "engine": {**real, "hit_rate": driven.stats.prefix_hit_rate, "preemptions": driven.stats.preemptions},
            "simulated": simulated, "errors": errors(real, simulated),
        }  # fmt: skip

    return asyncio.run(measure())


def errors(real: Json, simulated: Json) -> Json:
    """Returns the simulator's relative errors of the first token's and the gaps' percentiles, and if all are within
    the goal."""
    found = {
        f"{what} {percent}": simulated[what][percent] / real[what][percent] - 1
        for what in ("ttft_s", "itl_s")
        for percent in ("p50", "p99")
    }
    return {**found, "within": all(abs(each) <= GOAL for each in found.values())}
