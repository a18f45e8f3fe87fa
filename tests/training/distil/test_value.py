"""The value head: what it learns from states, and what it is measured to be worth."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from training.distil.value import BEFORE, JudgedAnswer, ValueResult, describe, fit, measured
from training.puzzle import excluded
from training.tasks import countdown


def test_it_learns_the_direction_in_which_right_answers_lie() -> None:
    draw = torch.Generator().manual_seed(0)
    right = torch.rand(3000, generator=draw) < 0.3
    direction = torch.randn(16, generator=draw)
    states = 5 + 3 * torch.randn(3000, 16, generator=draw) + 2.0 * right[:, None].float() * direction
    head = fit(states[:2000], right[:2000])
    found = torch.sigmoid(states[2000:] @ head.weight + head.bias)
    told = right[2000:]
    assert (found[told][:, None] > found[~told][None]).float().mean() > 0.9
    assert float(found.mean()) == pytest.approx(float(told.float().mean()), abs=0.04), "it is a probability"


def judged(at: int, right: bool, value: float, confidence: float = 0.5, *, ended: bool = True) -> JudgedAnswer:
    return JudgedAnswer(at, (1,), (2,), right, ended, confidence, value)


def test_the_best_of_each_puzzle_is_counted() -> None:
    found = [
        *(judged(0, at == 3, 0.9 if at == 3 else 0.1, 0.2 if at == 3 else 0.8) for at in range(8)),  # by value
        *(judged(1, at == 2, 0.3 if at == 2 else 0.4, 0.9 if at == 2 else 0.1) for at in range(8)),  # by confidence
        *(judged(2, False, 0.7) for _ in range(8)),
        *(judged(3, at == 0, 0.2 if at == 0 else 0.99, ended=at == 0) for at in range(8)),  # the others were cut
    ]
    result = measured(found)
    assert (result.puzzles, result.by_value, result.by_confidence, result.at_least_one) == (4, 0.5, 0.5, 0.75)
    assert result.one == pytest.approx(3 / 32) and result.gain[0] <= 0 <= result.gain[1]


def test_it_learns_from_puzzles_that_the_evaluation_does_not_have() -> None:
    rng = Random(4)
    for evaluated in (True, False):
        found = [countdown.kept(rng, "countdown4", evaluated=evaluated) for _ in range(20)]
        assert all(excluded(numbers, target) is evaluated for numbers, target, _ in found)


def test_its_section_of_the_card_is_written_once(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text(f"# Pebble\n\n{BEFORE}\n\n- Data\n")
    for share in (0.5, 0.25):
        describe(ValueResult(300, 8, 0.2, share, (0.1, 0.6), 0.1, 0.7, 0.9, (0.0, 0.1)), 3200, card)
    text = card.read_text()
    assert text.count("## Its value head") == text.count(BEFORE) == 1
    assert "| the best of 8 by the value head | 25% (10% – 60%) |" in text and text.endswith("- Data\n")
