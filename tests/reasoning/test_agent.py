"""The agent's loop with the bundled model: it calls, reads and answers; nothing is prefilled twice; limits end it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from app.answering.served_model import ServedModel
from engine import GREEDY, Engine, EngineConfig, Span
from engine.tool_parsers import read_tools
from reasoning.agent import LIMIT_NOTES, Agent, Called, Happened, Limited, Limits, Returned, Style, Wrote
from reasoning.dialogue import after_calls
from tools.outcome import Call

PEBBLE = Path(__file__).resolve().parents[2] / "models/pebble"
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
QUESTION = "What is 23 * 17?"


class Answers:
    """Tools whose every call returns `text`; with a gate, once it is open."""

    def __init__(self, text: str = "391", *, reads: bool = True, gate: asyncio.Event | None = None) -> None:
        self.text = text
        self.reads = reads
        self.gate = gate
        self.begun = list[Call]()
        self.started = asyncio.Event()
        self.ended_early = 0

    def only_reads(self, call: Call) -> bool:
        return self.reads

    async def run(self, calls: Sequence[Call]) -> list[str]:
        self.begun += calls
        self.started.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.ended_early += 1
            raise
        return [self.text for _ in calls]


class World:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.served = ServedModel(engine, "pebble")
        assert self.served.tool_parser is not None
        plan = self.served.tool_parser.plan(read_tools([CALCULATOR]), "auto")
        self.style = Style(
            plan, self.served.markers, lambda calls, texts: after_calls(engine.tokenizer, calls, texts, {}),
            self.served.opens_thinking, self.served.closes_thinking,
        )  # fmt: skip

    async def ask(self, tools: Answers, limits: Limits | None = None, **options: Any) -> list[Happened]:
        return [each async for each in self.asking(tools, limits, **options)]

    async def asking(
        self, tools: Answers, limits: Limits | None = None, remaining: int | None = None, **options: Any
    ) -> AsyncIterator[Happened]:
        prompt = await self.served.chat_tokens([{"role": "user", "content": QUESTION}], {}, [CALCULATOR])
        agent = Agent(self.style, tools, Span(sampling=GREEDY), limits or Limits(), **options)
        async with await self.engine.open(prompt) as seq:
            self.sequence = seq
            async with aclosing(agent.run(seq, remaining or self.engine.max_model_len - len(prompt))) as happening:
                async for each in happening:
                    yield each


@pytest.fixture
async def world() -> AsyncIterator[World]:
    config = EngineConfig(model=str(PEBBLE), device="cpu", dtype="float32", kv_blocks=600, threads=1)
    async with await Engine.start(config) as engine:
        yield World(engine)


def answer(log: Sequence[Happened]) -> str:
    """Returns what was written after the last result."""
    at = max((at for at, each in enumerate(log) if isinstance(each, Returned)), default=-1)
    return "".join(each.piece.text for each in log[at:] if isinstance(each, Wrote) and each.piece.part == "answer")


async def test_it_calls_reads_the_result_and_answers_with_it(world: World) -> None:
    tools = Answers("391")
    log = await world.ask(tools)
    (called,) = [each for each in log if isinstance(each, Called)]
    assert json.loads(str(called.call.arguments)) == {"expression": "23 * 17"} and tools.begun == [called.call]
    assert [each for each in log if isinstance(each, Returned)] == [Returned(called.call, "391")]
    assert "391" in answer(log) and log[-1].piece.finish_reason == "stop"  # type: ignore[union-attr]  # the last is a piece


async def test_a_turn_computes_its_new_tokens_and_no_others(world: World) -> None:
    tokens: list[tuple[int, int]] = []
    length = 0
    async for each in world.asking(Answers("391")):
        if isinstance(each, Returned):
            length = len(world.sequence)
        if isinstance(each, Wrote) and each.piece.prompt_tokens and length:
            tokens.append((each.piece.prompt_tokens, each.piece.cached_tokens))
    prompt, cached = tokens[0]
    assert prompt > length and cached >= length - 1  # the last token that was drawn has no K/V yet


async def test_what_only_reads_starts_before_the_turn_is_over(world: World) -> None:
    tools = Answers(gate=asyncio.Event())
    assert tools.gate is not None
    began_at = finished_at = None
    seen = 0
    async for each in world.asking(tools):
        seen += 1
        if isinstance(each, Called):
            await tools.started.wait()
            began_at = seen
            tools.gate.set()
        if isinstance(each, Wrote) and each.piece.finish_reason == "stop" and finished_at is None:
            finished_at = seen
    assert began_at is not None and finished_at is not None and len(tools.begun) == 1
    assert began_at <= finished_at + 1


async def test_what_has_effects_waits_for_the_end_of_the_turn(world: World) -> None:
    tools = Answers(reads=False)
    async for each in world.asking(tools):
        if isinstance(each, Called):
            assert not tools.begun
    assert len(tools.begun) == 1


async def test_the_limit_of_steps_ends_in_an_answer_without_calls(world: World) -> None:
    log = await world.ask(Answers(), Limits(steps=1))
    assert [each.limit for each in log if isinstance(each, Limited)] == ["steps"]
    assert len([each for each in log if isinstance(each, Called)]) == 1 and answer(log).strip()
    assert LIMIT_NOTES["steps"] in world.engine.tokenizer.decode(world.sequence.tokens)


async def test_time_that_is_up_ends_in_an_answer(world: World) -> None:
    hours = iter(range(0, 10**6, 3600))
    log = await world.ask(Answers(), Limits(seconds=60), clock=lambda: float(next(hours)))
    assert [each.limit for each in log if isinstance(each, Limited)] == ["seconds"] and answer(log).strip()


async def test_tokens_that_are_spent_end_in_an_answer(world: World) -> None:
    log = await world.ask(Answers(), Limits(tokens=32))
    assert [each.limit for each in log if isinstance(each, Limited)] == ["tokens"]
    assert sum(each.piece.spent for each in log if isinstance(each, Wrote)) <= 32


@pytest.mark.slow
async def test_a_result_that_would_fill_the_context_is_cut(world: World) -> None:
    log = await world.ask(Answers("word " * 20_000), remaining=1200)
    assert [each.limit for each in log if isinstance(each, Limited)] == ["context"]
    assert " […] " in world.engine.tokenizer.decode(world.sequence.tokens)
    assert log[-1].piece.finish_reason is not None  # type: ignore[union-attr]  # the last is a piece


async def test_who_stops_listening_ends_the_calls(world: World) -> None:
    tools = Answers(gate=asyncio.Event())
    happening = world.asking(tools)
    async with aclosing(happening):  # type: ignore[type-var]  # an async generator
        async for each in happening:
            if isinstance(each, Called):
                break
    await asyncio.wait_for(_until(lambda: tools.ended_early == 1 or not tools.begun), 10)
    assert world.sequence.closed


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)
