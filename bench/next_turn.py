"""`python -m bench.next_turn [MODEL]`: measures what warming the next turn of a chat brings, and what it costs others.

Two servers of one model in one process, one that warms and one that does not, take turns. A person asks, reads the
answer (`PAUSE_S`) and asks further: the wait for the second answer's first token. Somebody else's short question that
comes while the first chat is being warmed: the wait for its first token. And closed loops of clients that ask further
at once, so that the server is never idle: tokens a second. Thought and answer have a set length, whatever they say.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import uvicorn

from app.cli.serve import bind
from app.config import load_settings
from app.server import create_app
from bench import hardware, report
from engine import Engine

Json = dict[str, Any]  # Any: plain JSON

PAUSE_S = 4.0  # of a person between two turns: short
MEANWHILE_S = 0.3  # after an answer: its next turn is being warmed
THOUGHT, ANSWER = 500, 1000  # tokens
CLIENTS, BUSY_ANSWER = 8, 60
_numbers = itertools.count(100)


@dataclass(frozen=True, slots=True)
class TimedReply:
    """A streamed answer: seconds to its first token, of anything, and its usage."""

    ttft_s: float
    content: str
    usage: Json


@dataclass(frozen=True, slots=True)
class ChatServer:
    client: httpx.AsyncClient
    engine: Engine

    async def chat(self, messages: list[Json], *, thought: int, answer: int, seed: int = 0) -> TimedReply:
        body: Json = {
            "model": "default", "messages": messages, "stream": True, "stream_options": {"include_usage": True},
            "temperature": 1.0, "seed": seed, "max_tokens": thought + answer + 2, "ignore_eos": True,
        }  # fmt: skip
        if thought:
            body["thinking"] = {"min_tokens": thought, "max_tokens": thought}
        else:
            body["reasoning_effort"] = "none"
        began, first, content, usage = time.perf_counter(), 0.0, list[str](), Json()
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.perf_counter()
                event = json.loads(line.removeprefix("data: "))
                usage = event["usage"] or usage
                content += [choice["delta"].get("content") or "" for choice in event["choices"]]
        return TimedReply(first - began, "".join(content), usage)


@asynccontextmanager
async def serving(model: Path, *, warms: bool) -> AsyncIterator[ChatServer]:
    with tempfile.TemporaryDirectory() as data, bind("127.0.0.1", 0) as listener:
        settings = load_settings(model=str(model), data_dir=data, sandbox=False, warm_next_turn=warms)
        async with await Engine.start(settings.engine_config()) as engine:
            web = uvicorn.Server(uvicorn.Config(create_app(engine, settings), log_config=None))
            running = asyncio.create_task(web.serve(sockets=[listener]))
            while not web.started:
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=600) as client:
                yield ChatServer(client, engine)
            web.should_exit = True
            await running


async def second_turn(server: ChatServer, *, meanwhile: bool) -> Json:
    """A chat of two turns; `meanwhile` somebody else asks something short after the first."""
    number = next(_numbers)
    question = {"role": "user", "content": f"Plan number {number}: how would you go about it, step by step?"}
    first = await server.chat([question], thought=THOUGHT, answer=ANSWER, seed=number)
    other: TimedReply | None = None
    if meanwhile:
        await asyncio.sleep(MEANWHILE_S)
        other = await server.chat([{"role": "user", "content": f"{number} + 58?"}], thought=0, answer=1)
    await asyncio.sleep(PAUSE_S)
    history = [question, {"role": "assistant", "content": first.content}]
    history.append({"role": "user", "content": "And what would you leave out of it if there were less time?"})
    second = await server.chat(history, thought=0, answer=1)
    return {
        "ttft_s": second.ttft_s, "prompt_tokens": second.usage["prompt_tokens"],
        "cached_tokens": second.usage["prompt_tokens_details"]["cached_tokens"],
        "other_ttft_s": None if other is None else other.ttft_s,
    }  # fmt: skip


async def busy(server: ChatServer, turns: int) -> float:
    """Generated tokens a second of closed loops, each a chat that goes on at once."""

    async def loop() -> int:
        made, messages = 0, list[Json]()
        for _ in range(turns):
            number = next(_numbers)
            messages.append({"role": "user", "content": f"What is {number} + 58?"})
            reply = await server.chat(messages, thought=BUSY_ANSWER, answer=BUSY_ANSWER, seed=number)
            messages.append({"role": "assistant", "content": reply.content})
            made += reply.usage["completion_tokens"]
        return made

    began = time.perf_counter()
    made = sum(await asyncio.gather(*(loop() for _ in range(CLIENTS))))
    return made / (time.perf_counter() - began)


async def measure(model: Path, repeats: int, rounds: int) -> Json:
    load = os.getloadavg()[0]
    chats: dict[bool, list[Json]] = {True: [], False: []}
    rates: dict[bool, list[float]] = {True: [], False: []}
    async with serving(model, warms=True) as warming, serving(model, warms=False) as cold:
        servers = {True: warming, False: cold}
        for repeat in range(repeats + 1):
            for warms in (True, False) if repeat % 2 else (False, True):
                made = await second_turn(servers[warms], meanwhile=bool(repeat % 2))
                if repeat:  # the first is cold
                    chats[warms].append(made)
        before = (await warming.engine.stats()).warmed_tokens
        for at in range(rounds):
            for warms in (True, False) if at % 2 else (False, True):
                rates[warms].append(await busy(servers[warms], 3))
                await asyncio.sleep(PAUSE_S)
        stats = await warming.engine.stats()
    ratios = [a["ttft_s"] / b["ttft_s"] for a, b in zip(chats[True], chats[False], strict=True)]
    busy_ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
    return {
        "date": datetime.date.today().isoformat(), "command": "python -m bench.next_turn", "model": model.name,
        "slug": f"next-turn-{hardware.slug()}", "hardware": hardware.describe(), "load": round(load, 1),
        "thought": THOUGHT, "answer": ANSWER, "pause_s": PAUSE_S, "chats": {"warmed": chats[True], "not": chats[False]},
        "ttft_ratio": {"median": statistics.median(ratios), "max": max(ratios)},
        "tokens_per_s": {"warmed": rates[True], "not": rates[False]},
        "throughput_ratio": {"median": statistics.median(busy_ratios), "min": min(busy_ratios)},
        "warmed_tokens_after_busy_rounds": stats.warmed_tokens - before,
    }  # fmt: skip


def _ms(chats: list[Json], name: str) -> str:
    times = [each[name] * 1e3 for each in chats if each[name] is not None]
    return f"{statistics.median(times):.0f} ms ({min(times):.0f}–{max(times):.0f})" if times else "–"


def table(made: Json) -> str:
    """Markdown."""
    warmed, cold = made["chats"]["warmed"], made["chats"]["not"]
    rates = {name: statistics.median(each) for name, each in made["tokens_per_s"].items()}
    cached = {name: statistics.median(each["cached_tokens"] for each in chats) for name, chats in made["chats"].items()}
    prompt = statistics.median(each["prompt_tokens"] for each in warmed)
    ratio, busy_ratio = made["ttft_ratio"], made["throughput_ratio"]
    return "\n".join(
        [
            "| | warmed | not | ratio |",
            "|---|---|---|---|",
            f"| second turn: first token after | {_ms(warmed, 'ttft_s')} | {_ms(cold, 'ttft_s')} "
            f"| **{ratio['median']:.0%}**, at most {ratio['max']:.0%} |",
            f"| … of its {prompt:.0f} prompt tokens cached | {cached['warmed']:.0f} | {cached['not']:.0f} | |",
            f"| somebody else's first token, {MEANWHILE_S:g} s after the first turn | {_ms(warmed, 'other_ttft_s')} "
            f"| {_ms(cold, 'other_ttft_s')} | |",
            f"| {CLIENTS} closed loops: tokens/s | {rates['warmed']:.0f} | {rates['not']:.0f} "
            f"| {busy_ratio['median']:.2f}, at least {busy_ratio['min']:.2f} |",
        ]
    )


def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint that thinks.")] = Path("models/pebble"),
    repeats: Annotated[int, typer.Option(min=2, help="Chats of each server.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the busy clients.")] = 4,
    write: Annotated[bool, typer.Option(help="Keep the JSON.")] = True,
) -> None:
    """Measure; print a table and JSON. Takes some five minutes."""
    made = asyncio.run(measure(model, repeats, rounds))
    report.show(made, table(made), keep=write)


if __name__ == "__main__":
    typer.run(main)
