from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations
from random import Random

import pytest

from training import phrases, puzzle
from training.conversation import Conversation, ModelReply
from training.tasks import countdown
from training.tasks.countdown_trace import GIVEN_UP, trace

pytestmark = pytest.mark.slow

GAMES: tuple[countdown.Game, ...] = ("countdown3", "countdown4", "game24")


def reachable(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """All values of all expressions: first number by last, every order and split. Slow, and not the solver's way."""
    if len(numbers) == 1:
        return {numbers[0]}
    found: set[Fraction] = set()
    for order in set(permutations(numbers)):
        for cut in range(1, len(order)):
            for a in reachable(order[:cut]) if cut == 1 else ordered(order[:cut]):
                for b in ordered(order[cut:]):
                    found |= {a + b, a - b, a * b} | ({a / b} if b else set())
    return found


def ordered(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    if len(numbers) == 1:
        return {numbers[0]}
    found: set[Fraction] = set()
    for cut in range(1, len(numbers)):
        for a in ordered(numbers[:cut]):
            for b in ordered(numbers[cut:]):
                found |= {a + b, a - b, a * b} | ({a / b} if b else set())
    return found


def can_make(numbers: tuple[int, ...], target: int) -> bool:
    return target in reachable(tuple(map(Fraction, numbers)))


def is_kept(numbers: tuple[int, ...], target: int) -> bool:
    """The rule as it is agreed on, written once more."""
    text = ",".join(str(number) for number in sorted(numbers))
    names = [f"{text}={target}"] + ([text] if target == 24 else [])
    return len(numbers) >= 3 and any(
        hashlib.sha256(name.encode()).hexdigest().endswith(("0", "1", "2")) for name in names
    )


def integers(text: str) -> list[int]:
    return sorted(int(number) for number in re.findall(r"\d+", text))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], int]]:
    """Returns every question's subject, in order: its kind, the numbers and the target."""
    seen: list[tuple[str, tuple[int, ...], int]] = []
    for kind in ("ask", "ask_steps", "ask_value"):
        original = getattr(countdown, kind)

        def spy(rng: Random, phrasing: str, numbers: tuple[int, ...], target: int, kind=kind, original=original) -> str:  # type: ignore[no-untyped-def]
            text = original(rng, phrasing, numbers, target)
            assert integers(text) == sorted((*numbers, target)), text
            seen.append((kind, numbers, target))
            return str(text)

        monkeypatch.setattr(countdown, kind, spy)
    return seen


def made(count: int, phrasing: str = "train") -> Iterator[Conversation]:
    rng = Random(11)
    for at in range(count):
        yield countdown.conversation(rng, phrasing, at / count)  # type: ignore[arg-type]


def test_a_seed_gives_the_same_conversations() -> None:
    assert list(made(80)) == list(made(80))


def test_every_trained_puzzle_is_allowed_and_every_answer_true(asked: list[tuple[str, tuple[int, ...], int]]) -> None:
    kinds: Counter[str] = Counter()
    for conversation in made(400):
        answers = [message for message in conversation.messages if message.role == "assistant"]
        for message, (kind, numbers, target) in zip(answers, asked[-len(answers) :], strict=True):
            kinds[kind] += 1
            assert not is_kept(numbers, target)
            if kind == "ask_value":
                assert message.content == puzzle.value(numbers, target)
            elif kind == "ask_steps":
                lines = message.content.split("\n")
                assert len(lines) <= countdown.PROPOSALS and len(lines) == len(set(lines))
                assert all(puzzle.read_step(line, numbers) for line in lines)
            elif message.content == GIVEN_UP:
                assert puzzle.solve(numbers, target) is None
            else:
                assert puzzle.check(message.content, numbers, target)
            if message.thinking:
                assert message.thinking.startswith(f"{' '.join(map(str, numbers))} to {target}\n")
                legal, total = puzzle.count_legal(message.thinking, numbers)
                assert legal == total > 0
    assert min(kinds.values()) > 40 and len(kinds) == 3


def test_an_equation_in_a_thought_is_true_by_plain_evaluation() -> None:
    rng = Random(5)
    for _ in range(200):
        numbers, target = countdown.solvable(rng, 4)
        thought = trace(rng, numbers, target, 1.0).thinking
        for line in thought.split("\n")[1:]:
            sides = re.sub(r"( yes| no|\. Wait, not \d+\.)$", "", line.removeprefix("Wait, ")).split("=")
            assert len({eval(side.split(" ")[0]) for side in sides}) == 1, line
            if line.endswith((" no", " yes")):
                assert len(sides[-1].split(" ")) == 2


def test_a_rejected_step_is_a_real_failure() -> None:
    rng = Random(6)
    waits = 0
    for _ in range(150):
        numbers, target = countdown.solvable(rng, 4)
        lines = trace(rng, numbers, target, 1.0).thinking.split("\n")
        firsts = [re.fullmatch(r"(?:Wait, )?\d+.\d+=(\d+ \d+ \d+)", line) for line in lines]
        states = [tuple(map(int, first[1].split())) for first in firsts if first]
        assert len(states) == len(set(states))
        assert [puzzle.routes(state, target) > 0 for state in states] == [False] * (len(states) - 1) + [True]
        waits += len(states) - 1
        for line in lines:
            if line.endswith(" no"):
                left = tuple(map(int, line.partition("=")[2].split()[:2]))
                assert not can_make(left, target)
    assert waits > 75


