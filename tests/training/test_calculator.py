from __future__ import annotations

import re
from fractions import Fraction
from random import Random

import pytest

from training import phrases, sums
from training.conversation import Conversation, ModelReply, SpokenCall
from training.tasks import calculator
from training.tasks.calculator import ANSWERED, CALLED
from training.text import arithmetic_expression, stories, words

pytestmark = pytest.mark.slow

SUM_KINDS = ("bare", "percent", "named", "problem")


def made(phrasing: str = "train", count: int = 150) -> list[Conversation]:
    rng = Random(11)
    return [calculator.conversation(rng, phrasing, at / count) for at in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 * 8 - 5", "91"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.3333333333"),
        ("-(2 - 5) ** 2", "-9"),
        ("2 ** -2", "0.25"),
        ("123456789012345678901 + 1", "123456789012345678902"),
    ],
)
def test_an_expression_is_evaluated_exactly(text: str, value: str) -> None:
    assert arithmetic_expression.answer(text) == value


@pytest.mark.parametrize("text", ["12 *", "", "abs(3)", "1 if 2 else 3", "1e9", "9 ** 99", "2 // 3", "1" * 300, "'a'"])
def test_what_is_no_arithmetic_is_an_error(text: str) -> None:
    with pytest.raises(arithmetic_expression.ExpressionError, match="cannot read"):
        arithmetic_expression.value(text)


def test_a_division_by_zero_is_named() -> None:
    assert arithmetic_expression.answer("5 / (2 - 2)") == "error: division by zero"


def test_numbers_are_read_as_people_write_them() -> None:
    assert arithmetic_expression.numbers("It costs $1,234.50, not -7.") == [Fraction("1234.5"), Fraction(-7)]
    assert arithmetic_expression.numbers("8-5 [S2]") == [8, 5]


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("12 * 8 - 5 = 91.", True),
        ("91 pens are left.", True),
        ("Of 12 boxes, 91 pens are left.", True),
        ("12 * 8 - 5 = 92.", False),
        ("91 or 92 pens.", False),
        ("", False),
        ("Many.", False),
    ],
)
def test_a_final_sentence_is_right_by_its_number(said: str, right: bool) -> None:
    assert arithmetic_expression.states(said, Fraction(91), "12 boxes with 8 pens, minus 5") is right


def test_a_seed_gives_the_same_conversations() -> None:
    assert made() == made()


def test_every_tool_message_and_answer_holds() -> None:
    for conversation in made():
        for at, message in enumerate(conversation.messages):
            if message.calls:
                [call] = message.calls
                [text] = call.arguments.values()
                told, said = conversation.messages[at + 1 : at + 3]
                if "/ 0" in text:
                    assert told.content.startswith("error") and said.content == calculator.NO_RESULT
                    continue
                # Floats and the interpreter's own grammar: an oracle that we did not write.
                result = eval(text)
                assert float(re.findall(r"-?[\d.]+", told.content)[-1].rstrip(".")) == pytest.approx(result)
                assert told.content.endswith(arithmetic_expression.answer(text)) or '"result"' in told.content
                if said.calls:  # the next of two in a row goes on from this result
                    assert next(iter(said.calls[0].arguments.values())).startswith(told.content)
                    continue
                assert float(arithmetic_expression.numbers(said.content)[-1]) == pytest.approx(result)


# What a half, a dozen, a percentage, a week or an hour brings into a sum beside the numbers of the question.
CONSTANTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 20, 24, 52, 60, 100, 366, 1000, 3600)  # also of insects and fortnights


