from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.known_answers import SHARED, shared
from training.abilities import ABILITIES, AUROC, Ability, xquad
from training.conversation import ModelReply
from training.evaluate import EvaluationResult, auroc, judged, table, wilson

pytestmark = pytest.mark.slow


def right(outcome: bool | tuple[int, int]) -> bool:
    return outcome if isinstance(outcome, bool) else 0 < outcome[0] == outcome[1]


NAMES = [ability.name for ability in ABILITIES]


@pytest.mark.parametrize(
    ("right", "n", "low", "high"), [(0, 10, 0.0, 0.278), (5, 10, 0.237, 0.763), (10, 10, 0.722, 1.0)]
)
def test_wilson_intervals_match_the_published_ones(right: int, n: int, low: float, high: float) -> None:
    assert wilson(right, n) == pytest.approx((low, high), abs=1e-3)


def test_the_area_under_a_curve_counts_pairs_in_order() -> None:
    area, low, high = auroc([3.0, 2.0, 1.0, 1.0], [1.0, 0.0])
    assert area == pytest.approx(7 / 8)
    assert low < area < high <= 1
    assert auroc([1.0], [0.0])[0] == 1.0


@pytest.mark.parametrize("ability", ABILITIES, ids=NAMES)
def test_the_wanted_replies_are_right_and_an_empty_one_is_not(ability: Ability) -> None:
    for case in ability.cases(Random(0), 20):
        assert all(right(x) for x in judged(case, case.wanted).values())
        assert not all(right(x) for x in judged(case, [ModelReply("", "", ())]).values())


@pytest.mark.parametrize("ability", ABILITIES, ids=NAMES)
def test_a_broken_reply_is_never_right(ability: Ability) -> None:
    case = ability.cases(Random(1), 1)[0]
    *before, last = case.wanted
    cut_off = ModelReply(last.thinking, last.content, last.calls, broken=True)
    assert not any(x is True for x in judged(case, [*before, cut_off]).values())


def test_goals_name_what_is_measured() -> None:
    for ability in ABILITIES:
        measured = {name for case in ability.cases(Random(2), 20) for name in judged(case, case.wanted)}
        assert set(ability.goals) <= measured | ({AUROC} if ability.ranked else set()), ability.name


def test_questions_of_people_are_asked_where_they_are_at_hand(tmp_path: Path) -> None:
    assert xquad(tmp_path) == ()
    shared("retrieval/xquad_en_dev.json")
    (asked,) = xquad(SHARED)
    for case in asked.cases(Random(3), 20):
        assert set(judged(case, case.wanted).values()) == {True}


def test_the_table_gives_shares_with_their_intervals_and_goals() -> None:
    row = EvaluationResult("counts", "right", 10, 5, *wilson(5, 10), goal=0.9)
    assert "| counts | right | 10 | 50.0% | 23.7% – 76.3% | 90% |" in table([row])
