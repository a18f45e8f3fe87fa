"""Measures the claims that this field is built on, each with one switch of our own engine, on the same requests, in
turns."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from bench.load.drive import Driven, drive, running
from bench.load.policies import steady
from bench.load.workload import TraceRequest
from bench.parts import Json
from bench.serve.measured import percentiles
from engine import Engine

TURNS = 3
VOCAB = 6144
MAX_LENGTH = 2048  # tokens that a contiguous region is made for
BLOCK = 16


def static_batching(*, padded: bool) -> Json:
    """Answers of very different lengths: a static batch waits for its longest, a continuous one takes in the next.

    `padded`: a finished row goes on being computed until its batch is finished, as where a batch is one tensor.
    """
    rng = Random(4)
    requests = [
        TraceRequest(0.0, _prompt(rng, rng.randint(20, 120)), max(4, min(512, round(rng.expovariate(1 / 64)))))
        for _ in range(128)
    ]
    wanted = sum(request.new_tokens for request in requests)
    places = 32
    filled = [
        replace(request, new_tokens=max(each.new_tokens for each in requests[at // places * places :][:places]))
        for at, request in enumerate(requests)
    ]

    async def measure(engine: Engine, way: str) -> Json:
        figures = await _rate(engine, filled if padded and way == "off" else requests)
        return {**figures, "tokens_per_s": wanted / figures["seconds"]}

    base: Json = {"max_running": places, "fixed_chunks": True, "prefix_cache": False}
    return _pair({"on": base, "off": {**base, "policy": "static"}}, measure)


def paged_kv() -> Json:
    """Capacity for four sequences of 2,048 tokens, and requests that need a quarter of that."""
    rng = Random(5)
    requests = [TraceRequest(0.0, _prompt(rng, rng.randint(100, 700)), rng.randint(30, 300)) for _ in range(64)]
    pool: Json = {"kv_blocks": 4 * MAX_LENGTH // BLOCK, "prefix_cache": False}

    async def measure(engine: Engine, way: str) -> Json:
        driven = await drive(engine, requests, at_once=True)
        return {**_figures(driven), "wasted": _wasted(driven, MAX_LENGTH if way == "off" else None)}

    return _pair({"on": pool, "off": {**pool, "reserve_tokens": MAX_LENGTH}}, measure)


def prefix_cache() -> Json:
    """Four prompts of 800 tokens that all requests begin with, as system prompts and documents are."""
    rng = Random(6)
    shared = [_prompt(rng, 800) for _ in range(4)]
    requests = [TraceRequest(0.0, rng.choice(shared) + _prompt(rng, 40), 32) for _ in range(48)]
    return _pair({"on": {}, "off": {"prefix_cache": False}}, lambda engine, _: _rate(engine, requests))


def chunked_prefill() -> Json:
    """Prompts of 2,000 tokens beside eight answers: whole in one step, or so much a step as the answers allow."""
    return _pair(
        {"on": {}, "off": {"max_batch_tokens": 4096, "fixed_chunks": True}},
        lambda engine, _: steady(engine, 1.0, 12.0, length=2000),
    )


def mixed_steps() -> Json:
    """Reading and writing in one step, or in steps of their own: the same chunks of 512."""
    return _pair(
        {"on": {"fixed_chunks": True}, "off": {"policy": "exclusive"}}, lambda engine, _: steady(engine, 2.0, 12.0)
    )


def _pair(switch: dict[str, Json], measure: Callable[[Engine, str], Awaitable[Json]]) -> Json:
    """Both ways in turns. A ratio of times or rates is on over off, of each turn."""

    async def turns() -> Json:
        figures: dict[str, list[Json]] = {"on": [], "off": []}
        for turn in range(TURNS):
            for way in ("on", "off") if turn % 2 else ("off", "on"):
                async with running(**switch[way]) as engine:
                    figures[way].append(await measure(engine, way))
        ratios = {
            key: [on[key] / off[key] for on, off in zip(figures["on"], figures["off"], strict=True)]
            for key, value in figures["on"][0].items()
            if isinstance(value, float) and all(each[key] for each in figures["off"])
        }
        return {
            "switch": switch,
            "on_over_off": {
                key: {"median": statistics.median(each), "min": min(each), "max": max(each)}
                for key, each in ratios.items()
            },
            **figures,
        }

    return asyncio.run(turns())


async def _rate(engine: Engine, requests: list[TraceRequest]) -> Json:
    return _figures(await drive(engine, requests, at_once=True))


def _figures(driven: Driven) -> Json:
    """All at once: tokens a second, first tokens, and how many ran beside each other."""
    tokens = sum(outcome.completion_tokens for outcome in driven.outcomes)
    ttft = percentiles([outcome.ttft for outcome in driven.outcomes])
    return {
        "tokens_per_s": tokens / driven.seconds,
        "seconds": driven.seconds,
        "ttft_p50_s": ttft["p50"],
        "ttft_p99_s": ttft["p99"],
        "e2e_p50_s": percentiles([outcome.ended for outcome in driven.outcomes])["p50"],
        "running": statistics.mean(each.running for each in driven.seen),
        "prefix_hit_rate": driven.stats.prefix_hit_rate,
    }


def _wasted(driven: Driven, reserved: int | None) -> float:
    """Of the memory that sequences have, the share that no token is in."""
    full = [each for each in driven.seen if each.tokens and each.running]
    had = sum(each.blocks * BLOCK if reserved is None else each.running * reserved for each in full)
    return 1 - sum(each.tokens for each in full) / had if had else 0.0


def _prompt(rng: Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(10, VOCAB), k=length))


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "continuous batching": partial(static_batching, padded=True),
    "continuous batching, what is done costs nothing": partial(static_batching, padded=False),
    "paged KV": paged_kv,
    "prefix cache": prefix_cache,
    "chunked prefill": chunked_prefill,
    "mixed steps": mixed_steps,
}