@pytest.mark.parametrize("kind", SUM_KINDS)
def test_the_expression_has_the_numbers_of_the_question(kind: str) -> None:
    rng = Random(12)
    spelled = {word: str(at) for at, word in enumerate(sums._SPELLED)}
    for _ in range(300):
        one = sums.sample(rng, "train", 1.0, kind)
        text = re.sub(r"[a-z]+", lambda match: spelled.get(match.group(), match.group()), one.question.lower())
        asked = {Fraction(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}
        used = {Fraction(number) for number in re.findall(r"\d+(?:\.\d+)?", one.expression)}
        assert used - asked <= {Fraction(n) for n in CONSTANTS}, one


def test_a_word_problem_has_a_whole_answer_above_one() -> None:
    rng = Random(13)
    for _ in range(300):
        one = sums.sample(rng, "train", rng.random(), "problem")
        assert one.result() > 1
        if "." not in one.expression and "/ 100" not in one.expression:
            assert one.result().denominator == 1, one


def test_thinking_comes_after_the_last_question_alone() -> None:
    for conversation in made():
        last = max(at for at, message in enumerate(conversation.messages) if message.role == "user")
        assert not any(message.thinking for message in conversation.messages[:last])
        assert conversation.enable_thinking or not any(message.thinking for message in conversation.messages)


def test_half_of_the_conversations_have_one_question() -> None:
    single = sum(sum(message.role == "user" for message in one.messages) == 1 for one in made(count=400))
    assert 0.4 < single / 400 < 0.6


def test_held_out_tools_names_and_things_are_not_trained_on() -> None:
    kind = phrases.read("calculator")
    assert not set(words.NAMES) & set(words.HELD_OUT_NAMES)
    assert not set(words.THINGS) & set(words.HELD_OUT_THINGS)
    for table in ("tool", "other"):
        assert not {line.split(" | ")[0] for line in kind[table].train if table == "other"} & {
            line.split(" | ")[0] for line in kind[table].held_out
        }


def test_there_are_enough_word_problems() -> None:
    problems = phrases.read("word_problems")["problem"]
    assert len(problems.train) >= 40 and len(problems.held_out) >= 12
    assert all(len(line.split(" | ")) == 4 for line in (*problems.train, *problems.held_out))


def test_word_problems_are_put_together_whole() -> None:
    rng, told = Random(6), set[str]()
    for _ in range(800):
        template = stories.template(rng)
        question, expression, thought, answer = template.split(" | ")
        blanks = set(re.findall(r"\{(\w)\}", expression))
        assert blanks <= set(re.findall(r"\{(\w)\}", question)), template  # nothing is counted that is not told
        assert blanks <= set(re.findall(r"\{(\w)\}", thought)) and "{r}" in answer, template
        assert not re.search(r"[\[\]]|\b[SU]\b|  |\{(?!\w\})", template), template
        told.add(question)
    assert len(told) > 600


def test_no_held_out_word_problem_can_be_put_together() -> None:
    """Their words may occur, as everyday words do, but not most of the runs of five of a sentence."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.sub(r"\{\w\}", "#", text.lower()).replace("?", "").replace(".", "").replace(",", "").split()
        return {run for run in zip(*(words[at:] for at in range(5)), strict=False) if run.count("#") < 3}

    held_out = [runs(line.split(" | ")[0]) for line in phrases.read("word_problems")["problem"].held_out]
    rng = Random(7)
    made = set[tuple[str, ...]]().union(*(runs(stories.template(rng).split(" | ")[0]) for _ in range(4000)))
    shared = [len(each & made) / max(1, len(each)) for each in held_out]
    assert max(shared) < 0.5, shared


@pytest.mark.parametrize("kind", SUM_KINDS)
def test_a_case_accepts_what_is_wanted_and_nothing_else(kind: str) -> None:
    rng = Random(14)
    for _ in range(60):
        case = calculator.case(rng, kind)
        called, said = case.wanted
        [call] = called.calls
        assert all(case.judge(case.wanted).values()), case
        assert case.answer_call is not None and not case.answer_call(call).startswith("error")
        wrong = SpokenCall(call.name, {name: f"{text} + 1" for name, text in call.arguments.items()})
        renamed = SpokenCall(call.name + "s", call.arguments)
        number = arithmetic_expression.written(arithmetic_expression.numbers(said.content)[-1])
        assert not case.judge((ModelReply("", "", (wrong,)), said))[CALLED]
        assert not case.judge((ModelReply("", "", (renamed,)), said))[CALLED]
        assert not case.judge(
            (ModelReply("", "", (SpokenCall(call.name, dict.fromkeys(call.arguments, number)),)), said)
        )[CALLED]
        assert not case.judge((called, ModelReply("", "I do not know.", ())))[ANSWERED]
        assert not case.judge((called, ModelReply("", said.content.replace(number, f"{number}1"), ())))[ANSWERED]
        assert not any(case.judge((ModelReply("", "", ()),)).values()) and not any(case.judge(()).values())


def test_a_wrong_call_is_answered_with_an_error() -> None:
    calc = calculator.CANONICAL
    assert calc.answer(SpokenCall("calculator", {"expr": "1 + 1"})).startswith("error")
    assert calc.answer(calc.call("12 *")) == 'error: cannot read "12 *"'
