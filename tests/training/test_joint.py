from __future__ import annotations

import re
from random import Random

import pytest

from training.conversation import Conversation, ModelReply, SpokenCall
from training.tasks import grounded, joint

pytestmark = pytest.mark.slow

LABELLED = re.compile(r"^\[(S\d+)\] (.*)$", re.MULTILINE)


def made(count: int = 150) -> list[Conversation]:
    rng = Random(31)
    return [joint.conversation(rng, "train", at / count) for at in range(count)]


def test_a_seed_gives_the_same_conversations() -> None:
    assert made(60) == made(60)


def test_every_quote_is_in_the_passage_of_its_label() -> None:
    quotes = 0
    for conversation in made():
        sources: dict[str, str] = {}
        for message in conversation.messages:
            if message.role in ("system", "tool"):
                sources.update(LABELLED.findall(message.content))
            elif message.role == "assistant" and (match := re.fullmatch(r"\[(S\d+)\] (.+\.)", message.content)):
                assert match[2] in sources[match[1]]
                quotes += 1
    assert quotes > 30


def test_a_sum_on_sources_uses_their_numbers_and_cites_them() -> None:
    rng = Random(32)
    for _ in range(200):
        one = joint.computed(rng, "train", rng.random())
        used = set(re.findall(r"\d+(?:\.\d+)?", one.sum.expression))
        cited = {number for at in one.needed() for number in re.findall(r"\d+(?:\.\d+)?", one.facts[at])}
        asked = set(re.findall(r"\d+(?:\.\d+)?", one.sum.question))
        assert one.needed() and used <= cited | asked, one
        assert one.sum.result() > 0


def test_a_search_asks_in_the_words_that_were_typed() -> None:
    rng = Random(33)
    for _ in range(60):
        conversation = joint._search(rng, "train", 0.7)
        asked, called = conversation.messages[:2]
        [query] = called.calls[0].arguments.values()
        assert query in asked.content


@pytest.mark.parametrize("kind", joint.kinds())
def test_a_case_accepts_what_is_wanted_and_nothing_else(kind: joint.Kind) -> None:
    rng = Random(34)
    for _ in range(40):
        case = joint.case(rng, kind)
        assert all(case.judge(case.wanted).values())
        *calls, said = case.wanted
        cited = () if kind == "thought" else (said.content + " [S9]", said.content[:-8])
        for wrong in ("", "I am not sure.", *cited):
            assert not all(case.judge((*calls, ModelReply("", wrong, ()))).values())
        assert not any(case.judge(()).values())
        if kind != "choose":
            assert not all(case.judge((said,)).values())
            unknown = ModelReply("", "", (SpokenCall("nothing", {"x": "1 + 1"}),))
            assert not all(case.judge((unknown, said)).values())


def test_a_search_for_something_else_finds_nothing() -> None:
    rng = Random(35)
    for _ in range(20):
        case = joint.case(rng, "search")
        [call] = case.wanted[0].calls
        assert case.answer_call is not None and "[S1]" in case.answer_call(call)
        other = SpokenCall(call.name, dict.fromkeys(call.arguments, "bananas"))
        assert case.answer_call(other) == "no results"
        assert case.answer_call(SpokenCall("x", {})).startswith("error")


def test_some_answers_are_that_the_sources_do_not_say() -> None:
    missing = sum(message.content == grounded.MISSING for one in made(300) for message in one.messages)
    assert missing > 10
