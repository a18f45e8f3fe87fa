"""Streams that are read under repeated faults, and how they end.

Guarantee: a stream that began either goes on, with just the tokens that it would have had, or ends with an error that
says so; afterwards no more resources are held than before, and new requests are answered as ever.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random

import httpx

from bench.load.load_server import BenchServer, serving, until
from bench.parts import Json
from bench.serve.asks import text
from bench.serve.measured import percentiles

TIMES = int(os.environ.get("PONDER_FAULTS", "50"))
STREAMS = 6
PROMPTS = 24
EXACT = ("--engine", "process", "--dtype", "float32")


Fault = Callable[[BenchServer, Random], Coroutine[None, None, float | None]]  # seconds until all was as before


class Streams:
    """Clients that ask for one of a few known answers again and again, and compare every letter."""

    def __init__(self, server: BenchServer, words: int = 30) -> None:
        """Prompts are of so many words."""
        self._server = server
        rng = Random(12)
        self._prompts = [text(words, rng) for _ in range(PROMPTS)]
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
        """Returns how it ended, and the words until then."""
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


def under_load(fault: Fault, options: tuple[str, ...], data: Path | None = None, words: int = 30) -> Json:
    """Faults again and again while streams are read. `data` is where the server's data are to be; prompts have so many
    `words`."""
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch), *options, data=data) as server:
        return asyncio.run(_faults(server, fault, words))


async def _faults(server: BenchServer, fault: Fault, words: int) -> Json:
    rng, streams, took = Random(13), Streams(server, words), list[float]()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        await streams.learn(http)
        await chat(http, rng)  # loads lazily loaded parts, too
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
        idle = await until_true(lambda: _idle(server))
        await asyncio.sleep(2)
        again = Streams(server, words)
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


async def until_true(true: Callable[[], bool]) -> float:
    return await asyncio.to_thread(until, true, 60)


def _idle(server: BenchServer) -> bool:
    """Nothing runs and no sequence is open."""
    held = [
        value
        for name, value in metrics(server).items()
        if name.startswith(("ponder_requests_running", "ponder_sequences_open", 'ponder_kv_blocks{state="used"'))
    ]
    assert held, "the names of the metrics have changed"
    return not any(held)


def metrics(server: BenchServer) -> dict[str, float]:
    """Returns the server's metrics, by name and labels."""
    lines = httpx.get(f"{server.url}/metrics", timeout=5).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def chat(http: httpx.AsyncClient, rng: Random) -> str:
    """A chat with one answer: the status, or the first that is not as it should be."""
    made = await http.post("/api/chats")
    if made.status_code != 201:
        return _outcome(made)
    content = text(20_000, rng)  # about 100 kB, more than a full disk takes
    chat = made.json()["id"]
    begun = await http.post(f"/api/chats/{chat}/runs", json={"content": text(20, rng), "max_tokens": 5})
    if begun.status_code == 202:
        await http.get(f"/api/runs/{begun.json()['run_id']}/events")
        sent = await http.post("/api/documents", files={"file": (f"{rng.random()}.txt", content, "text/plain")})
        await http.delete(f"/api/chats/{chat}")
        for each in (await http.get("/api/documents")).json()["documents"]:
            await http.delete(f"/api/documents/{each['id']}")
        if sent.status_code >= 300:
            return _outcome(sent)
    return _outcome(begun)


def _outcome(reply: httpx.Response) -> str:
    if reply.status_code < 400:
        return str(reply.status_code)
    return f"{reply.status_code} {reply.json()['error']['code']}"
