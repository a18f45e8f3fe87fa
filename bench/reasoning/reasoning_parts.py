"""The parts of the benchmark: each starts its own engines, so that any of them can run in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from bench.reasoning import cascading, forcing, routing, sampling, stopping, tree_http, trees
from bench.reasoning.asked import AT_ONCE, MODELS, BenchRow, Kind, questions, tell
from engine import Engine, EngineConfig

Json = dict[str, Any]  # Any: plain JSON
Part = Callable[[int], Awaitable[Any]]  # Any: rows, or plain JSON


@asynccontextmanager
async def _engine(name: str = "pebble") -> Any:  # Any: an iterator of the engine, as the decorator wants it
    async with await Engine.start(EngineConfig(str(MODELS / name), max_running=AT_ONCE)) as engine:
        yield engine


def _waits(kind: Kind) -> Part:
    async def part(n: int) -> list[BenchRow]:
        async with _engine() as engine:
            return await forcing.waited(engine, kind, questions(kind, n))

    return part


def _samples(kind: Kind) -> Part:
    async def part(n: int) -> list[BenchRow]:
        async with _engine() as engine:
            rows = sampling.curves(kind, await sampling.sampled(engine, questions(kind, n)))
        return [tell(each) if (each.more or {})["samples"] in sampling.SHOWN else each for each in rows]

    return part


def _stops(kind: Kind) -> Part:
    async def part(n: int) -> list[BenchRow]:
        async with _engine() as engine:
            return await stopping.stopped(engine, kind, questions(kind, n))

    return part


async def _maxima(n: int) -> list[BenchRow]:
    async with _engine() as engine:
        return await forcing.cut(engine, "game24", questions("game24", n))


def _turned(kind: Kind) -> Part:
    async def part(n: int) -> list[BenchRow]:
        async with _engine() as engine:
            return await forcing.turned(engine, kind, questions(kind, n))

    return part


async def _trees(n: int) -> list[BenchRow]:
    async with _engine() as engine:
        way, rows = await trees.chosen(engine, questions("game24", min(n, trees.CHOOSING), choosing=True))
        for each in dict.fromkeys((trees.PAPERS, way)):
            rows += await trees.searched(engine, questions("game24", n), each, trees.options(each))
        return rows


async def _cascade(n: int) -> list[BenchRow]:
    asked = [*questions("game24", n // 2), *questions("arithmetic", n - n // 2)]
    async with _engine("pebble-draft") as small, _engine() as large:
        first = await cascading.answered(small, asked, cascading.DRAFT_TOKENS)
        second = await cascading.answered(large, asked)
    ratio = cascading.parameters(MODELS / "pebble") / cascading.parameters(MODELS / "pebble-draft")
    return cascading.frontier(first, second, ratio)


async def _routing(n: int) -> list[BenchRow]:
    asked = routing.cases(n)
    async with _engine("pebble-draft") as small, _engine() as large:
        first = await routing.answered(small, asked, routing.DRAFT_TOKENS)
        second = await routing.answered(large, asked, routing.MAX_TOKENS)
    ratio = cascading.parameters(MODELS / "pebble") / cascading.parameters(MODELS / "pebble-draft")
    return routing.routed(asked, first, second, ratio)


async def _over_http(n: int) -> Json:
    made = await tree_http.compared(max(1, n // 10))
    return {"summary": tree_http.summary(made), "trees": made}


ALONE = "tree over http"  # measures time, so nothing of ours runs beside it
PARTS: dict[str, Part] = {  # the longest first, so that processes end together
    "game24 waits": _waits("game24"),
    "game24 samples": _samples("game24"),
    "trees": _trees,
    "arithmetic waits": _waits("arithmetic"),
    "game24 maxima": _maxima,
    "arithmetic samples": _samples("arithmetic"),
    "cascade": _cascade,
    "routing": _routing,
    "game24 stops": _stops("game24"),
    "countdown4 stops": _stops("countdown4"),
    "arithmetic stops": _stops("arithmetic"),
    "game24 one wait": _turned("game24"),
    "arithmetic one wait": _turned("arithmetic"),
    ALONE: _over_http,
}


async def _made(name: str, n: int) -> Any:  # Any: plain JSON
    made = await PARTS[name](n)
    return made if isinstance(made, dict) else [asdict(each) for each in made]


def run(name: str, n: int) -> tuple[Any, float]:
    """A part's rows, as plain JSON, and the seconds that it took."""
    began = time.monotonic()
    made = asyncio.run(_made(name, n))
    return made, time.monotonic() - began
