"""The choice of drafted tokens to verify: those that raise the expected tokens a second most."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.control import Calibration, StepTimes, chosen_lengths


def times(*points: tuple[int, float]) -> StepTimes:
    made = StepTimes()
    for tokens, seconds in points:
        made.ran(tokens, seconds)
    return made


FLAT = times((1, 1.0), (64, 1.01), (256, 1.1))
STEEP = times((1, 1.0), (64, 64.0), (256, 256.0))


@given(
    st.dictionaries(
        st.integers(0, 2),
        st.lists(st.floats(0.05, 1.0), max_size=4).map(lambda each: sorted(each, reverse=True)),
        max_size=3,
    ),
    st.lists(st.floats(1.0, 3.0), min_size=4, max_size=4),
)
def test_the_best_lengths_are_chosen(survival: dict[int, list[float]], seconds: list[float]) -> None:
    costs = times(*zip((1, 4, 8, 16), sorted(seconds), strict=True))
    rows = max(1, len(survival))

    def goodput(lengths: dict[int, int]) -> float:
        expected = rows + sum(sum(survival[id][:length]) for id, length in lengths.items())
        return expected / costs.seconds(rows + sum(lengths.values()))

    ids = list(survival)
    every = [dict(zip(ids, lengths, strict=True)) for lengths in product(*(range(len(survival[id]) + 1) for id in ids))]
    best, alone = max(map(goodput, every)), goodput({})
    chosen = goodput(chosen_lengths(survival, rows, costs))
    assert chosen == pytest.approx(best if best > 1.05 * alone else alone)


def test_drafts_are_verified_where_a_step_is_as_long_with_them() -> None:
    assert chosen_lengths({1: [0.9, 0.8, 0.7], 2: [0.3, 0.1]}, 2, FLAT) == {1: 3, 2: 2}


def test_nothing_is_verified_where_each_token_costs_as_much() -> None:
    assert chosen_lengths({1: [0.9, 0.8, 0.7]}, 1, STEEP) == {}


def test_slots_go_to_the_sequence_that_is_surer() -> None:
    half = times((1, 1.0), (2, 1.0), (4, 1.0), (6, 2.5), (8, 4.0))
    assert chosen_lengths({1: [0.9, 0.8], 2: [0.4, 0.2]}, 2, half) == {1: 2}


def test_a_proposer_that_is_always_wrong_is_believed_no_more_and_tried_again_later() -> None:
    calibration = Calibration()
    for _ in range(50):
        calibration.learn(0.9, right=False)
    assert calibration.probability(0.9) < 0.1
    for _ in range(400):
        calibration.forget(0.9)
    assert calibration.probability(0.9) > 0.4
    assert 0.2 < calibration.probability(0.3) < 0.3


def test_what_drafts_are_worth_now_counts_more_than_what_they_were() -> None:
    calibration = Calibration()
    for right in (True, False):
        for _ in range(2000 if right else 150):
            calibration.learn(0.9, right=right)
    assert calibration.probability(0.9) < 0.3


def test_a_proposer_that_doubts_itself_wrongly_is_believed_more() -> None:
    calibration = Calibration()
    for _ in range(100):
        calibration.learn(0.2, right=True)
    assert calibration.probability(0.2) > 0.9


@given(
    st.lists(st.tuples(st.integers(1, 600), st.floats(1e-4, 10)), max_size=30), st.integers(1, 600), st.integers(1, 600)
)
def test_more_tokens_are_never_expected_to_be_faster(steps: list[tuple[int, float]], a: int, b: int) -> None:
    made = times(*steps)
    assert made.seconds(min(a, b)) <= made.seconds(max(a, b))


def test_one_slow_step_changes_little() -> None:
    made = times(*((1, 1.0) for _ in range(20)), (1, 100.0))
    assert made.seconds(1) < 1.5


def test_a_size_that_has_not_run_for_long_is_expected_like_its_neighbours() -> None:
    made = times((8, 50.0), *((1, 1.0) for _ in range(400)))
    assert made.seconds(8) == pytest.approx(1.35)


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    assert times((4, 0.0)).seconds(1) == 1.0
