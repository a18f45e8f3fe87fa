"""What the prefix cache costs when nothing repeats, and what it saves when a prompt does."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.contestants import run_engine
from bench.workload import Request
from engine import GREEDY, Engine, EngineConfig, Span

PROMPT_TOKENS = 1000


async def prefix(model: Path, *, dtype: str, repeats: int, progress: Progress) -> dict[str, Any]:  # Any: plain JSON
    """Cost as a ratio of times with the cache on and off, taken in turns; time to first token, repeated over cold."""
    rng = random.Random(3)
    task = progress.add_task(f"{model.name}: prefix cache", total=2 * repeats)
    on = await Engine.start(EngineConfig(str(model), dtype=dtype))  # type: ignore[arg-type]  # a dtype's name
    off = await Engine.start(EngineConfig(str(model), dtype=dtype, prefix_cache=False))  # type: ignore[arg-type]
    async with on, off:
        costs = []
        for turn in range(repeats + 1):
            requests = [Request(tuple(rng.randrange(10, on.vocab_size) for _ in range(200)), 16) for _ in range(16)]
            pair = [(on, requests), (off, requests)]
            times = {id(engine): await run_engine(engine, work) for engine, work in (pair if turn % 2 else pair[::-1])}
            if turn:  # the first warms both
                costs.append(times[id(on)] / times[id(off)])
                progress.advance(task)
        stats = await on.stats()
        cold, warm = [], []
        for _ in range(repeats):
            prompt = tuple(rng.randrange(10, on.vocab_size) for _ in range(PROMPT_TOKENS))
            cold.append(await _first_token(on, prompt))
            warm.append(await _first_token(on, prompt))
            progress.advance(task)
    return {
        "model": model.name,
        "cost_at_no_hits": {"median": statistics.median(costs), "min": min(costs), "max": max(costs)},
        "hits_while_measuring_cost": stats.prefix_hit_tokens,
        "prompt_tokens": PROMPT_TOKENS,
        "ttft_cold_ms": statistics.median(cold) * 1e3,
        "ttft_repeated_ms": statistics.median(warm) * 1e3,
        "ttft_ratio": statistics.median(w / c for w, c in zip(warm, cold, strict=True)),
    }


async def _first_token(engine: Engine, prompt: tuple[int, ...]) -> float:
    start = time.perf_counter()
    async with await engine.open(prompt) as seq:
        await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))
        return time.perf_counter() - start
