from __future__ import annotations

import re
from random import Random

import pytest

from training import phrases
from training.conversation import Conversation, ModelReply
from training.tasks import chat, identity, memory
from training.text import words

pytestmark = pytest.mark.slow


def made(count: int = 300) -> list[Conversation]:
    rng = Random(21)
    return [chat.conversation(rng, "train", at / count) for at in range(count)]


def test_a_seed_gives_the_same_chats() -> None:
    assert made() == made()


def test_every_answer_is_learned_but_those_of_sums() -> None:
    for conversation in made():
        for message in conversation.messages:
            assert not message.thinking and not message.calls
            if message.role == "assistant" and not message.learned:
                assert re.search(r"= -?\d+", message.content)
        assert conversation.messages[-1].learned


def test_a_chat_is_one_question_or_up_to_six() -> None:
    turns = [sum(message.role == "user" for message in one.messages) for one in made()]
    assert 0.3 < turns.count(1) / len(turns) < 0.6 and 4 <= max(turns) <= 7


def test_a_chat_with_tools_or_sources_needs_neither() -> None:
    rng = Random(22)
    around = [one for one in (chat.conversation(rng, "train", 0.9) for _ in range(1500)) if one.tools]
    assert 0.02 < len(around) / 1500 < 0.1
    declined = "|".join(kind.right for kind in phrases.read("beyond").values())
    for one in around:
        assert not any(re.search(declined, message.content) for message in one.messages)


@pytest.mark.parametrize("phrasing", ["train", "held_out"])
def test_a_fact_is_remembered_as_last_told(phrasing: str) -> None:
    rng = Random(23)
    for _ in range(300):
        known = memory.fact(rng, phrasing=phrasing)  # type: ignore[arg-type]
        told, known = memory.tell(rng, phrasing, known)  # type: ignore[arg-type]
        assert known.value in told.user and known.value in told.answer
        for change in (memory.correct, memory.tell_again):
            corrected, latest = change(rng, phrasing, known)  # type: ignore[arg-type]
            assert latest.value in corrected.user and latest.value.lower() != known.value.lower()
            asked = memory.ask(rng, phrasing, latest)  # type: ignore[arg-type]
            assert re.search(asked.right, asked.answer) and latest.value in asked.answer


def test_a_name_told_along_is_a_fact() -> None:
    rng = Random(24)
    named = 0
    for _ in range(400):
        told, known = memory.tell(rng, "train", memory.fact(rng, "lives"))
        if also := known.also():
            assert also.value in told.user
            named += 1
    assert named > 50


def test_what_was_not_told_is_not_in_the_chat() -> None:
    rng = Random(25)
    for _ in range(200):
        conversation = chat.conversation(rng, "train", 0.9)
        for at, message in enumerate(conversation.messages):
            if message.content == memory.UNKNOWN:
                asked = conversation.messages[at - 1].content.lower()
                facts = [m.content.lower() for m in conversation.messages[:at] if m.content.startswith("Good to know")]
                things = [word for word in (*words.POSSESSIONS, *words.APPOINTMENTS) if word in asked]
                assert not any(f"your {thing} " in fact for thing in things for fact in facts)


def test_held_out_things_are_not_trained_on() -> None:
    pairs = (
        (words.POSSESSIONS, words.HELD_OUT_POSSESSIONS),
        (words.VEHICLES, words.HELD_OUT_VEHICLES),
        (words.APPOINTMENTS, words.HELD_OUT_APPOINTMENTS),
        (words.PLURAL_THINGS, words.HELD_OUT_PLURAL_THINGS),
        (words.NAMES, words.HELD_OUT_NAMES),
    )
    for trained, held_out in pairs:
        assert not set(trained) & set(held_out)


@pytest.mark.parametrize("kind", chat.kinds())
def test_a_case_accepts_what_is_wanted_and_nothing_else(kind: chat.CaseKind) -> None:
    rng = Random(26)
    for _ in range(60):
        case = chat.case(rng, kind)
        [said] = case.wanted
        assert case.judge(case.wanted) == {kind: True}
        for wrong in ("", "Yes.", "That is a long way off, I think.", "<think>"):
            assert case.judge((ModelReply("", wrong, ()),)) == {kind: False}
        assert case.judge((ModelReply("", said.content, (), broken=True),)) == {kind: False}
        assert case.judge(()) == {kind: False}


def test_a_fact_is_asked_after_one_to_four_other_turns() -> None:
    rng = Random(27)
    for _ in range(60):
        turns = sum(message.role == "user" for message in chat.case(rng, "memory").prompt.messages)
        assert 3 <= turns <= 6


def test_beyond_says_how_to_start_a_larger_model() -> None:
    pointing = [kind for kind in phrases.read("beyond").values() if "ponder serve --model" in kind.answers[0]]
    assert len(pointing) >= 6


def test_what_it_can_do_is_said_truly() -> None:
    said = identity.sample(Random(28), "train", "abilities").answer
    assert all(ability in said for ability in ("tools", "passages", "puzzles", "remember"))
