"""Faults at random moments under load, each kind fifty times: what was promised is kept, and how long it took.

What is promised: a stream that began either goes on, with just the tokens that it would have had, or ends with an error
that says so; afterwards nothing is held that was not held before, and new requests are answered as ever.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random

import httpx

from bench.load.server import Server, serving, until
from bench.parts import Json
from bench.serve.asks import text
from bench.serve.measured import percentiles

TIMES = int(os.environ.get("PONDER_FAULTS", "50"))
STREAMS = 6
PROMPTS = 24
APART_S = 12.5  # kills of the engine: more than five in a minute would be a crash loop, which it gives up
DISK = 48 << 20  # bytes of the disk that gets full
EXACT = ("--engine", "process", "--dtype", "float32")


Fault = Callable[[Server, Random], Coroutine[None, None, float | None]]  # seconds until all was as before


class Streams:
    """Clients that ask for one of a few known answers again and again, and compare every letter."""

    def __init__(self, server: Server) -> None:
        self._server = server
        rng = Random(12)
        self._prompts = [text(30, rng) for _ in range(PROMPTS)]
        self._right: dict[str, str] = {}
        self.told = Counter[str]()
        self.errors = Counter[str]()

    async def learn(self, http: httpx.AsyncClient) -> None:
        """The right answers, from an undisturbed server."""
        for prompt in self._prompts:
            how, words = await self._ask(http, prompt)
            assert how == "whole", how
            self._right[prompt] = words

    async def run(self, number: int) -> None:
        """One client, until it is cancelled."""
        rng = Random(number)
        async with httpx.AsyncClient(base_url=self._server.url, timeout=60) as http:
            while True:
                prompt = rng.choice(self._prompts)
                how, words = await self._ask(http, prompt)
                if how == "whole" and words != self._right[prompt]:
                    how = "whole and wrong"
                elif how != "whole" and not self._right[prompt].startswith(words):
                    how = f"{how}, and wrong before"
                self.told[how] += 1
                if how != "whole":
                    await asyncio.sleep(0.2)

    async def _ask(self, http: httpx.AsyncClient, prompt: str) -> tuple[str, str]:
        """How it ended, and the words until then."""
        words: list[str] = []
        body = {"model": "default", "messages": [{"role": "user", "content": prompt}], "stream": True,
                "temperature": 0, "max_tokens": 120, "ignore_eos": True}  # fmt: skip
        try:
            async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    told = json.loads(await reply.aread())["error"]
                    self.errors[f"{reply.status_code} {told['code']}: {told['message']}"[:160]] += 1
                    return f"refused with {reply.status_code}", ""
                async for line in reply.aiter_lines():
                    if line == "data: [DONE]":
                        return "whole", "".join(words)
                    if line.startswith("data:"):
                        data = json.loads(line[5:])
                        if "error" in data:
                            self.errors[f"{data['error']['code']}: {data['error']['message']}"[:160]] += 1
                            return "ended with an error", "".join(words)
                        words += [choice["delta"].get("content") or "" for choice in data["choices"]]
        except httpx.HTTPError as error:
            self.errors[type(error).__name__] += 1
            return "cut off", "".join(words)
        return "ended without a word", "".join(words)


def engine_killed() -> Json:
    """The engine's process is killed with −9."""

    async def fault(server: Server, rng: Random) -> float:
        dead = _engine_of(server)
        os.kill(dead, signal.SIGKILL)
        took = await _until(lambda: _alive_engine(server, but=dead) and server.healthy())
        await asyncio.sleep(rng.uniform(0, 2) + APART_S - took)
        return took

    return _under_load(fault, EXACT)


def clients_gone() -> Json:
    """Sixteen clients at once go away, each at some moment of its answer. There is nothing to recover from."""

    async def fault(server: Server, rng: Random) -> None:
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

    return _under_load(fault, EXACT)


