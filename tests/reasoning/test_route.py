"""The cascade: what escalates, why, what it costs, and that the last model's answer is always taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import GREEDY, Engine, EngineConfig, Span, TokenLogprob
from reasoning.candidate import Candidate, Draft
from reasoning.route import CascadeStep, Checked, Confident, Decided, FirstTokens, Gate, Routed, Tried, Whole, cascade
from reasoning.strategy import Context
from reasoning.thinking import Markers, Piece

MODELS = Path(__file__).resolve().parents[2] / "models"


def answer(text: str, probability: float = 1.0, tokens: int = 4, finish: Any = "stop") -> Candidate:
    logprob = math.log(probability)
    spread = ((0, logprob), (1, math.log1p(-probability))) if probability < 1 else ((0, 0.0),)
    each = TokenLogprob(0, logprob, spread)
    return Candidate(0, (Piece("answer", text, tokens, finish_reason=finish),), (0,) * tokens, (each,) * tokens)


def step(name: str, given: Candidate, cost: float = 1.0, asked: list[str] | None = None) -> CascadeStep:
    async def write(measured: bool) -> Candidate:
        if asked is not None:
            asked.append(name)
        return given if measured else Candidate(given.index, given.pieces, given.tokens)

    return CascadeStep(name, write, cost)


async def routed(steps: Sequence[CascadeStep], gates: Sequence[Gate]) -> tuple[list[Tried], Routed, Candidate]:
    items = [item async for item in cascade(steps, gates, clock=lambda: 0.0)]
    report, given = items[-2], items[-1]
    assert isinstance(report, Routed) and isinstance(given, Candidate)
    tried = [item for item in items if isinstance(item, Tried)]
    assert tuple(tried) == report.tried
    return tried, report, given


@pytest.mark.parametrize(
    ("small", "gate", "escalates", "why"),
    [
        (answer("a", 0.9), Confident(0.8), False, ""), (answer("a", 0.7), Confident(0.8), True, "confidence is 0.7"),
        (answer("a", 0.9), FirstTokens(0.8, 3), False, ""),
        (answer("a", 0.7), FirstTokens(0.8, 3), True, "first tokens is 0.7, accepted: at least 0.8"),
        (answer("a", 1.0), Decided(0.1), False, ""), (answer("a", 0.5), Decided(0.1), True, "entropy is 0.693"),
        (answer("a"), Checked(lambda text: text == "a"), False, ""),
        (answer("b"), Checked(lambda text: text == "a"), True, "check is 0, accepted: at least 1"),
        (answer("a", finish="length"), Whole(), True, "an answer that ends by itself"),
        (answer("a"), Whole(), False, ""),
    ],
)  # fmt: skip
async def test_what_does_not_pass_is_escalated_and_says_why(
    small: Candidate, gate: Gate, escalates: bool, why: str
) -> None:
    asked: list[str] = []
    large = answer("large", 0.6, tokens=8)
    tried, report, given = await routed([step("s", small, 1.0, asked), step("l", large, 5.0, asked)], [gate])
    assert report.escalated is escalates and given.text == ("large" if escalates else small.text)
    assert asked == ["s", "l"][: 1 + escalates] == [each.model for each in tried]
    assert why in tried[0].why and tried[0].passed is not escalates
    assert report.cost == 4 * 1.0 + (8 * 5.0 if escalates else 0)
    assert report.model == asked[-1]


@pytest.mark.parametrize(
    ("probabilities", "stops", "passes"),
    [
        ([0.5, 0.5], False, False),  # a third token could make up for these, and the answer's end is judged
        ([0.5, 0.5, 0.9], True, False), ([0.9, 0.9, 0.7, 0.1], False, True), ([0.9, 0.7, 0.7, 1.0, 1.0], True, False),
        ([0.9], False, True), ([], False, False),
    ],
)  # fmt: skip
def test_only_the_first_tokens_decide_and_a_bad_beginning_is_known_when_they_are_there(
    probabilities: list[float], stops: bool, passes: bool
) -> None:
    gate, logprobs = FirstTokens(0.8, 3), tuple(TokenLogprob(1, math.log(p), ()) for p in probabilities)
    assert gate.stops(logprobs) is stops
    assert gate.judge(replace(answer("a"), logprobs=logprobs)).passed is passes


async def test_the_last_answer_is_taken_and_told_for_what_it_is() -> None:
    tried, report, given = await routed([step("s", answer("x", 0.2)), step("l", answer("y", 0.3))], [Confident(0.9)])
    assert given.text == "y" and tried[-1].passed and "confidence is 0.3" in tried[-1].why and report.model == "l"


async def test_gates_are_asked_up_to_the_first_that_fails() -> None:
    asked: list[str] = []

    def check(text: str) -> bool:
        asked.append(text)
        return True

    await routed([step("s", answer("x", 0.2)), step("l", answer("y"))], [Confident(0.9), Checked(check)])
    assert asked == ["y"]


@given(
    probabilities=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5),
    least=st.floats(0, 1),
)
async def test_the_first_that_passes_is_given(probabilities: list[float], least: float) -> None:
    steps = [step(str(at), answer(str(at), each)) for at, each in enumerate(probabilities)]
    tried, report, given = await routed(steps, [Confident(least)])
    passing = [at for at, each in enumerate(probabilities) if answer("", each).confidence >= least]
    assert int(given.text) == (passing[0] if passing else len(steps) - 1) == len(tried) - 1
    assert report.cost == 4 * len(tried)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Confident(1.5), lambda: Confident(float("nan")), lambda: Decided(-0.1), lambda: FirstTokens(1.5),
        lambda: FirstTokens(0.5, 0),
    ],
)  # fmt: skip
def test_a_bar_that_makes_no_sense_is_refused(make: Callable[[], Gate]) -> None:
    with pytest.raises(ValueError, match="accepted"):
        make()


async def test_a_cascade_without_models_or_without_gates_is_refused() -> None:
    with pytest.raises(ValueError, match="no models"):
        await routed([], [Whole()])
    with pytest.raises(ValueError, match="no gate"):
        await routed([step("s", answer("x")), step("l", answer("y"))], [])
    _, report, _ = await routed([step("only", answer("x"))], [])
    assert report.model == "only"


async def test_two_bundled_models_share_a_question() -> None:
    """The draft is unsure of what the larger one is sure of: a confidence between the two escalates."""
    question = [{"role": "user", "content": "Use 2, 3 and 4 to make 24."}]
    config = {"dtype": "float32", "device": "cpu", "kv_blocks": 300, "threads": 1}
    async with (
        await Engine.start(EngineConfig(str(MODELS / "pebble-draft"), **config)) as draft,  # type: ignore[arg-type]  # fields
        await Engine.start(EngineConfig(str(MODELS / "pebble"), **config)) as pebble,  # type: ignore[arg-type]  # fields
    ):

        def of(name: str, engine: Engine, cost: float) -> CascadeStep:
            async def write(measured: bool) -> Candidate:
                markers = Markers.of(engine.tokenizer)
                context = Context(engine.tokenizer, Span(GREEDY, 120), markers)
                async with await engine.open(engine.tokenizer.apply_chat_template(question)) as seq:
                    return await Draft(seq, context, measured=measured).write()

            return CascadeStep(name, write, cost)

        steps = [of("pebble-draft", draft, 1.0), of("pebble", pebble, 8.0)]
        _, all_tried, _ = await routed(steps, [Confident(1.0)])
        low, high = (each.verdicts[0].measured for each in all_tried.tried)
        assert 0 < low < 1 and 0 < high < 1
        _, report, given = await routed(steps, [Confident(low / 2)])
        assert report.model == "pebble-draft" and given.spent == report.tried[0].tokens
        assert (await draft.stats()).blocks_used == (await pebble.stats()).blocks_used == 0
