"""Calls that a model generates on BFCL's questions are valid: the bundled model's, and those of weights that mean
nothing. The whole set is `python -m bench.tool_calls`; here is a part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import tool_calls
from engine import GREEDY, Sampling
from engine.tool_parsers import ParsedCall
from tests.engine.structured_output.bfcl import SHARED

pytestmark = pytest.mark.slow

needs_questions = pytest.mark.skipif(
    not (SHARED / "data/bfcl").is_dir(), reason=f"no questions at {SHARED / 'data/bfcl'}; set PONDER_SHARED"
)


@needs_questions
async def test_every_finished_call_of_the_bundled_model_is_valid() -> None:
    scores = await tool_calls.measure(tool_calls.PEBBLE, 6, "required", GREEDY)
    assert sum(score.calls for score in scores.values()) >= 20
    assert all(score.valid == score.calls for score in scores.values()), scores


@needs_questions
async def test_every_finished_call_of_random_weights_is_valid(tmp_path: Path) -> None:
    model = tool_calls.random_weights(tmp_path / "random")
    scores = await tool_calls.measure(model, 4, "required", Sampling(seed=2))
    assert sum(score.calls for score in scores.values()) >= 5
    assert all(score.valid == score.calls for score in scores.values()), scores


CIRCLE = ("area", {"radius": [3], "unit": ["cm", ""]})


@pytest.mark.parametrize(
    ("calls", "accepted", "right"),
    [
        ([ParsedCall("area", '{"radius": 3}')], [CIRCLE], True),
        ([ParsedCall("area", '{"radius": 3.0, "unit": "CM"}')], [CIRCLE], True),
        ([ParsedCall("area", '{"radius": 4}')], [CIRCLE], False),
        ([ParsedCall("area", '{"unit": "cm"}')], [CIRCLE], False),
        ([ParsedCall("area", '{"radius": 3, "colour": 1}')], [CIRCLE], False),
        ([ParsedCall("volume", '{"radius": 3}')], [CIRCLE], False),
        ([ParsedCall("area", '{"radius": true}')], [("area", {"radius": [1]})], False),
        ([], [], True),
        ([ParsedCall("area", '{"radius": 3}')], [], False),
        ([ParsedCall("f", '{"x": 2}'), ParsedCall("f", '{"x": 1}')], [("f", {"x": [1]}), ("f", {"x": [2]})], True),
        ([ParsedCall("f", '{"x": 1}'), ParsedCall("f", '{"x": 1}')], [("f", {"x": [1]}), ("f", {"x": [2]})], False),
        ([ParsedCall("f", '{"at": {"x": [1, 2]}}')], [("f", {"at": [{"x": [[1, 2]]}]})], True),
    ],
)
def test_calls_are_right_by_name_and_accepted_values(calls: list[ParsedCall], accepted: Any, right: bool) -> None:
    assert tool_calls.right(calls, accepted) is right
