"""Generated tokens a second against `transformers`, on the same checkpoint, in the same process, turn by turn."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.contestants import Transformers, run_engine
from bench.models import weight_bytes
from bench.workload import mixed
from engine import Engine, EngineConfig


async def throughput(
    model: Path,
    concurrency: list[int],
    *,
    longest: int,
    dtype: str,
    repeats: int,
    bandwidth: float,
    progress: Progress,
) -> dict[str, Any]:  # Any: plain JSON
    """Median tokens a second of each contestant, and ratios of the medians of each turn.

    One at a time is measured on the first few requests of the same workload: its rate does not depend on their number.
    """
    peer = Transformers(model, dtype)
    rows = []
    async with await Engine.start(EngineConfig(str(model), dtype=dtype, prefix_cache=False)) as engine:  # type: ignore[arg-type]  # a dtype's name
        await run_engine(engine, mixed(2, engine.vocab_size))
        peer_threads = peer.choose_threads(mixed(1, engine.vocab_size))
        task = progress.add_task(f"{model.name}: throughput", total=len(concurrency) * repeats)
        for count in concurrency:
            requests = mixed(count, engine.vocab_size, seed=count, longest=longest)
            tokens = sum(r.new_tokens for r in requests)
            few = requests[:4]
            few_tokens = sum(r.new_tokens for r in few)
            ours, batched, single = [], [], []
            for _ in range(repeats):
                ours.append(tokens / await run_engine(engine, requests))
                batched.append(tokens / peer.batched(requests))
                single.append(few_tokens / peer.one_at_a_time(few))
                progress.advance(task)
            rows.append(
                {
                    "concurrency": count,
                    "generated_tokens": tokens,
                    "engine_tokens_per_s": statistics.median(ours),
                    "transformers_batched_tokens_per_s": statistics.median(batched),
                    "transformers_one_at_a_time_tokens_per_s": statistics.median(single),
                    "ratio_to_batched": _ratio(ours, batched),
                    "ratio_to_one_at_a_time": _ratio(ours, single),
                }
            )
        floor = weight_bytes(model, 2 if dtype == "bfloat16" else 4) / bandwidth
        step = await _decode_step(engine)
    return {
        "model": model.name,
        "dtype": dtype,
        "longest_request": longest,
        "engine_threads": engine.threads,
        "transformers_threads": peer_threads,
        "rows": rows,
        "decode_step_ms": step * 1e3,
        "floor_ms": floor * 1e3,
        "step_over_floor": step / floor,
    }


async def _decode_step(engine: Engine) -> float:
    """Seconds for a decode step of one sequence with a short context, all of Python included: the best of five."""
    best = float("inf")
    for seed in range(5):
        (request,) = mixed(1, engine.vocab_size, seed=seed, longest=64)
        before = await engine.stats()
        seconds = await run_engine(engine, [request])
        after = await engine.stats()
        best = min(best, seconds / (after.steps - before.steps))
    return best


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
