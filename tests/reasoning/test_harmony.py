"""Harmony, gpt-oss's dialect: thinking and answer are messages of the channels `analysis` and `final`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine import GREEDY, Engine, EngineConfig, Span, Tokenizer
from engine.tool_parsers import ParsedCall, choose_parser, fold, read_tools
from reasoning.budget import BudgetForcing, ThinkingBudget
from reasoning.dialogue import after_calls
from reasoning.strategy import Context
from reasoning.thinking import AnswerFunction, Markers, Piece, empty_thinking, think_and_answer
from reasoning.written import pieces_of
from tests.tiny import write_harmony_checkpoint

QUESTION = [{"role": "user", "content": "<|channel|>final<|message|>"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_harmony_checkpoint(tmp_path_factory.mktemp("harmony"))


@pytest.fixture
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


@pytest.fixture
async def engine(checkpoint: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(EngineConfig(str(checkpoint), dtype="float32", kv_blocks=64)) as engine:
        yield engine


def markers_of(tokenizer: Tokenizer) -> Markers:
    markers = Markers.of(tokenizer)
    assert markers is not None
    return markers


async def written(
    engine: Engine, prompt: list[int], most: int, forcing: BudgetForcing | None = None
) -> tuple[list[Piece], str]:
    """Returns an answer's pieces, and the text of the sequence behind its prompt."""
    markers = markers_of(engine.tokenizer)
    seen = {
        "opened": markers.left_open(prompt, engine.tokenizer),
        "closed": markers.left_closed(prompt, engine.tokenizer),
    }
    async with await engine.open(prompt) as seq:
        write: AnswerFunction = think_and_answer if forcing is None else forcing.answer
        pieces = [piece async for piece in write(seq, Span(GREEDY, max_tokens=most), markers, **seen)]
        return pieces, engine.tokenizer.decode(seq.tokens[len(prompt) :], skip_special=False)


def text_of(pieces: list[Piece], part: str) -> str:
    return "".join(piece.text for piece in pieces if piece.part == part)


@pytest.mark.parametrize(
    ("variables", "opened"), [({}, True), ({"enable_thinking": True}, True), ({"enable_thinking": False}, False)]
)
def test_a_prompt_opens_the_channel_of_thinking_or_of_the_answer(
    tokenizer: Tokenizer, variables: dict[str, Any], opened: bool
) -> None:
    """Any: of a template."""
    prompt, markers = tokenizer.apply_chat_template(QUESTION, **variables), markers_of(tokenizer)
    channel = "analysis" if opened else "final"
    text = tokenizer.decode(prompt, skip_special=False)
    assert text.endswith(f"<|end|><|start|>assistant<|channel|>{channel}<|message|>")
    assert markers.left_open(prompt, tokenizer) is opened
    assert markers.left_closed(prompt, tokenizer) is not opened
    assert prompt.count(markers.opening) == 1  # the user's own is text


def test_only_a_prompt_for_an_answer_has_a_channel_opened(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=False)
    assert prompt[-1] == markers_of(tokenizer).closing


@pytest.mark.parametrize(("variables", "channel"), [({}, "analysis<|message|>"), ({"enable_thinking": False}, "")])
def test_a_prompt_after_results_leaves_the_channel_of_an_answer_open(
    tokenizer: Tokenizer, variables: dict[str, Any], channel: str
) -> None:
    """Another call may come in its place. Any: of a template."""
    tokens = after_calls(tokenizer, [("1", "look")], ["Open."], variables)
    assert tokenizer.decode(tokens, skip_special=False) == (
        "<|call|><|start|>functions.look to=assistant<|channel|>commentary<|message|>Open.<|end|>"
        f"<|start|>assistant<|channel|>{channel}"
    )
    markers = markers_of(tokenizer)
    assert markers.left_closed(tokens, tokenizer) is not markers.left_open(tokens, tokenizer) is bool(channel)
    rest = tokenizer.decode(markers.missing_header(tokens), skip_special=False)
    assert rest == ("" if channel else "final<|message|>")


