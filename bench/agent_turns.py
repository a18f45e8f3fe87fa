"""Measures the cost of a turn with tools beside its new tokens, and how soon the engine is idle after Stop: `ponder
bench agent`.

The loop writes on one live sequence, so only a result's tokens are prefilled. Beside it, in the same run, the same
conversation over requests, as any client of an HTTP API does it: everything is sent again each turn, and the prefix
cache serves its hits; once more with the cache off. The floor of a turn is the engine's time for the same tokens,
appended to a live sequence of the same length, with no loop around it.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from app.answering.answer_plan import plan_calls
from app.answering.served_model import ServedModel
from app.cli.serve import bind
from app.config import load_settings
from app.server import create_app
from bench import hardware
from engine import GREEDY, Engine, EngineConfig, Span
from engine.tool_parsers import read_tools
from reasoning.agent import Agent, Limits, Returned, Style, Wrote
from reasoning.dialogue import after_calls
from tools.outcome import Call

Json = dict[str, Any]  # Any: plain JSON

STEPS = 6  # turns that call
RESULT = "The stock of item {n} is {m} pieces, in the hall on the left, and more are on their way from the harbour."
LOOKUP: Json = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up an item's stock.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 999}},
            "required": ["number"],
            "additionalProperties": False,
        },
    },
}
QUESTION = "How many pieces of every item on list {list} are there? Look each of them up."


class _Stock:
    """A tool that takes no time, and notes when it gave its result back."""

    def __init__(self) -> None:
        self.returned_at = 0.0

    def only_reads(self, call: Call) -> bool:
        return False

    async def run(self, calls: Sequence[Call]) -> list[str]:
        texts = [RESULT.format(n=7 * at + 11, m=31 * at + 17) for at, _ in enumerate(calls)]
        self.returned_at = time.perf_counter()
        return texts


async def turns(model: Path, repeats: int) -> Json:
    """Tokens prefilled and milliseconds to the next token, over all turns that read a result.

    Every way has an engine of its own, so that none hits another's blocks in its cache, and every repeat a question of
    its own.
    """
    waits: dict[str, list[float]] = {"loop": [], "floor": [], "requests": [], "requests, no prefix cache": []}
    prefilled, shares = list[float](), list[float]()
    async with (
        await Engine.start(EngineConfig(str(model))) as engine,
        await Engine.start(EngineConfig(str(model))) as beside,
        await Engine.start(EngineConfig(str(model))) as over,
        await Engine.start(EngineConfig(str(model), prefix_cache=False)) as uncached,
    ):
        served = ServedModel(engine, "pebble")
        for repeat in range(repeats + 1):
            question = {"role": "user", "content": QUESTION.format(list=100 + repeat)}
            prompt = await served.chat_tokens([question], {}, [LOOKUP])
            for turn in await _live(engine, served, prompt):
                spent = {
                    "loop": turn.wait_s,
                    "floor": await _append(beside, turn.before, turn.appended),
                    "requests": await _request(over, [*turn.before, *turn.appended]),
                    "requests, no prefix cache": await _request(uncached, [*turn.before, *turn.appended]),
                }
                if not repeat:
                    continue  # a cold turn
                for name, seconds in spent.items():
                    waits[name].append(seconds)
                prefilled.append(turn.prefilled / len(turn.appended))
                shares.append(1 - (turn.prefilled - len(turn.appended)) / len(turn.before))
    medians = {name: statistics.median(times) * 1e3 for name, times in waits.items()}
    overheads = [(loop - floor) * 1e3 for loop, floor in zip(waits["loop"], waits["floor"], strict=True)]
    return {
        "turns": len(overheads),
        "prefilled_per_new_token": {"median": statistics.median(prefilled), "max": max(prefilled)},
        "reused_share_of_what_stood": {"median": statistics.median(shares), "min": min(shares)},
        "next_token_ms": {name: round(each, 2) for name, each in medians.items()},
        "overhead_ms": {
            "median": round(statistics.median(overheads), 2),
            "p90": round(statistics.quantiles(overheads, n=10)[-1], 2),
        },
        "ratio_to_requests": round(medians["requests"] / medians["loop"], 2),
        "ratio_to_requests_without_cache": round(medians["requests, no prefix cache"] / medians["loop"], 2),
    }


@dataclass(frozen=True, slots=True)
class _Turn:
    """`appended` to the sequence `before`, as the loop made it; `prefilled` is the engine's count until a token came,
    `wait_s` the seconds from the result to it."""

    before: list[int]
    appended: list[int]
    prefilled: int
    wait_s: float


async def _live(engine: Engine, served: ServedModel, prompt: list[int]) -> list[_Turn]:
    stock, lived, appended = _Stock(), list[_Turn](), list[list[int]]()
    plan = await plan_calls(served, read_tools([LOOKUP]), "required", False)

    def after(calls: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[int]:
        appended.append(after_calls(engine.tokenizer, calls, texts, {}))
        return appended[-1]

    style = Style(plan, served.markers, after)
    agent = Agent(style, stock, Span(sampling=GREEDY), Limits(steps=STEPS, tokens=STEPS * 60))
    async with (
        await engine.open(prompt) as seq,
        aclosing(agent.run(seq, engine.max_model_len - len(prompt))) as happening,
    ):
        before, count, waiting = list[int](), 0, False
        async for each in happening:
            match each:
                case Returned():
                    before, count, waiting = seq.tokens, (await engine.stats()).prompt_tokens, True
                case Wrote() if waiting:
                    wait_s, waiting = time.perf_counter() - stock.returned_at, False
                    now = (await engine.stats()).prompt_tokens
                    lived.append(_Turn(before, appended[-1], now - count, wait_s))
    return lived


async def _append(engine: Engine, before: list[int], appended: list[int]) -> float:
    """Seconds to the next token of a live sequence to which tokens are appended."""
    async with await engine.open(before) as seq:
        await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))
        began = time.perf_counter()
        seq.append(appended)
        await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))
        return time.perf_counter() - began


async def _request(engine: Engine, tokens: list[int]) -> float:
    """Seconds to the first token of a request that sends everything."""
    began = time.perf_counter()
    async with await engine.open(tokens) as seq:
        await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))
        return time.perf_counter() - began


async def stops(model: Path, repeats: int) -> Json:
    """Milliseconds from a Stop that a second connection sends until the engine runs nothing, and until the run ends."""
    idle, ended = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as data:
        settings = load_settings(model=str(model), data_dir=data, sandbox=False)
        async with await Engine.start(EngineConfig(str(model))) as engine:
            listener = bind("127.0.0.1", 0)
            web = uvicorn.Server(uvicorn.Config(create_app(engine, settings), log_config=None))
            serving = asyncio.create_task(web.serve(sockets=[listener]))
            while not web.started:
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url) as reader, httpx.AsyncClient(base_url=url) as other:
                while len(idle) < repeats:
                    spent = await _stop(engine, reader, other)
                    if spent is not None:
                        idle.append(spent[0])
                        ended.append(spent[1])
            web.should_exit = True
            await serving
    return {
        "stops": repeats,
        "engine_idle_ms": _spread(idle),
        "run_ended_ms": _spread(ended),
    }


async def _stop(engine: Engine, reader: httpx.AsyncClient, other: httpx.AsyncClient) -> tuple[float, float] | None:
    """None where the answer was done before Stop came."""
    chat = (await reader.post("/api/chats", json={})).json()["id"]
    body = {"content": "Use 3, 5, 7 and 9 to make 24.", "thinking": True, "temperature": 1.2}
    run = (await reader.post(f"/api/chats/{chat}/runs", json=body)).json()["run_id"]
    async with reader.stream("GET", f"/api/runs/{run}/events") as reply:
        lines = reply.aiter_lines()
        await _until(lines, lambda line: line.startswith("event: thinking.delta"))
        began = time.perf_counter()
        cancelling = asyncio.create_task(other.post(f"/api/runs/{run}/cancel"))
        while (await engine.stats()).running:
            await asyncio.sleep(0.0005)
        idle = time.perf_counter() - began
        last = await _until(lines, lambda line: line.startswith(("event: run.cancelled", "event: run.completed")))
        ended = time.perf_counter() - began
        await cancelling
    return (idle, ended) if last == "event: run.cancelled" else None


async def _until(lines: Any, wanted: Callable[[str], bool]) -> str:
    async for line in lines:
        if wanted(line):
            return str(line)
    raise RuntimeError("the stream ended first")


def _spread(times: Sequence[float]) -> Json:
    return {"p50": round(statistics.median(times) * 1e3, 1), "max": round(max(times) * 1e3, 1)}


async def measure(model: Path, repeats: int) -> Json:
    """Everything, with date and hardware."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": "ponder bench agent",
        "slug": f"agent-{hardware.slug()}",
        "hardware": hardware.describe(),
        "load": round(os.getloadavg()[0], 1),  # of the machine before this: its neighbours' included
        "turns": await turns(model, repeats),
        "stops": await stops(model, 10 * repeats),
    }


