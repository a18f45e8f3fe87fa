"""Requests put to an engine when they are due, and when each of their tokens came."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Several
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.load.workload import TraceRequest
from bench.serve.load_client import TurnOutcome
from engine import GREEDY, Engine, EngineConfig, Sequence, Span
from engine.outputs import Stats

PEBBLE = Path(__file__).parents[2] / "models" / "pebble"


@dataclass(frozen=True, slots=True)
class Seen:
    """The pool at one moment: running sequences, their blocks, and tokens of decoding ones."""

    running: int
    blocks: int
    tokens: int


@dataclass(slots=True)
class Driven:
    """The outcomes of the requests, in their order; `seconds` from the first to the last end."""

    outcomes: list[TurnOutcome]
    seconds: float
    stats: Stats
    seen: list[Seen]


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Engine]:  # Any: fields of EngineConfig
    """An engine of the bundled model, warm."""
    async with await Engine.start(EngineConfig(str(PEBBLE), **options)) as engine:
        warm = [TraceRequest(0.0, tuple(range(10, 10 + 40 * (i + 1))), 8) for i in range(8)]
        await drive(engine, warm)
        yield engine


async def drive(engine: Engine, requests: Several[TraceRequest], *, at_once: bool = False) -> Driven:
    """Open loop: nobody waits for another's answer. `at_once`: all are due now."""
    gc.collect()
    outcomes = [TurnOutcome(f"class {request.priority}", 0, 0.0 if at_once else request.at) for request in requests]
    before = await engine.stats()
    began = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - began

    async def ask(request: TraceRequest, outcome: TurnOutcome) -> None:
        await asyncio.sleep(max(0.0, outcome.due - now()))
        outcome.sent = now()
        span = Span(GREEDY, max_tokens=request.new_tokens, ignore_eos=True)
        async with await engine.open(request.tokens, tenant=request.tenant, priority=request.priority) as seq:
            async for piece in seq.generate(span):
                writing[seq] = len(seq)
                outcome.pieces += [now()] * len(piece.token_ids)
                outcome.prompt_tokens, outcome.cached_tokens = piece.prompt_tokens, piece.cached_tokens
        writing.pop(seq, None)
        outcome.completion_tokens, outcome.status, outcome.ended = len(outcome.pieces), 200, now()

    seen, writing = list[Seen](), dict[Sequence, int]()

    async def watch() -> None:
        while True:
            stats = await engine.stats()
            seen.append(Seen(stats.running, stats.blocks_used, sum(writing.values())))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(ask(each, outcome) for each, outcome in zip(requests, outcomes, strict=True)))
    finally:
        watching.cancel()
    seconds = now()
    after = await engine.stats()
    return Driven(outcomes, seconds, since(before, after), seen)


def since(before: Stats, after: Stats) -> Stats:
    """The later snapshot with the counters of the time between."""
    counted = (
        "prefix_query_tokens", "prefix_hit_tokens", "preemptions", "prompt_tokens", "generated_tokens",
        "recomputed_tokens", "steps", "step_tokens", "step_seconds",
    )  # fmt: skip
    return replace(after, **{name: getattr(after, name) - getattr(before, name) for name in counted})
