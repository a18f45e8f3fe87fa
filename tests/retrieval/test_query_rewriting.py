"""Tests follow-up questions: they get the words that they leave out, and whole questions stay as they are."""

from __future__ import annotations

import pytest

from retrieval.query_rewriting import ADDED, is_small_talk, resolve

DAM = ("Where is the dam of Orsk?", "In the hills.")


@pytest.mark.parametrize(
    ("question", "added"),
    [
        ("How high is it?", {"dam", "Orsk"}),
        ("And the lake?", {"dam", "Orsk"}),
        ("What about their toll?", {"dam", "Orsk"}),
        ("Why?", {"dam", "Orsk"}),
        ("And how high is the dam?", {"Orsk"}),
        ("How high is the bridge at Kel?", set()),
        ("When was the mill of Kel built and who paid for it?", set()),
        ("Is there a mill in Kel?", set()),
        ("Does that bridge have a toll?", set()),
    ],
)
def test_a_question_gets_the_words_that_it_leaves_out(question: str, added: set[str]) -> None:
    assert set(resolve(question, [DAM]).added) == added
    assert resolve(question, []).text == question


def test_follow_ups_of_follow_ups_keep_their_thing() -> None:
    turns = [DAM, ("How high is it?", "90 metres."), ("thanks!", "You are welcome.")]
    assert {"dam", "Orsk", "high"} <= set(resolve("And how long?", turns).added)


def test_a_person_is_found_in_the_answer() -> None:
    turns = [("Who designed the lighthouse?", "It was designed by Ada Ruber.")]
    assert {"ruber", "ada", "lighthouse"} <= set(resolve("When was she born?", turns).added)


def test_words_of_the_conversation_count_less() -> None:
    rarity = resolve("How high is it?", [DAM]).rarity(lambda stem: 4.0)
    assert rarity("dam") == 4.0 * ADDED and rarity("high") == 4.0


@pytest.mark.parametrize(
    ("question", "parts"),
    [
        ("Where is the K3 built and how heavy is it?", ["Where is the K3 built", "how heavy is it K3 built"]),
        ("Who is the treasurer and when is the party?", ["Who is the treasurer", "when is the party"]),
        ("Who paid for bread and wine?", ["Who paid for bread and wine?"]),
    ],
)  # fmt: skip
def test_parts_of_a_question_are_whole_questions(question: str, parts: list[str]) -> None:
    assert [part.text for part in resolve(question, []).parts()] == parts


def test_the_first_part_of_a_follow_up_has_the_words_of_the_conversation() -> None:
    first, second = resolve("And how high is it and who paid for it?", [DAM]).parts()
    assert {"dam", "Orsk"} <= set(first.added) and second.asked == "who paid for it"


@pytest.mark.parametrize("text", ["thanks!", "Thank you very much", "hello", "OK, great", "That was helpful, thanks."])
def test_small_talk_is_no_question(text: str) -> None:
    assert is_small_talk(text)


@pytest.mark.parametrize(
    "text", ["", "?", "What is it?", "Is that so?", "thanks, and who paid?", "Great Britain", "help"]
)
def test_what_may_be_a_question_is_searched_for(text: str) -> None:
    assert not is_small_talk(text)