def disk_full() -> Json:
    """The data's disk is full for a while: chats say so, streams do not care, and it works again when there is room."""
    with tempfile.TemporaryDirectory() as scratch:
        disk = Path(scratch) / "disk"
        disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", disk], capture_output=True)
        if mounted.returncode:
            return {"not_measured": f"no small disk can be mounted here: {mounted.stderr.decode()[:200]}"}
        answers = Counter[str]()

        async def fault(server: Server, rng: Random) -> float:
            filler = disk / "filler"
            with filler.open("wb") as file:
                try:
                    while True:
                        file.write(bytes(1 << 20))
                        file.flush()
                except OSError:
                    pass
            async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
                for _ in range(4):
                    answers[f"full: {await _chat(http, rng)}"] += 1
                filler.unlink()
                began = time.monotonic()
                while (how := await _chat(http, rng)) != "202":
                    answers[f"room again: {how}"] += 1
                    if time.monotonic() - began > 30:
                        raise TimeoutError(f"chats do not come back: {how}")
                    await asyncio.sleep(0.1)
                answers["room again: 202"] += 1
            return time.monotonic() - began

        try:
            return {**_under_load(fault, EXACT, data=disk), "chats": dict(answers)}
        finally:
            subprocess.run(["umount", "-l", disk], check=False)


async def _chat(http: httpx.AsyncClient, rng: Random) -> str:
    """A chat with one answer: the status, or the first that is not as it should be."""
    made = await http.post("/api/chats")
    if made.status_code != 201:
        return _told(made)
    content = text(20_000, rng)  # about 100 kB, which a full disk has no room for
    chat = made.json()["id"]
    begun = await http.post(f"/api/chats/{chat}/runs", json={"content": text(20, rng), "max_tokens": 5})
    if begun.status_code == 202:
        await http.get(f"/api/runs/{begun.json()['run_id']}/events")
        sent = await http.post("/api/documents", files={"file": (f"{rng.random()}.txt", content, "text/plain")})
        await http.delete(f"/api/chats/{chat}")
        for each in (await http.get("/api/documents")).json()["documents"]:
            await http.delete(f"/api/documents/{each['id']}")
        if sent.status_code >= 300:
            return _told(sent)
    return _told(begun)


def _told(reply: httpx.Response) -> str:
    if reply.status_code < 400:
        return str(reply.status_code)
    return f"{reply.status_code} {reply.json()['error']['code']}"


def _under_load(fault: Fault, options: tuple[str, ...], data: Path | None = None) -> Json:
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch), *options, data=data) as server:
        return asyncio.run(_faults(server, fault))


async def _faults(server: Server, fault: Fault) -> Json:
    rng, streams, took = Random(13), Streams(server), list[float]()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        await streams.learn(http)
        await _chat(http, rng)  # what is only loaded when it is needed is there, too
        await asyncio.sleep(4)
        before = server.held()
        clients = [asyncio.create_task(streams.run(number)) for number in range(STREAMS)]
        for _ in range(TIMES):
            await asyncio.sleep(rng.uniform(0.1, 0.6))
            if (seconds := await fault(server, rng)) is not None:
                took.append(seconds)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        idle = await _until(lambda: _idle(server))
        await asyncio.sleep(2)
        again = Streams(server)
        await again.learn(http)
        same = again._right == streams._right
    return {
        "times": TIMES,
        "streams": dict(streams.told),
        "errors": dict(streams.errors),
        "recovery_s": percentiles(took),
        "idle_after_s": idle,
        "answers_after_are_the_same": same,
        "held_before": before,
        "held_after": server.held(),
    }


async def _until(true: Callable[[], bool]) -> float:
    return await asyncio.to_thread(until, true, 60)


def _idle(server: Server) -> bool:
    """Nothing runs and no sequence is open."""
    metrics = httpx.get(f"{server.url}/metrics", timeout=5).text
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line and not line.startswith("#"))
    held = [
        float(value)
        for name, value in values.items()
        if name.startswith(("ponder_requests_running", "ponder_sequences_open", 'ponder_kv_blocks{state="used"'))
    ]
    assert held, "the names of the metrics have changed"
    return not any(held)


def _engine_of(server: Server) -> int:
    [pid] = [pid for pid in server.family() if b"engine.process.child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def _alive_engine(server: Server, but: int) -> bool:
    try:
        return _engine_of(server) != but
    except (ValueError, OSError):
        return False
