"""Measures how soon a long prompt is answered: by an engine that never saw it, by one that did, and by its
successor."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engine import GREEDY, Engine, EngineConfig, Span

PROMPT = 3000  # tokens
TIMES = 5


async def measure(model: Path) -> dict[str, Any]:  # Any: plain JSON
    prompts = [[random.Random(at).randrange(20, 4000) for _ in range(PROMPT)] for at in range(TIMES)]
    with tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(str(model), kv_blocks=2000, kv_disk_bytes=2 << 30, kv_dir=directory)
        async with await Engine.start(config) as engine:
            cold = [await _first(engine, prompt) for prompt in prompts]
            warm = [await _first(engine, prompt) for prompt in prompts]
        async with await Engine.start(config) as engine:
            back = [await _first(engine, prompt) for prompt in prompts]
            stats = await engine.stats()
    return {
        "model": model.name,
        "prompt_tokens": PROMPT,
        "cold_s": statistics.median(cold),
        "warm_s": statistics.median(warm),
        "after_restart_s": statistics.median(back),
        "blocks_from_disk": stats.tiers.disk_hit_blocks,
        "disk_bytes_per_s": stats.tiers.disk_bytes_per_s,
    }


async def _first(engine: Engine, prompt: list[int]) -> float:
    began = time.perf_counter()
    async with await engine.open(prompt) as seq:
        await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))
    return time.perf_counter() - began
