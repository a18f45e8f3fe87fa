"""Measures whether requests get the same bits alone and in random mixes, and the cost of that."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

from engine import Engine, EngineConfig, Sampling, Span

SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.2, top_k=300, min_p=0.01),
)
Asked = tuple[list[int], Span]


def requests(count: int, vocabulary: int) -> list[Asked]:
    """Prompts of 1 to 200 tokens, half of which begin like others, each with its own seed and sampling parameters."""
    draw = random.Random(11)
    beginnings = [[draw.randrange(300, vocabulary) for _ in range(160)] for _ in range(8)]
    made = []
    for index in range(count):
        prompt = draw.choice((*beginnings, *[[]] * 8))[: draw.choice((48, 100, 160))]
        prompt = prompt + [draw.randrange(300, vocabulary) for _ in range(draw.choice((1, 2, 15, 16, 40)))]
        span = Span(replace(draw.choice(SAMPLINGS), seed=index), max_tokens=8, logprobs=3, ignore_eos=True)
        made.append((prompt, span))
    return made


async def answered(config: EngineConfig, asked: list[Asked], at_once: int) -> tuple[list[object], float]:
    """Tokens and log-probabilities of each request, and the seconds that all took."""
    gate = asyncio.Semaphore(at_once)
    async with await Engine.start(config) as engine:

        async def one(prompt: list[int], span: Span) -> object:
            async with gate, await engine.open(prompt) as seq:
                result = await seq.generate_all(span)
                return result.token_ids, result.logprobs

        start = time.perf_counter()
        found = await asyncio.gather(*(one(*each) for each in asked))
        return found, time.perf_counter() - start


async def compared(model: str, count: int, **config: Any) -> dict[str, Any]:  # Any: fields of EngineConfig, plain JSON
    """Returns how many of `count` requests differ between alone and mixed, with and without `deterministic`."""
    common = EngineConfig(model, **config)
    asked = requests(count, 4000)
    order = list(range(count))
    random.Random(3).shuffle(order)
    made: dict[str, Any] = {"requests": count, **config}
    for name, deterministic in (("deterministic", True), ("not", False)):
        each = replace(common, deterministic=deterministic)
        alone, _ = await answered(replace(each, prefix_cache=False), asked, 1)
        mixed, seconds = await answered(replace(each, max_batch_tokens=150), [asked[i] for i in order], 48)
        differ = sum(mixed[at] != alone[i] for at, i in enumerate(order))
        made[name] = {"differ": differ, "mixed_seconds": seconds}
    return made
