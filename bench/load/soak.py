"""Half an hour of everything at once, and whether the server's resources stay constant.

Chats, long prompts, agents that pause, abandoned answers, runs with a chat that is deleted after, documents that come
and go. The load is steady, under the server's capacity.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random

import httpx
import numpy as np

from bench.load.load_server import BenchServer, serving
from bench.load.overload import Watched
from bench.parts import Json
from bench.serve.asks import KINDS, mixed, poisson, text
from bench.serve.load_client import load
from bench.serve.measured import Objective, summary

SECONDS = float(os.environ.get("PONDER_SOAK_S", "1800"))
RATE = 3.0  # conversations a second

Work = Callable[[httpx.AsyncClient, Random], Coroutine[None, None, int]]  # gives the answer's status


def soak(*options: str) -> Json:
    """Returns the resources of each minute, and how fast they grew after the first third."""
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch), *options) as server:
        before = server.held()
        with Watched(server) as watched:
            counts = asyncio.run(_everything(server))
        minutes = watched.by_minute()
        settled = minutes[len(minutes) // 3 :]
        return {
            "seconds": SECONDS,
            **counts,
            "held_before": before,
            "by_minute": minutes,
            "growth_per_hour": {key: _slope([each[key] for each in settled]) for key in settled[0]},
            "log_lines_of_errors": sum(
                " ERROR " in line or "Traceback" in line
                for line in (Path(scratch) / "server.log").read_text("utf-8", "replace").splitlines()
            ),
        }


def _slope(values: list[float]) -> float:
    """Of a line through one value a minute, in units an hour."""
    return float(np.polyfit(np.arange(len(values)) / 60, values, 1)[0]) if len(values) > 1 else 0.0


async def _everything(server: BenchServer) -> Json:
    rng, side = Random(11), Counter[str]()
    shares = [(KINDS["chat"], 0.6), (KINDS["long"], 0.1), (KINDS["write"], 0.1), (KINDS["agent"], 0.2)]
    asks = mixed(poisson(RATE, SECONDS, rng), shares, rng, scale=0.4, prefixes=8, prefix_words=150)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        works = {"run": _run, "document": _document, "gone": _drop, "refused": _refused}
        beside = [asyncio.create_task(_again(name, work, http, side)) for name, work in works.items()]
        driven = await load(server.target, asks, patience_s=60, extra={"ignore_eos": True})
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    made = summary(driven, Objective())
    return {"requests": made, "beside_them": dict(side)}


async def _again(name: str, work: Work, http: httpx.AsyncClient, side: Counter[str]) -> None:
    rng = Random(name)
    while True:
        try:
            side[f"{name}: {await work(http, rng)}"] += 1
        except httpx.HTTPError as error:
            side[f"{name}: {type(error).__name__}"] += 1
        await asyncio.sleep(rng.expovariate(1.0))


async def _run(http: httpx.AsyncClient, rng: Random) -> int:
    """A chat with one answer, read to its end, and deleted."""
    chat = (await http.post("/api/chats")).json()["id"]
    begun = await http.post(f"/api/chats/{chat}/runs", json={"content": text(20, rng), "max_tokens": 30})
    if begun.status_code == 202:
        await http.get(f"/api/runs/{begun.json()['run_id']}/events")
    await http.delete(f"/api/chats/{chat}")
    return begun.status_code


async def _document(http: httpx.AsyncClient, rng: Random) -> int:
    """A document that comes, is found and goes."""
    sent = await http.post("/api/documents", files={"file": (f"{rng.random()}.txt", text(300, rng), "text/plain")})
    if sent.status_code < 300:
        await http.post("/api/search", json={"query": text(3, rng)})
        await asyncio.sleep(3)
        listed = (await http.get("/api/documents")).json()["documents"]
        for each in listed:
            await http.delete(f"/api/documents/{each['id']}")
    return sent.status_code


async def _drop(http: httpx.AsyncClient, rng: Random) -> int:
    """An answer with a client that goes away in its middle."""
    body = {"model": "default", "messages": [{"role": "user", "content": text(30, rng)}], "stream": True,
            "max_tokens": 200, "ignore_eos": True}  # fmt: skip
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for _ in reply.aiter_lines():
            if rng.random() < 0.1:
                break
    return reply.status_code


async def _refused(http: httpx.AsyncClient, rng: Random) -> int:
    """A request that is wrong."""
    return (await http.post("/v1/chat/completions", json={"model": "default", "messages": [], "n": -1})).status_code
