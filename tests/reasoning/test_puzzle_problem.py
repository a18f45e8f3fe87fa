"""What the benchmark of reasoning stands on: its problem's steps are legal, and its oracle tells right from wrong."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from bench.puzzle_problem import Left, Puzzle, leads_to, random_search
from bench.reasoning import curves, questions
from engine import Tokenizer
from reasoning.tree import Asking, Reply
from training import puzzle

PEBBLE = Path(__file__).resolve().parents[2] / "models/pebble"


@pytest.fixture(scope="module")
def asking() -> Asking:
    return Asking(Tokenizer.load(PEBBLE), variables={"enable_thinking": False})


def test_only_legal_steps_are_read(asking: Asking) -> None:
    task = Puzzle((4, 6, 9), 24, asking)
    text = "4*6=24 9\n9-6=3 4\n4*6=25 9\n4*5=20 9\nhello\n6+4=10"
    thoughts = task.read(task.start, Reply(text, (), True))
    assert [thought.text for thought in thoughts] == ["4*6=24 9", "9-6=3 4"]
    assert Left.of((9, 24)) == thoughts[0].state and not task.done(thoughts[0].state)
    assert [task.check(Left.of((24,))), task.check(Left.of((23,))), task.check(task.start)] == [1.0, 0.0, None]


def test_head_and_question_make_the_prompt_of_a_chat(asking: Asking) -> None:
    question = puzzle.propose_prompt((4, 6, 9), 24)
    whole = asking.format.apply_chat_template([{"role": "user", "content": question}], enable_thinking=False)
    assert [*asking.head(), *asking.question(question)] == whole and asking.head()


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("4*6=24 9 1\n9-1=8 24\n24-8=16", False), ("9-1=8 4 6\n8*6=48 4\n48/4=12", False), ("", False),
        ("4*6=24 9 1\n24*1=24 9", False), ("9-1=8 4 6\n6/4=1 8\n1+8=9", False),
    ],
)  # fmt: skip
def test_the_oracle_refuses_what_is_wrong(answer: str, right: bool) -> None:
    assert leads_to(answer, (4, 6, 9, 1), 24) is right


def test_the_oracle_takes_every_solution_by_steps() -> None:
    found = 0

    def walk(state: tuple[int, ...], lines: list[str]) -> None:
        nonlocal found
        if len(state) == 1:
            assert leads_to("\n".join(lines), (3, 5, 7), 22) is (state == (22,))
            found += state == (22,)
        for step in puzzle.steps(state):
            walk(step.state, [*lines, str(step)])

    walk((3, 5, 7), [])
    assert found == puzzle.routes((3, 5, 7), 22) > 0


def test_random_search_finds_more_with_more_states() -> None:
    rng = Random(1)
    hits = [sum(random_search((1, 4, 8, 8), 24, states, rng) for _ in range(200)) for states in (3, 60)]
    assert hits[1] > 0 and hits[0] < hits[1]
    assert not random_search((1, 1, 1, 1), 24, 50, rng)


def test_questions_are_different_and_kept_from_training() -> None:
    asked = questions("game24", 60)
    assert len({tuple(sorted(each.numbers)) for each in asked}) == 60
    assert all(puzzle.excluded(each.numbers, each.target) for each in asked)
    for each in asked:
        solution = puzzle.solve(each.numbers, 24)
        assert solution is not None and each.right(f"{solution} = 24") and not each.right("1 + 1 = 24")


def test_curves_take_the_first_samples_of_each() -> None:
    one = [(False, 10, 0.1, "a"), (True, 20, 0.9, "b"), (True, 30, 0.5, "b")] + [(False, 1, 0.0, None)] * 13
    rows = {each.name: each for each in curves("k", [one])}
    assert [rows[f"k/best of n by the checker/n={n}"].right for n in (1, 2, 16)] == [0, 1, 1]
    assert [rows[f"k/best of n by confidence/n={n}"].right for n in (1, 2)] == [0, 1]
    assert [rows[f"k/self-consistency/n={n}"].right for n in (1, 2, 4)] == [0, 0, 1]
    assert rows["k/self-consistency/n=4"].tokens == 61
