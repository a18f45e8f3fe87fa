"""Every policy on the same recorded traces, and the effect of a burst of prompts on running streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from bench.load.drive import Driven, drive, running
from bench.load.workload import TRACES, TraceRequest, at_rate
from bench.parts import Json
from bench.serve.measured import Objective, part, percentiles
from engine import GREEDY, Engine, Span

POLICIES = ("decode-first", "prefill-first", "fcfs", "shortest-first", "priority", "fair")
SECONDS = 45.0  # of each run, about
LOAD = 0.65  # of the engine's throughput with everything at once: recorded arrivals come in bursts
TTFT_TIMES, ITL_TIMES = 20.0, 4.0  # the objective: so many times an idle engine's, at most
KV_BLOCKS = 2048  # 32,768 tokens: less than all of a trace's prompts


def on_trace(name: str) -> Json:
    """Each policy at the same share of the machine's own rate on a trace: percentiles, goodput, the longest waits."""

    async def measure() -> Json:
        async with running(kv_blocks=KV_BLOCKS) as engine:
            probe = TRACES[name](300, engine.vocab_size)
            idle = part((await one_by_one(engine, probe[:12])).outcomes, 1.0, Objective())
            full = await drive(engine, probe, at_once=True)
        rate = LOAD * len(probe) / full.seconds
        objective = Objective(TTFT_TIMES * idle["ttft_s"]["p50"], ITL_TIMES * idle["itl_s"]["p50"])
        requests = at_rate(TRACES[name](int(rate * SECONDS), 6144), rate)
        made: Json = {
            "requests": len(requests), "rate_per_s": rate, "objective": {"ttft_s": objective.ttft_s,
            "itl_s": objective.itl_s}, "policies": {},
        }  # fmt: skip
        for policy in POLICIES:
            async with running(policy=policy, kv_blocks=KV_BLOCKS) as engine:
                made["policies"][policy] = summarised(await drive(engine, requests), requests, objective)
        return made

    return asyncio.run(measure())


def summarised(driven: Driven, requests: Sequence[TraceRequest], objective: Objective) -> Json:
    """One run: over all, by class and by tenant."""
    outcomes = driven.outcomes
    tenants = sorted({request.tenant for request in requests})
    of = {name: [o for o, r in zip(outcomes, requests, strict=True) if r.tenant == name] for name in tenants}
    classes = sorted({outcome.kind for outcome in outcomes})
    return {
        "seconds": driven.seconds,
        **part(outcomes, driven.seconds, objective),
        "classes": {kind: _short([o for o in outcomes if o.kind == kind], objective) for kind in classes},
        "tenants": {name: _short(of[name], objective) for name in tenants},
        "preemptions": driven.stats.preemptions,
        "prefix_hit_rate": driven.stats.prefix_hit_rate,
    }


def burst() -> Json:
    """Gaps between tokens of eight steady answers, while prompts come at the usual rate and at ten times of it."""

    async def measure() -> Json:
        made: Json = {}
        for policy in ("decode-first", "prefill-first"):
            async with running(policy=policy) as engine:
                made[policy] = {}
                for name, rate in (("idle", 0.0), ("usual", 0.4), ("burst", 4.0), ("idle again", 0.0)):
                    made[policy][name] = await steady(engine, rate, 10.0)
                gaps = {name: each["gap_p99_s"] for name, each in made[policy].items()}
                made[policy]["p99_ratio_to_idle"] = gaps["burst"] / gaps["idle"]
        return made

    return asyncio.run(measure())


async def steady(engine: Engine, rate: float, seconds: float, *, length: int = 800) -> Json:
    """`rate` prompts of `length` tokens a second beside eight answers that are always being written.

    Gaps and rates are of the time until the last prompt has been read.
    """
    rng, gaps = Random(3), list[tuple[float, float]]()  # when, and how long

    def prompt(tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(10, engine.vocab_size), k=tokens))

    async def write() -> None:
        while True:
            async with await engine.open(prompt(100)) as seq:
                last: float | None = None
                async for piece in seq.generate(Span(GREEDY, max_tokens=300, ignore_eos=True)):
                    at = time.perf_counter()
                    gaps.extend([(at, at - last)] if last is not None and piece.token_ids else [])
                    last = at

    writers = [asyncio.create_task(write()) for _ in range(8)]
    await asyncio.sleep(1.5)
    began = time.perf_counter()
    read = await drive(engine, [TraceRequest(at / rate, prompt(length), 1) for at in range(int(rate * seconds))])
    await asyncio.sleep(max(0.0, began + seconds - time.perf_counter()))
    ended = time.perf_counter()
    for writer in writers:
        writer.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    within = [gap for at, gap in gaps if began < at <= ended]
    spread = percentiles(within)
    ttft = percentiles([o.ttft for o in read.outcomes])
    return {
        "prompt_tokens_per_s": len(read.outcomes) * length / (ended - began),
        "tokens_per_s": len(within) / (ended - began),
        **{f"gap_{name}_s": spread[name] for name in ("p50", "p95", "p99", "max")},
        "ttft_p50_s": ttft.get("p50", 0.0),
        "ttft_p99_s": ttft.get("p99", 0.0),
    }


async def one_by_one(engine: Engine, requests: Sequence[TraceRequest]) -> Driven:
    """Returns the outcomes of an idle engine."""
    runs = [await drive(engine, [each], at_once=True) for each in requests]
    return Driven([run.outcomes[0] for run in runs], sum(run.seconds for run in runs), runs[-1].stats, [])


def _short(outcomes: Sequence[Any], objective: Objective) -> Json:
    whole = part(outcomes, 1.0, objective)
    return {key: whole[key] for key in ("requests", "ttft_s", "gap_s", "e2e_s", "good")}
