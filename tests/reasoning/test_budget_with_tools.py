"""A thinking budget over the loop with tools and the bundled model: one for all turns, nothing computed twice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import GREEDY, Engine, EngineConfig, Span
from engine.tool_parsers import choose_parser, read_tools
from reasoning.agent import Agent, Called, Happened, Limits, Style, Wrote
from reasoning.budget import BudgetForcing, ThinkingBudget
from reasoning.dialogue import after_calls
from reasoning.thinking import Markers
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


class Calculator:
    def only_reads(self, call: Call) -> bool:
        return True

    async def run(self, calls: Sequence[Call]) -> list[str]:
        return ["391" for _ in calls]


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    config = EngineConfig(str(PEBBLE), device="cpu", dtype="float32", kv_blocks=600, threads=1, prefix_cache=False)
    async with await Engine.start(config) as engine:
        yield engine


@pytest.mark.parametrize(
    "budget",
    [
        ThinkingBudget(min_tokens=20, max_tokens=40), ThinkingBudget(waits=2, max_tokens=60),
        ThinkingBudget(max_tokens=2), ThinkingBudget(min_tokens=50, max_tokens=50, closing_text="\nSo:"),
    ],
)  # fmt: skip
async def test_calls_are_valid_and_the_budget_is_exact(engine: Engine, budget: ThinkingBudget) -> None:
    tokenizer = engine.tokenizer
    tool_parser = choose_parser(tokenizer, tokenizer.tool_template, "auto")
    markers = Markers.of(tokenizer)
    assert tool_parser is not None and markers is not None
    style = Style(
        tool_parser.plan(read_tools([CALCULATOR]), "auto"), markers,
        lambda calls, texts: after_calls(tokenizer, calls, texts, {}),
        lambda tokens: markers.left_open(tokens, tokenizer), lambda tokens: markers.left_closed(tokens, tokenizer),
    )  # fmt: skip
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 23 * 17?"}], tools=[CALCULATOR])
    forcing = BudgetForcing(budget, tokenizer)
    agent = Agent(style, Calculator(), Span(GREEDY), Limits(steps=2, tokens=400), answers=forcing.answer)
    before = await engine.stats()
    async with await engine.open(prompt) as seq:
        happened: list[Happened] = [each async for each in agent.run(seq, 1500)]
        length = len(seq)
    after = await engine.stats()
    pieces = [each.piece for each in happened if isinstance(each, Wrote)]
    thinking = sum(piece.spent for piece in pieces if piece.part == "thinking")
    assert budget.min_tokens <= thinking <= (budget.max_tokens or 0)
    assert thinking == forcing.thinking_tokens
    assert forcing.waits == budget.waits or forcing.ended == "maximum"
    assert not any(mark in piece.text for piece in pieces for mark in ("<think>", "</think>"))
    for each in happened:
        if isinstance(each, Called):
            assert "expression" in json.loads(str(each.call.arguments))
    assert any(piece.part == "answer" and piece.text for piece in pieces)
    assert length - 1 <= after.step_tokens - before.step_tokens <= length
