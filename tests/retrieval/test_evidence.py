"""Tests whether what was found answers: more for what does, none for nothing, and a second opinion counts."""

from __future__ import annotations

import pytest

from retrieval import Library, Query, Text
from retrieval.evidence import Evidence, weigh
from tests.app import postgres

DATABASES = postgres.DATABASES_SLOW


@pytest.fixture
def dams(library: Library) -> Library:
    texts = [
        Text("orsk", "The dam of Orsk was finished in 1931. The city of Orsk paid for it."),
        Text("lake", "A green lake lies behind the hills. Nobody fishes there."),
    ]
    library.add("ana", library.collection("ana").id, texts)
    return library


def weighed(library: Library, question: str, **options: float) -> Evidence:
    hits = library.search(Query("ana", question)).hits
    second = options.get("sufficient")
    opinion = None if second is None else lambda asked, texts: second
    return weigh(question, hits, library.embedder, library.rarity("ana"), opinion)


def test_what_answers_weighs_more_than_what_does_not(dams: Library) -> None:
    there, absent = weighed(dams, "when was the dam of Orsk finished?"), weighed(dams, "who painted the Orsk opera?")
    assert there.score > absent.score
    assert there.best.startswith("The dam of Orsk was finished in 1931.")


def test_nothing_found_is_no_evidence(dams: Library) -> None:
    assert weigh("a question", [], dams.embedder, lambda stem: 1.0) == Evidence(0.0, "none")


@pytest.mark.parametrize("question", ["what is it?", "?", "the of and", "湖はどこですか"])
def test_a_question_without_words_of_its_own_is_no_error(dams: Library, question: str) -> None:
    assert 0.0 <= weighed(dams, question).score <= 1.0


def test_a_second_opinion_is_mixed_in(dams: Library) -> None:
    question = "when was the dam of Orsk finished?"
    low, high = weighed(dams, question, sufficient=0.0), weighed(dams, question, sufficient=1.0)
    assert high.score - low.score == pytest.approx(0.5)
    assert high.verdict == "answer"
