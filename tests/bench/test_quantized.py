"""The benchmark of quantised models: recipes that fit a model, and differences that are paired."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cpu.quantization_aware import _kept, _of_tokens, _paired
from bench.cpu.quantized import recipes

MODELS = Path(__file__).parents[2] / "models"


def test_groups_that_do_not_divide_the_widths_are_left_out() -> None:
    assert {recipe.group for recipe in recipes(MODELS / "pebble")} == {None, 32}  # its feed-forward has 832 columns
    assert {recipe.group for recipe in recipes(MODELS / "pebble-draft")} == {None, 32, 128}


def test_answers_are_paired_by_question() -> None:
    before = {at: at % 2 == 0 for at in range(40)}
    found = _paired(before, {**before, 1: True, 3: True, 2: False, 99: True})
    assert (found["n"], found["right"], found["more_than_original"]) == (40, 21, 1)
    assert found["interval"][0] < 1 < found["interval"][1] <= 6
    assert _paired(before, before)["interval"] == [0, 0]


def test_an_interval_is_of_a_mean_over_tokens() -> None:
    low, high = _of_tokens([1.0, 2.0, 3.0], [[0] * 10, [0] * 20, [0] * 30])
    assert 3 / 60 <= low < 6 / 60 < high <= 9 / 60
    assert _of_tokens([0.5, 0.5], [[0] * 10, [0] * 10]) == pytest.approx([0.05, 0.05])


def test_a_row_is_made_once(tmp_path: Path) -> None:
    assert _kept(tmp_path, "row", lambda: {"bytes": 1}) == _kept(tmp_path, "row", lambda: {"bytes": 2}) == {"bytes": 1}
    assert json.loads((tmp_path / "row.json").read_text()) == {"bytes": 1}
