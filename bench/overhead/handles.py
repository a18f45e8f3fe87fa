"""Measures the overhead of a program on handles over the core stepped directly, on a real model: the same tokens, turn
by turn."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from engine import GREEDY, Engine, EngineConfig, Span
from engine.builder import build, use_threads
from engine.config import LoopName, RunsIn
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.loop import calm_collector

PROMPT = [11, 12, 13, 14, 15] * 8


def handles(model: Path, rows: int, tokens: int, turns: int, *, loop: LoopName, runs_in: RunsIn) -> dict[str, Any]:
    """Tokens a second of `rows` sequences of `tokens` tokens: by the core alone, plainly, and through handles."""
    config = EngineConfig(str(model), dtype="float32", max_running=rows, threads=1)
    parts = build(config)
    use_threads(parts.loaded.threads)
    raw: list[float] = []
    through: list[float] = []

    async def measure() -> None:
        other = EngineConfig(str(model), dtype="float32", max_running=rows, threads=1, loop=loop, runs_in=runs_in)
        async with await Engine.start(other) as engine:
            calm_collector()
            for turn in range(turns + 1):
                alone = _raw(parts.core, rows, tokens, turn)
                by_handles = await _through(engine, rows, tokens)
                if turn:  # the first one warms up
                    raw.append(alone)
                    through.append(by_handles)

    asyncio.run(measure())
    ratios = [b / a for a, b in zip(raw, through, strict=True)]
    return {
        "rows": rows, "tokens": tokens, "loop": loop, "engine": runs_in,
        "raw_tokens_per_s": statistics.median(raw), "handle_tokens_per_s": statistics.median(through),
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }  # fmt: skip


def _raw(core: EngineCore, rows: int, tokens: int, turn: int) -> float:
    """Nothing but commands and steps; replies are made and thrown away."""
    start = time.perf_counter()
    first = 2 * turn * rows + 1
    for id in range(first, first + 2 * rows, 2):
        core.handle(m.Open(id, tuple(PROMPT), "", 0, None))
        core.handle(m.Generate(id, id + 1, Span(GREEDY, max_tokens=tokens, ignore_eos=True), 0, tokens))
    while core.has_work:
        core.step()
        core.take_replies()
    seconds = time.perf_counter() - start
    for id in range(first, first + 2 * rows, 2):
        core.handle(m.Close(id))
    return rows * tokens / seconds


async def _through(engine: Engine, rows: int, tokens: int) -> float:
    """One task a sequence, each piece looked at."""

    async def one() -> int:
        async with await engine.open(PROMPT) as seq:
            seen = 0
            async for piece in seq.generate(Span(GREEDY, max_tokens=tokens, ignore_eos=True)):
                seen += len(piece.token_ids)
            return seen

    start = time.perf_counter()
    seen = sum(await asyncio.gather(*(one() for _ in range(rows))))
    return seen / (time.perf_counter() - start)