def test_a_value_agrees_with_a_search_of_another_kind() -> None:
    rng = Random(8)
    for count in (2, 3, 3, 3, 4):
        for _ in range(6 if count < 4 else 1):
            numbers, target = countdown.draw(rng, count)
            assert (puzzle.value(numbers, target) != "impossible") == can_make(numbers, target)
    assert puzzle.value((3, 3, 8, 8), 24) == "likely" and puzzle.routes((3, 3, 8, 8), 24) == 0
    assert puzzle.value((4, 6), 24) == "sure" and puzzle.value((4, 7), 24) == "impossible"


def test_the_values_are_balanced() -> None:
    rng = Random(9)
    labels: Counter[str] = Counter()
    while labels.total() < 300:
        conversation = countdown._judged(rng, "train", 1.0)
        labels.update(message.content for message in conversation.messages if message.role == "assistant")
    assert all(0.25 < labels[value] / labels.total() < 0.4 for value in countdown.VALUES)


@pytest.mark.parametrize("game", GAMES)
def test_an_evaluated_puzzle_is_kept_and_solvable(game: countdown.Game) -> None:
    rng = Random(10)
    for _ in range(25):
        numbers, target, solution = countdown.kept(rng, game)
        assert is_kept(numbers, target) and puzzle.check(solution, numbers, target)
        assert len(numbers) == (3 if game == "countdown3" else 4) and (game != "game24" or target == 24)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("game", GAMES)
def test_a_judge_knows_right_from_wrong(game: countdown.Game, thinking: bool) -> None:
    rng = Random(12)
    for _ in range(10):
        case = countdown.case(rng, game, thinking=thinking)
        (wanted,) = case.wanted
        assert all(case.judge([wanted]).values())
        assert case.prompt.enable_thinking == thinking
        assert not any(x is True for said in ([], [ModelReply("", "", ())]) for x in case.judge(said).values())
        wrong = ModelReply(wanted.thinking.replace("=", "=1"), wanted.content.replace("=", "+ 1 ="), ())
        assert not any(x is True for x in case.judge([wrong]).values())
        cut_off = ModelReply(wanted.thinking, wanted.content, (), broken=True)
        assert not any(x is True for x in case.judge([cut_off]).values())


def test_the_short_judges_know_right_from_wrong() -> None:
    rng = Random(13)
    for canonical in (True, False):
        case = countdown.propose_case(rng, canonical=canonical)
        lines = case.wanted[0].content
        assert all(case.judge(case.wanted).values())
        assert not case.judge([ModelReply("", f"{lines}\n{lines}", ())])["all proposals legal"]
        assert not any(case.judge([ModelReply("", "1+1=3", ())]).values()) and not any(case.judge([]).values())
        for label in countdown.VALUES:
            case = countdown.value_case(rng, label, canonical=canonical)
            assert all(case.judge(case.wanted).values())
            others = [other for other in ("", "maybe", "sure likely impossible", *countdown.VALUES) if other != label]
            assert not any(case.judge([ModelReply("", other, ())])["right label"] for other in others)


def test_held_out_questions_are_worded_as_no_trained_one() -> None:
    assert not set(countdown._LISTS["train"]) & set(countdown._LISTS["held_out"])
    rng = Random(14)
    canonical = puzzle.value_prompt((1, 2), 3), puzzle.propose_prompt((1, 2), 3)
    for kind in phrases.read("countdown").values():
        assert not set(kind.train) & set(kind.held_out)
    for ask in (countdown.ask_steps, countdown.ask_value):
        assert not {ask(rng, "held_out", (1, 2), 3) for _ in range(100)} & set(canonical)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("(9 - 7) * (5 + 7) = 24", True),
        ("(9-7)*(5+7)", True),
        ("(9 − 7) × (5 + 7) = 24.", True),
        ("(9 - 7) * (5 + 7) = 25", False),
        ("(9 - 7) * 12", False),
        ("(9 - 7) * (5 + 7) + 7 - 7", False),
        ("24", False),
        ("", False),
        ("9 - 7 * (5 + 7", False),
        ("__import__('os')", False),
        ("9 ** 7", False),
        ("5 / (7 - 7) + 9", False),
    ],
)
def test_an_answer_is_checked_exactly(answer: str, right: bool) -> None:
    assert puzzle.check(answer, (5, 7, 7, 9), 24) == right


def test_fractions_count() -> None:
    assert puzzle.check("8 / (3 - 8 / 3) = 24", (3, 3, 8, 8), 24)
    solution = puzzle.solve((1, 5, 5, 5), 24)
    assert solution is not None and puzzle.check(solution, (1, 5, 5, 5), 24)
    assert puzzle.solve((1, 1, 1, 1), 24) is None


def test_each_kind_of_illegal_step_is_counted() -> None:
    good = "3 5 7 9 to 24\n3*5=15 7 9\n15+7=22 9 no\nWait, 9-7=2 3 5"
    assert puzzle.count_legal(good, (3, 5, 7, 9)) == (3, 3)
    for line in ("3*5=16 7 9", "3*5=15 7", "3*6=18 7 9", "3*5=15 7 8", "3*5=15 3 7 9", "3-5=2 7 9", "hm"):
        assert puzzle.count_legal(f"3 5 7 9 to 24\n{line}", (3, 5, 7, 9)) == (0, 1)
    assert puzzle.count_legal("", (3, 5, 7, 9)) == (0, 0)
    assert puzzle.count_legal("4 6 to 24\n4*6=24=(4*6)", (4, 6)) == (1, 1)
    assert puzzle.count_legal("4 6 to 24\n4*6=24=(4+6)", (4, 6)) == (0, 1)
