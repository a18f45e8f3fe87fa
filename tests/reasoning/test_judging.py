"""Tests what counts as a right answer, comparison by comparison, and which wishes are refused."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from reasoning.evaluate import BadAnswer, Choices, Puzzle, judge_of
from training import puzzle

ABC = ("A", "B", "AB")


@pytest.mark.parametrize(
    ("compare", "wanted", "right", "wrong"),
    [
        ("exact", "The Dam", ["the  dam.", "The Dam"], ["dam", "the dam was", ""]),
        ("number", 42, ["42", "It is 42.", "40 + 2 = 42", "42.0", "a total of 42 pieces"], ["4 2", "42 or 43", "-42"]),
        ("number", "1,234.5", ["1234.5", "1,234.50 in all"], ["1", "1,234"]),
        ("number", -3, ["-3", "x = -3"], ["3", "no number"]),
        ("number", 0.1, ["0.1", "0.10"], ["0.11"]),
        ("contains", "dam", ["The DAM."], ["da m"]),
        ("contains", ["dam", "1932"], ["In 1932 the dam"], ["the dam"]),
        ("choice", Choices("B", ABC), ["B", "not A but b", "(B)."], ["A", "B, no: A", "AB", "Bee", ""]),
        ("choice", Choices("AB", ABC), ["ab"], ["a b"]),
        ("regex", r"^\d{4}$", ["1932"], ["19320", "x"]),
        ("puzzle", Puzzle((4, 6, 9, 1), 24), ["6 * (9 - 4 - 1) = 24", "6×[9−4−1]."],
         ["6 * 4", "6 * (9 - 4 - 1) = 25", "24", "6 * (9 - 4 - 1) * 1"]),
    ],
)  # fmt: skip
def test_right_and_wrong(compare: str, wanted: Any, right: list[str], wrong: list[str]) -> None:
    judge = judge_of(compare, wanted)
    assert [text for text in right if not judge(text)] == []
    assert [text for text in wrong if judge(text)] == []


@pytest.mark.parametrize(
    ("compare", "wanted", "words"),
    [
        ("guess", "x", "exact, number"), ("exact", " . ", "some text"), ("exact", 3, "some text"),
        ("number", "none", "a number"), ("number", True, "a number"), ("contains", [], "list"),
        ("contains", ["a", " "], "list"), ("choice", Choices("C", ("A", "B")), "choices"), ("choice", "A", "choices"),
        ("choice", Choices("a", ("a", "A")), "choices"), ("regex", "(", "regular expression"), ("regex", "", "regular"),
        ("puzzle", "24", "target"), ("puzzle", Puzzle((), 24), "target"),
    ],
)  # fmt: skip
def test_wishes_that_make_no_sense_are_refused(compare: str, wanted: Any, words: str) -> None:
    with pytest.raises(BadAnswer, match=words):
        judge_of(compare, wanted)


@pytest.mark.parametrize(
    "text", ["__import__('os')", "2**99999", "(" * 500, "1" * 5000, "4*6*True", "24/0", "=24", "6;4"]
)
def test_nothing_but_plain_arithmetic_solves_a_puzzle(text: str) -> None:
    assert not Puzzle((4, 6), 24).solved_by(text)


def test_puzzles_are_judged_as_in_training() -> None:
    rng = Random(4)
    for _ in range(200):
        numbers = tuple(rng.randint(1, 13) for _ in range(rng.choice((2, 3, 4))))
        solution = puzzle.solve(numbers, 24)
        for text in (solution or "24", f"{solution} = 24", "+".join(map(str, numbers))):
            assert Puzzle(numbers, 24).solved_by(text) == puzzle.check(text, numbers, 24), (numbers, text)