async def test_a_call_may_stand_in_place_of_the_answer(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    parser = choose_parser(tokenizer, tokenizer.tool_template)
    assert parser is not None
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "maxProperties": 0}}}
    prompt = tokenizer.apply_chat_template(QUESTION, tools=[tool])
    behind = {}
    for choice in ("auto", "required"):
        plan = parser.plan(read_tools([tool]), choice)
        span = Span(GREEDY, max_tokens=100, constraint=plan.constrained)
        async with await engine.open(prompt) as seq:
            written = think_and_answer(seq, span, markers_of(tokenizer), opened=True, calls=True)
            pieces = [piece async for piece in written]
            behind[choice] = tokenizer.decode(seq.tokens[len(prompt) :], skip_special=False)
        assert pieces[-1].finish_reason == "stop"
    calls, malformed = fold([*(body := plan.parser()).push(text_of(pieces, "call")), *body.end()])
    assert (calls, malformed) == ([ParsedCall("look", "{}")], "")
    head = "abc<|end|><|start|>assistant<|channel|>"
    assert behind["auto"] == f"{head}final<|message|>abc"
    assert behind["required"] == f"{head}commentary to=functions.look <|constrain|>json<|message|>{{}}"


async def test_thinking_and_answer_are_messages_of_two_channels(engine: Engine) -> None:
    pieces, behind = await written(engine, engine.tokenizer.apply_chat_template(QUESTION), 40)
    assert (text_of(pieces, "thinking"), text_of(pieces, "answer")) == ("abc", "abc")
    assert behind == "abc<|end|><|start|>assistant<|channel|>final<|message|>abc"
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", None)
    assert sum(piece.spent for piece in pieces) == len(engine.tokenizer.encode(behind, special=True))


async def test_without_thinking_there_is_an_answer_alone(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    opened = tokenizer.apply_chat_template(QUESTION)
    prompts = (
        tokenizer.apply_chat_template(QUESTION, enable_thinking=False),
        [*opened, *empty_thinking(tokenizer, markers_of(tokenizer), opened=True)],
    )
    for prompt in prompts:
        pieces, behind = await written(engine, prompt, 40)
        assert (text_of(pieces, "thinking"), text_of(pieces, "answer"), behind) == ("", "abc", "abc")


async def test_a_limit_is_kept_wherever_it_falls(engine: Engine) -> None:
    whole = "abc<|end|><|start|>assistant<|channel|>final<|message|>abc"
    tokens = len(engine.tokenizer.encode(whole, special=True))
    for most in range(1, tokens + 2):
        pieces, behind = await written(engine, engine.tokenizer.apply_chat_template(QUESTION), most)
        assert sum(piece.spent for piece in pieces) <= most
        assert whole.startswith(behind)
        assert pieces[-1].finish_reason == ("stop" if most > tokens else "length")


async def test_a_budget_closes_the_channel_of_thinking(engine: Engine) -> None:
    forcing = BudgetForcing(ThinkingBudget(max_tokens=2), engine.tokenizer)
    pieces, behind = await written(engine, engine.tokenizer.apply_chat_template(QUESTION), 40, forcing)
    assert (text_of(pieces, "thinking"), text_of(pieces, "answer")) == ("a", "abc")
    assert behind == "a<|end|><|start|>assistant<|channel|>final<|message|>abc"
    assert sum(piece.spent for piece in pieces if piece.part == "thinking") == forcing.thinking_tokens == 2


async def test_tokens_written_elsewhere_are_told_apart_alike(engine: Engine) -> None:
    tokenizer, prompt = engine.tokenizer, engine.tokenizer.apply_chat_template(QUESTION)
    markers = markers_of(tokenizer)
    pieces, behind = await written(engine, prompt, 40)
    context = Context(tokenizer, Span(GREEDY, max_tokens=40), markers, opened=True)
    tokens = tokenizer.encode(behind, special=True)
    again = pieces_of(tokens, context, "stop")
    for part in ("thinking", "answer"):
        assert text_of(again, part) == text_of(pieces, part)
        assert sum(p.spent for p in again if p.part == part) == sum(p.spent for p in pieces if p.part == part)