def table(made: Json) -> str:
    """Markdown."""
    of, stop = made["turns"], made["stops"]
    waits = of["next_token_ms"]
    return "\n".join(
        [
            f"Measured on {made['date']} with `{made['command']}`: {made['hardware']['cpu']}, "
            f"{made['hardware']['cores']} cores, load {made['load']} before it; {of['turns']} turns, "
            f"{stop['stops']} stops.",
            "",
            "| | median | worst |",
            "|---|---|---|",
            f"| tokens prefilled for each new token of a turn | {of['prefilled_per_new_token']['median']:.2f} "
            f"| {of['prefilled_per_new_token']['max']:.2f} |",
            f"| share of the sequence that was not computed again | {of['reused_share_of_what_stood']['median']:.1%} "
            f"| {of['reused_share_of_what_stood']['min']:.1%} |",
            f"| from a result to the next token | {waits['loop']:.1f} ms | |",
            f"| … the engine's own part, the floor | {waits['floor']:.1f} ms | |",
            f"| … what the loop adds | {of['overhead_ms']['median']:.1f} ms "
            f"| {of['overhead_ms']['p90']:.1f} ms at p90 |",
            f"| … the same conversation over requests, prefix cache on | {waits['requests']:.1f} ms, "
            f"{of['ratio_to_requests']:.2f} times as long | |",
            f"| … prefix cache off | {waits['requests, no prefix cache']:.1f} ms, "
            f"{of['ratio_to_requests_without_cache']:.2f} times as long | |",
            f"| from Stop to an idle engine | {stop['engine_idle_ms']['p50']:.0f} ms "
            f"| {stop['engine_idle_ms']['max']:.0f} ms |",
        ]
    )
