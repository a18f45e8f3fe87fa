"""Tests what the benchmark of reasoning stands on: its problem's steps are legal, and its oracle tells right from
wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from bench.reasoning.asked import expected, questions, row
from bench.reasoning.cascading import CascadeAnswer, frontier, parameters
from bench.reasoning.puzzle_problem import Left, PuzzleProblem, leads_to, random_search
from bench.reasoning.sampling import CHECKED, CONFIDENT, VOTED, Sample, at_tokens, curves
from bench.reasoning.tree_http import on_forks, over_http, served
from bench.reasoning.trees import WAYS, options
from engine import Tokenizer
from reasoning.tree import Asking, Reply
from training import puzzle

PEBBLE = Path(__file__).resolve().parents[2] / "models/pebble"


@pytest.fixture(scope="module")
def asking() -> Asking:
    return Asking(Tokenizer.load(PEBBLE), variables={"enable_thinking": False})


def test_only_legal_steps_are_read(asking: Asking) -> None:
    task = PuzzleProblem((4, 6, 9), 24, asking)
    text = "4*6=24 9\n9-6=3 4\n4*6=25 9\n4*5=20 9\nhello\n6+4=10"
    thoughts = task.read(task.start, Reply(text, (), True))
    assert [thought.text for thought in thoughts] == ["4*6=24 9", "9-6=3 4"]
    assert Left.of((9, 24)) == thoughts[0].state and not task.done(thoughts[0].state)
    assert [task.check(Left.of((24,))), task.check(Left.of((23,))), task.check(task.start)] == [1.0, 0.0, None]


def test_a_branch_and_a_prompt_make_the_prompt_of_a_chat(asking: Asking) -> None:
    task = PuzzleProblem((4, 6, 9, 13), 24, asking)

    def whole(question: str) -> list[int]:
        return asking.format.apply_chat_template([{"role": "user", "content": question}], enable_thinking=False)

    def walk(state: Left, branch: list[int]) -> None:
        asked = {puzzle.propose_prompt: task.propose_prompt, puzzle.value_prompt: task.value_prompt}
        for said, prompt in asked.items():
            assert [*branch, *prompt(state)] == whole(said(state.numbers, 24))
        for thought in task.read(state, Reply("\n".join(map(str, puzzle.steps(state.numbers)[:3])), (), True)):
            assert (thought.afresh and len(thought.kept) > 5) or task.done(thought.state)
            if not task.done(thought.state):
                walk(thought.state, [*task.head, *thought.kept])

    assert len(task.head) > 1
    walk(task.start, task.head)


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
    asked, choosing = questions("game24", 60), questions("game24", 60, choosing=True)
    keys = [tuple(sorted(each.numbers)) for each in (*asked, *choosing)]
    assert len(set(keys)) == 120
    assert all(puzzle.excluded(each.numbers, each.target) for each in asked)
    for each in asked:
        solution = puzzle.solve(each.numbers, 24)
        assert solution is not None and each.right(f"{solution} = 24") and not each.right("1 + 1 = 24")
    assert len({each.case.prompt for each in questions("arithmetic", 60)}) == 60
    with pytest.raises(ValueError, match="accepted"):
        questions("game24", 1000)


def test_curves_take_the_first_samples_of_each() -> None:
    one = [Sample(False, 10, 0.1, "a"), Sample(True, 20, 0.9, "b"), Sample(True, 30, 0.5, "b")]
    one += [Sample(False, 1, 0.0, None)] * 5
    rows = {each.name: each for each in curves("k", [one])}
    assert [rows[f"k/{CHECKED}/n={n}"].share for n in (1, 2, 8)] == [0, 1, 1]
    assert [rows[f"k/{CONFIDENT}/n={n}"].share for n in (1, 2)] == [0, 1]
    assert [rows[f"k/{VOTED}/n={n}"].share for n in (1, 2, 4)] == [0, 0, 1]
    assert rows[f"k/{VOTED}/n={4}"].tokens == 61


def test_a_curve_at_given_tokens_is_between_its_points() -> None:
    curve = [expected("two", 100, 0.6, 200.0), expected("one", 100, 0.4, 100.0)]
    found = at_tokens(curve, 125.0, "between")
    assert found is not None and found.share == pytest.approx(0.45) and (found.tokens, found.n) == (125.0, 100)
    assert found.low < 0.45 < found.high
    assert at_tokens(curve, 250.0, "beyond") is at_tokens(curve, 50.0, "before") is at_tokens([], 1.0, "none") is None
    first = at_tokens(curve, 95.0, "near")
    assert first is not None and (first.share, first.tokens) == (0.4, 100.0)


def test_a_cascades_frontier_goes_from_the_small_model_to_the_large_one() -> None:
    sure, unsure = CascadeAnswer(True, 10, 0.9, 0.1, True), CascadeAnswer(False, 10, 0.2, 2.0, False)
    small, large = [sure, unsure] * 24, [CascadeAnswer(True, 20, 0.9, 0.1, True)] * 48
    rows = {each.name: each for each in frontier(small, large, 5.0)}
    for gate in ("confidence", "entropy", "check, else confidence"):
        none, half, every = (rows[f"cascade/{gate}/{share} escalated"] for share in ("0%", "50%", "100%"))
        assert (none.share, half.share, every.share) == (0.5, 1.0, 1.0)  # those that are unsure go first
        costs = [(each.more or {})["cost"] for each in (none, half, every)]
        assert costs == [pytest.approx(0.1), pytest.approx(0.6), pytest.approx(1.1)]
    assert rows["cascade/large alone"].tokens == 20
    cut = CascadeAnswer(False, 10, 0.99, 0.0, None, whole=False)
    half = {each.name: each for each in frontier([sure, cut] * 24, large, 5.0)}["cascade/confidence/50% escalated"]
    assert half.share == 1.0  # however sure the model was: it came to no end


def test_a_models_parameters_are_those_of_its_file() -> None:
    assert 2 * parameters(PEBBLE) == pytest.approx((PEBBLE / "model.safetensors").stat().st_size, rel=0.01)


def test_every_way_of_searching_is_one_and_follows_five_states() -> None:
    assert all(options(way).beam == 5 for way in WAYS)
    assert row("r", [True, False], [1, 3]).tokens == 2


async def test_the_tree_over_http_is_the_tree_on_forks_and_forks_compute_the_least() -> None:
    async with served(prefix_cache=False) as (engine, client):
        forks = await on_forks(engine, (3, 5, 7), 22)
        http = await over_http(engine, client, (3, 5, 7), 22, at_once=True)
    assert forks.same(http) and len(forks.values) > 5
    assert forks.computed <= 1.1 * forks.least() < http.computed
    other = replace(http, values={**http.values, next(iter(http.values)): 0.123})
    assert not forks.same(other)
