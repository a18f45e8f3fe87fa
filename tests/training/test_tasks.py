from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from training import mixture, phrases
from training.conversation import Phrasing
from training.tasks import arithmetic, beyond, counting, identity, memory, smalltalk
from training.tasks.working import result, work

pytestmark = pytest.mark.slow

# Those that ask in phrasings; some files beside them hold other lists.
FILES = sorted(p.stem for p in Path(phrases.__file__).parent.glob("*.toml") if "held_out = " in p.read_text("utf-8"))
PHRASINGS = ("train", "held_out")


def bare(phrase: str) -> str:
    """A phrase without case and punctuation, which `training.text.noise` may change."""
    return re.sub(r"[^\w{}+*×/÷−^-]+", " ", phrase).strip().lower()


@pytest.mark.parametrize("name", FILES)
def test_held_out_phrasings_are_not_trained_on(name: str) -> None:
    asked = [kind for key, kind in phrases.read(name).items() if key != "missing"]  # which the model says, not a person
    trained = {bare(phrase) for kind in asked for phrase in kind.train}
    trained -= {"{q}"}  # a question with nothing around it is no phrasing
    held_out = {bare(phrase) for kind in asked for phrase in kind.held_out}
    assert not trained & held_out


def test_a_kind_asks_in_the_phrasing_it_is_told_to() -> None:
    kind = phrases.read("smalltalk")["greeting"]
    rng = Random(0)
    assert {kind.ask(rng, "train") for _ in range(300)} <= set(kind.train)
    assert {kind.ask(rng, "held_out") for _ in range(300)} == set(kind.held_out)


@pytest.mark.parametrize("phrasing", PHRASINGS)
def test_a_seed_gives_the_same_conversations(phrasing: Phrasing) -> None:
    def made() -> list[object]:
        rng = Random(7)
        return [mixture.conversation(rng, 0.8, phrasing) for _ in range(300)]

    assert made() == made()


@pytest.mark.parametrize("operator", "+-×/")
def test_arithmetic_is_right(operator: str) -> None:
    rng = Random(1)
    for _ in range(500):
        made = arithmetic.sample(rng, "train", operator=operator)
        match = re.fullmatch(r"(\d+) (.) (\d+) = (-?\d+)(?: remainder (\d+))?\.", made.answer)
        assert match, made.answer
        a, b, value, rest = int(match[1]), int(match[3]), int(match[4]), int(match[5] or 0)
        if operator == "/":
            assert a == value * b + rest and rest < b
        else:
            assert value == {"+": a + b, "-": a - b, "×": a * b}[operator]


def test_a_division_leaves_what_it_says() -> None:
    for part, divisor, quotient, rest in re.findall(r"(\d+)/(\d+)=(\d+) left (\d+)", "\n".join(work(5937, "/", 12))):
        assert divmod(int(part), int(divisor)) == (int(quotient), int(rest))


@pytest.mark.parametrize("operator", "+-×/")
def test_every_equation_of_a_working_holds(operator: str) -> None:
    rng = Random(2)
    for _ in range(500):
        a, b = arithmetic.operands(rng, operator, 4)
        lines = work(a, operator, b)
        for left, right in re.findall(r"(?<![\d×+/-])([\d×+-]+\d)=(\d+)", "\n".join(lines[1:])):
            expression = re.sub(r"\b0+(?=\d)", "", left.replace("×", "*"))
            assert eval(expression) == int(right), (lines, left)
        digits = re.findall(r"-?\d+", lines[-1].rpartition("= ")[2] if "= " in lines[-1] else lines[-1])
        assert digits[-1].lstrip("0") == re.findall(r"-?\d+", result(a, operator, b))[-1].lstrip("0"), lines


def test_what_is_asked_is_what_is_answered() -> None:
    rng = Random(3)
    for _ in range(500):
        made = arithmetic.sample(rng, "train", operator="+")
        asked = [int(number) for number in re.findall(r"\d+", made.user)]
        if len(asked) == 2:
            assert sorted(asked) == sorted(int(number) for number in re.findall(r"\d+", made.answer)[:2])


def test_without_thinking_a_larger_sum_shows_its_working() -> None:
    easy = arithmetic.without_thinking(arithmetic.exchange("2+2", 2, "+", 2))
    larger = arithmetic.without_thinking(arithmetic.exchange("47+85", 47, "+", 85))
    assert easy.answer == "2 + 2 = 4."
    assert "ones: 7+5=12" in larger.answer and larger.answer.endswith("47 + 85 = 132.")


def test_a_fact_is_answered_as_it_was_typed() -> None:
    rng = Random(4)
    for _ in range(300):
        told, known = memory.tell(rng, "train", memory.fact(rng))
        asked = memory.ask(rng, "train", known)
        assert known.value in told.user and known.value in asked.answer


def test_counting_counts() -> None:
    rng = Random(5)
    counted = 0
    for _ in range(300):
        made = counting.sample(rng, "train")
        asked = [int(number) for number in re.findall(r"\d+", made.user)]
        if made.answer[0].isdigit() and asked:
            numbers = [int(number) for number in made.answer.split(", ")]
            step = 1 if numbers[-1] > numbers[0] else -1
            if numbers[1] - numbers[0] in (1, -1):
                assert numbers == list(range(numbers[0], numbers[-1] + step, step))
                assert set(asked) <= {1, numbers[0], numbers[-1]}
                counted += 1
    assert counted > 100


@pytest.mark.parametrize("phrasing", PHRASINGS)
@pytest.mark.parametrize("task", [smalltalk, identity, beyond, counting])
def test_an_answer_is_right_by_its_own_measure(task: object, phrasing: str) -> None:
    rng = Random(6)
    for _ in range(300):
        made = task.sample(rng, phrasing)  # type: ignore[attr-defined]  # modules with one signature
        assert re.search(made.right, made.answer, re.IGNORECASE | re.DOTALL), made
        assert "{" not in made.user.replace("{ return 0; }", "")


def test_a_system_prompt_names_the_model() -> None:
    rng = Random(8)
    system = identity.naming_system(rng, "train", "Zorro")
    assert "Zorro" in system and "Zorro" in identity.sample(rng, "train", "who", "Zorro").answer
