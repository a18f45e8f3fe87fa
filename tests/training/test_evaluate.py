from __future__ import annotations

from random import Random

import pytest

from training.evaluate import ABILITIES, Result, is_right, table, wilson


@pytest.mark.parametrize(
    ("right", "n", "low", "high"), [(0, 10, 0.0, 0.278), (5, 10, 0.237, 0.763), (10, 10, 0.722, 1.0)]
)
def test_wilson_intervals_match_the_published_ones(right: int, n: int, low: float, high: float) -> None:
    assert wilson(right, n) == pytest.approx((low, high), abs=1e-3)


@pytest.mark.parametrize("ability", ABILITIES)
def test_the_wanted_completion_counts_as_right_and_another_does_not(ability: str) -> None:
    rng = Random(0)
    for _ in range(50):
        made = ABILITIES[ability](rng)
        assert is_right(made, made.completion())
        assert not is_right(made, "<think>\n" + made.last.answer + "\n</think>\n\nI would rather not.")


def test_the_table_gives_shares_with_their_intervals() -> None:
    assert "| counts | 10 | 50.0% | 23.7% – 76.3% |" in table([Result("counts", 10, 5, *wilson(5, 10))])
