"""Gemma 4's thinking: a channel with a header of its own, which belongs to nobody's text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine import GREEDY, Engine, EngineConfig, Span, Tokenizer
from reasoning.budget import BudgetForcing, ThinkingBudget
from reasoning.dialogue import after_calls
from reasoning.strategy import Context
from reasoning.thinking import empty_thinking
from reasoning.written import pieces_of
from tests.reasoning.test_harmony import markers_of, text_of, written
from tests.tiny import write_gemma4_checkpoint

QUESTION = [{"role": "user", "content": "<|channel>thought"}]
HEADER = "<|channel>thought\n"
# The model opens its thinking at each line break, and so once more behind the header: that token has no text.
THOUGHT = f"{HEADER}<|channel>abc<channel|>"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma4_checkpoint(tmp_path_factory.mktemp("gemma4"))


@pytest.fixture
async def engine(checkpoint: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(EngineConfig(str(checkpoint), dtype="float32", kv_blocks=64)) as engine:
        yield engine


async def test_thinking_and_answer_are_told_apart(engine: Engine) -> None:
    tokenizer, markers = engine.tokenizer, markers_of(engine.tokenizer)
    prompt = tokenizer.apply_chat_template(QUESTION, enable_thinking=True)
    assert not markers.left_open(prompt, tokenizer)
    assert not markers.left_closed(prompt, tokenizer)
    pieces, behind = await written(engine, prompt, 40)
    assert (text_of(pieces, "thinking"), text_of(pieces, "answer")) == ("abc", "xy")
    assert behind == f"{THOUGHT}xy"
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", None)
    assert sum(piece.spent for piece in pieces) == len(tokenizer.encode(behind, special=True))


async def test_a_prompt_may_have_closed_its_thinking(engine: Engine) -> None:
    tokenizer, markers = engine.tokenizer, markers_of(engine.tokenizer)
    closed = tokenizer.apply_chat_template(QUESTION)
    assert markers.left_closed(closed, tokenizer)
    opened = tokenizer.apply_chat_template(QUESTION, enable_thinking=True)
    assert [*opened, *empty_thinking(tokenizer, markers, opened=False)] == closed
    pieces, behind = await written(engine, closed, 40)
    assert (text_of(pieces, "thinking"), text_of(pieces, "answer"), behind) == ("", "xy", "xy")


async def test_a_prompt_may_have_opened_its_thinking(engine: Engine) -> None:
    tokenizer, markers = engine.tokenizer, markers_of(engine.tokenizer)
    prompt = tokenizer.apply_chat_template(QUESTION, enable_thinking=True)
    prompt = [*prompt, *markers.with_header(markers.opening)]
    assert tokenizer.decode(prompt, skip_special=False).endswith(HEADER)
    assert markers.left_open(prompt, tokenizer)
    pieces, _ = await written(engine, prompt, 40)
    assert (text_of(pieces, "thinking"), text_of(pieces, "answer")) == ("abc", "xy")
    assert empty_thinking(tokenizer, markers, opened=True) == [markers.closing]


async def test_a_limit_is_kept_wherever_it_falls(engine: Engine) -> None:
    prompt = engine.tokenizer.apply_chat_template(QUESTION, enable_thinking=True)
    tokens = len(engine.tokenizer.encode(f"{THOUGHT}xy", special=True))
    for most in range(1, tokens + 3):
        pieces, behind = await written(engine, prompt, most)
        assert sum(piece.spent for piece in pieces) <= most
        assert f"{THOUGHT}xy".startswith(behind)
        assert pieces[-1].finish_reason == ("stop" if most > tokens else "length")


async def test_a_budget_closes_the_thinking(engine: Engine) -> None:
    forcing = BudgetForcing(ThinkingBudget(max_tokens=4), engine.tokenizer)
    prompt = engine.tokenizer.apply_chat_template(QUESTION, enable_thinking=True)
    pieces, behind = await written(engine, prompt, 60, forcing)
    assert (text_of(pieces, "thinking"), text_of(pieces, "answer")) == ("a", "xy")
    assert behind == f"{HEADER}<|channel>a<channel|>xy"
    assert sum(piece.spent for piece in pieces if piece.part == "thinking") == forcing.thinking_tokens == 4


async def test_tokens_written_elsewhere_are_told_apart_alike(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    prompt = tokenizer.apply_chat_template(QUESTION, enable_thinking=True)
    pieces, behind = await written(engine, prompt, 40)
    context = Context(tokenizer, Span(GREEDY, max_tokens=40), markers_of(tokenizer), opened=False)
    again = pieces_of(tokenizer.encode(behind, special=True), context, "stop")
    for part in ("thinking", "answer"):
        assert text_of(again, part) == text_of(pieces, part)


def test_results_follow_a_call_within_the_turn(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    tokens = after_calls(tokenizer, [("1", "look")], ["<|turn>"], {})
    assert tokenizer.decode(tokens, skip_special=False) == "<|tool_response>response:look<|turn><tool_response|>"
    assert tokens.count(tokenizer.token_id("<|turn>") or -1) == 0  # the result's own is text
