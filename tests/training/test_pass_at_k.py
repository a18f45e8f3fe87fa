from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from training.pass_at_k import interval, pass_at_k


@pytest.mark.parametrize(("n", "right", "k"), [(6, 2, 1), (6, 2, 3), (6, 0, 4), (6, 6, 1), (6, 3, 4)])
def test_the_estimate_is_the_share_of_draws_that_hold_a_right_answer(n: int, right: int, k: int) -> None:
    draws = list(combinations(range(n), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(min(draw) < right for draw in draws) / len(draws))


def test_the_interval_holds_the_mean_and_narrows_with_more_puzzles() -> None:
    few, many = [0.0, 1.0] * 5, [0.0, 1.0] * 50
    (low, high), (lower, higher) = interval(few, Random(0)), interval(many, Random(0))
    assert low < lower < 0.5 < higher < high
