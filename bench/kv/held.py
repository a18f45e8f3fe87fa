"""Agents that wait for tools while others' prompts fill the cache: how much they have to read again when they go on.

Every agent reads a long beginning, then writes, calls a tool, gets a result, and so on; the tools' waits come from one
seed, so that all contestants have the same. Prompts that nobody repeats come as fast as they are answered.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from engine import GREEDY, Engine, EngineConfig, Span

TURNS = 6
BEGINNING = 600  # tokens
RESULT = 40
WRITTEN = 24
TOOLS = {"lookup": 0.2, "search": 1.0}  # median seconds
PROMPT = 700
POOL_BLOCKS = 1000  # of 16 tokens; an agent wants about 59 in the end, a prompt beside 46


async def measure(
    model: Path, agents: int, others: int, *, hold: bool, host_bytes: int = 0, disk_bytes: int = 0
) -> dict[str, Any]:  # Any: plain JSON
    """So many agents, and so many prompts beside them at any time."""
    with tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(
            str(model),
            dtype="float32",
            kv_blocks=POOL_BLOCKS,
            kv_host_bytes=host_bytes,
            kv_disk_bytes=disk_bytes,
            kv_dir=directory if disk_bytes else None,
        )
        async with await Engine.start(config) as engine:
            stop = asyncio.Event()
            beside = [asyncio.create_task(_others(engine, at, stop)) for at in range(others)]
            began = time.perf_counter()
            waits = await asyncio.gather(*(_agent(engine, at, hold) for at in range(agents)))
            seconds = time.perf_counter() - began
            stop.set()
            answered = sum(await asyncio.gather(*beside))
            stats = await engine.stats()
    kept, had = (sum(each[at] for each in waits) for at in (0, 1))
    return {
        "agents": agents,
        "others": others,
        "hold": hold,
        "host_bytes": host_bytes,
        "disk_bytes": disk_bytes,
        "seconds": seconds,
        "resumed_tokens": had,
        "reused": kept / had,
        "worst_reused": min(low for _, _, low in waits),
        "prompts_beside": answered,
        "preemptions": stats.preemptions,
        "from_host": stats.tiers.host_hit_blocks,
        "from_disk": stats.tiers.disk_hit_blocks,
        "lost": stats.tiers.lost_blocks,
        "passed_over": stats.tiers.passed_over_blocks,
        "resumed_late": stats.resumed_late,
    }


async def _agent(engine: Engine, number: int, hold: bool) -> tuple[int, int, float]:
    """Tokens that needed no computing when it went on, those that had been read, and the least share of them."""
    rng = random.Random(number)
    kept = had = read = 0
    least = 1.0
    async with await engine.open(_tokens(rng, BEGINNING), tenant=f"agent {number}") as seq:
        for turn in range(TURNS):
            result = await seq.generate_all(Span(GREEDY, max_tokens=WRITTEN, ignore_eos=True))
            if turn:
                kept += min(result.cached_tokens, read)
                had += read
                least = min(least, result.cached_tokens / read)
            read = len(seq) - 1
            tool = rng.choice(["lookup", "lookup", "search"])
            if hold:
                seq.hold(60.0, waiting_for=[tool])
            await asyncio.sleep(TOOLS[tool] * rng.lognormvariate(0, 0.4))
            seq.append(_tokens(rng, RESULT))
    return kept, had, least


async def _others(engine: Engine, number: int, stop: asyncio.Event) -> int:
    rng = random.Random(1000 + number)
    answered = 0
    while not stop.is_set():
        async with await engine.open(_tokens(rng, PROMPT), tenant=f"other {number}") as seq:
            await seq.generate_all(Span(GREEDY, max_tokens=WRITTEN, ignore_eos=True))
        answered += 1
    return answered


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(20, 4000) for _ in range(count)]
