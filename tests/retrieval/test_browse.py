"""An agent's ways through documents: each bounded, each within its user's rights."""

from __future__ import annotations

import pytest

from retrieval import BadQuery, Library, NotFound, Text
from retrieval.browse import MAX_COUNT, WINDOW, Browser
from retrieval.evidence import clauses, investigate
from retrieval.records import Found, Hit, Passage
from tests.app import postgres

DATABASES = postgres.DATABASES_SLOW

LONG = " ".join(f"Sentence {n} of the report is here." for n in range(400))


@pytest.fixture
def browser(library: Library) -> Browser:
    number = library.collection("ana").id
    library.add("ana", number, [Text("report", LONG, "Report"), Text("note", "The  KEY-word\nstands here. And so on.")])
    return Browser(library, "ana")


def numbered(browser: Browser, title: str) -> int:
    return next(document.id for document in browser.list() if document.title == title)


def test_searching_gives_places_that_can_be_opened(browser: Browser) -> None:
    (found, *_) = browser.search("key-word", 1)
    opened = browser.open(found.document, found.start, found.end)
    assert found.text in opened.text


def test_opening_shows_whole_sentences_around_a_place(browser: Browser) -> None:
    at = LONG.index("Sentence 200 ")
    excerpt = browser.open(numbered(browser, "Report"), at)
    assert excerpt.text == LONG[excerpt.start : excerpt.end]
    assert excerpt.text.startswith("Sentence") and excerpt.text.endswith("here.")
    assert excerpt.start < at < excerpt.end and len(excerpt.text) <= 3 * WINDOW
    assert excerpt.before == excerpt.start and excerpt.after == len(LONG) - excerpt.end


@pytest.mark.parametrize(("start", "end"), [(0, None), (len(LONG) - 1, None), (10, len(LONG) * 2), (0, len(LONG))])
def test_opening_at_an_edge_stays_within_bounds(browser: Browser, start: int, end: int | None) -> None:
    excerpt = browser.open(numbered(browser, "Report"), start, end)
    assert 0 <= excerpt.start <= start < excerpt.end <= len(LONG) and len(excerpt.text) <= 3 * WINDOW


def test_a_place_that_is_not_there_is_said(browser: Browser) -> None:
    with pytest.raises(BadQuery, match="not in document"):
        browser.open(numbered(browser, "Report"), len(LONG))
    with pytest.raises(NotFound):
        browser.open(99, 0)


@pytest.mark.parametrize("string", ["KEY-word", "the key-WORD stands", "-word"])
def test_a_string_is_found_whatever_its_case_and_spacing(browser: Browser, string: str) -> None:
    (found,) = browser.find(string)
    assert found.title == "note"


def test_finding_is_bounded(browser: Browser) -> None:
    assert len(browser.find("of the report", limit=1000)) == MAX_COUNT
    assert browser.find("no such words") == []
    for string in ("", " ", "x" * 201):
        with pytest.raises(BadQuery, match="1 to 200"):
            browser.find(string)


def test_one_collection_does_not_show_another(library: Library, browser: Browser) -> None:
    other = library.collection("ana", "Other").id
    narrow = Browser(library, "ana", frozenset({other}))
    assert narrow.list() == [] and narrow.find("report") == [] and narrow.search("report") == []
    with pytest.raises(NotFound):
        narrow.open(1, 0)


# Several searches for one question


def _hit(number: int) -> Hit:
    return Hit(Passage(number, number, 1, "", "", 0, 1, 0, "", f"text {number}", None, {}), 1.0)


def test_a_question_that_is_covered_is_asked_once() -> None:
    asked = list[str]()

    def search(text: str) -> Found:
        asked.append(text)
        return Found((_hit(1),))

    done = investigate(search, lambda question, hits: 0.9, "Who built it and when was it sold?")
    assert asked == list(done.questions) == ["Who built it and when was it sold?"]


def test_a_question_that_is_not_covered_is_asked_in_parts() -> None:
    answers = {"who built the mill": (_hit(1),), "when was the bridge sold": (_hit(2),)}

    def search(text: str) -> Found:
        return Found(answers.get(text, (_hit(9),)))

    question = "who built the mill and when was the bridge sold"
    done = investigate(search, lambda question, hits: len(hits) / 4, question, enough=0.7)
    assert {hit.passage.id for hit in done.hits} == {1, 2, 9} and done.coverage == 0.75


def test_hops_and_questions_are_bounded() -> None:
    asked = list[str]()

    def search(text: str) -> Found:
        asked.append(text)
        return Found((_hit(len(asked)),))

    def split(question: str, hits: object) -> list[str]:
        return [f"part {len(asked)} {n}" for n in range(100)]

    investigate(search, lambda question, hits: 0.0, "why", split, hops=3)
    assert len(asked) == 1 + 3 * 4


@pytest.mark.parametrize(
    ("question", "parts"),
    [
        ("Who built the mill?", []), ("Where do salt and pepper come from?", []),
        ("Who built the mill and when was the bridge sold?", ["Who built the mill", "when was the bridge sold"]),
    ],
)  # fmt: skip
def test_clauses_are_told_from_lists(question: str, parts: list[str]) -> None:
    assert clauses(question) == parts
