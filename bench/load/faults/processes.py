"""Ends processes in the middle: the engine's process, an API worker, a client."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from random import Random

import httpx

from bench.load.faults.streams import EXACT, metrics, under_load, until_true
from bench.load.load_server import BenchServer
from bench.parts import Json
from bench.serve.asks import text

APART_S = 12.5  # deaths of one process: more than five in a minute would be a crash loop, which is given up
WORKERS = 2  # beside the first process


def engine_killed() -> Json:
    """The engine's process is killed with −9."""

    async def fault(server: BenchServer, rng: Random) -> float:
        dead = _engine_of(server)
        os.kill(dead, signal.SIGKILL)
        took = await until_true(lambda: _alive_engine(server, but=dead) and server.healthy())
        await asyncio.sleep(rng.uniform(0, 2) + APART_S - took)
        return took

    return under_load(fault, EXACT)


def worker_killed() -> Json:
    """API workers are killed with −9, one after the other. Each takes the answers with it that it writes, no more."""
    turn = 0

    async def fault(server: BenchServer, rng: Random) -> float:
        nonlocal turn
        pids = _workers_of(server)
        os.kill(pids[turn % WORKERS], signal.SIGKILL)
        turn += 1
        took = await until_true(lambda: server.healthy() and metrics(server)["ponder_api_workers"] == 1 + WORKERS)
        await asyncio.sleep(rng.uniform(0, 1) + APART_S / WORKERS - took)
        return took

    return under_load(fault, (*EXACT, "--api-workers", str(1 + WORKERS)))


def clients_gone() -> Json:
    """Sixteen clients at once go away, each at some moment of its answer. There is nothing to recover from."""

    async def fault(server: BenchServer, rng: Random) -> None:
        async def leave() -> None:
            body = {"model": "default", "prompt": text(30, rng), "stream": True, "max_tokens": 400, "ignore_eos": True}
            wait = rng.uniform(0, 0.4)
            try:
                async with (
                    asyncio.timeout(wait),
                    httpx.AsyncClient(base_url=server.url) as http,
                    http.stream("POST", "/v1/completions", json=body) as reply,
                ):
                    async for _ in reply.aiter_lines():
                        pass
            except TimeoutError:
                pass

        await asyncio.gather(*(leave() for _ in range(16)))

    return under_load(fault, EXACT)


def _engine_of(server: BenchServer) -> int:
    [pid] = [pid for pid in server.family() if b"engine.ipc.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def _alive_engine(server: BenchServer, but: int) -> bool:
    try:
        return _engine_of(server) != but
    except (ValueError, OSError):
        return False


def _workers_of(server: BenchServer) -> list[int]:
    """In the order in which they were started."""
    return sorted(
        pid for pid in server.family() if b"app.workers.api_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
