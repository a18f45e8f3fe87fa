"""Tests the ranking of sentences: the one that answers first, whatever is cached, and odd texts without an error."""

from __future__ import annotations

import pytest

from retrieval.prompt_context import PromptSource
from retrieval.sentence_ranking import RankedSentence, SentenceRanker, windows, with_context
from tests.retrieval.words import WordEmbedder

DAMS = (
    "A green lake lies behind the hills. The dam of Orsk was finished in 1931. Who paid for the dam of Orsk? "
    "The city of Orsk paid for it in ten years."
)
BRIDGE = "The bridge at Kel has nine arches. A storm took two of them."


def source(number: int, text: str, start: int = 0) -> PromptSource:
    return PromptSource(f"S{number}", number, "", start, start + len(text), text, 0.5)


def ranked(question: str, *texts: str, ranker: SentenceRanker | None = None, limit: int = 5) -> list[RankedSentence]:
    ranker = ranker or SentenceRanker(WordEmbedder())
    found = [source(number, text) for number, text in enumerate(texts, 1)]
    return ranker.rank(question, found, lambda stem: 1.0, limit)


def test_the_sentence_that_answers_is_first_and_knows_its_place() -> None:
    best = ranked("when was the dam of Orsk finished?", DAMS, BRIDGE)[0]
    assert best.text == "The dam of Orsk was finished in 1931." and best.source.label == "S1"
    assert DAMS[best.start : best.end] == best.text


def test_a_question_in_a_source_is_no_answer() -> None:
    found = ranked("who paid for the dam of Orsk?", DAMS)
    assert not found[0].text.endswith("?")


def test_what_fits_better_is_more_probable() -> None:
    there = ranked("how many arches has the bridge at Kel?", BRIDGE)[0]
    absent = ranked("who composed the opera of Vienna?", BRIDGE)[0]
    assert 0.0 <= absent.probability < there.probability <= 1.0


@pytest.mark.parametrize("cache_bytes", [0, 1_000, 64 << 20])
def test_the_cache_changes_nothing(cache_bytes: int) -> None:
    ranker = SentenceRanker(WordEmbedder(), cache_bytes)
    questions = ("when was the dam finished?", "how many arches has the bridge?") * 2
    for question in questions:
        assert ranked(question, DAMS, BRIDGE, DAMS, ranker=ranker) == ranked(question, DAMS, BRIDGE, DAMS)


def test_a_source_longer_than_a_window_is_ranked_to_its_end() -> None:
    text = " ".join(f"Stone number {n} lies in the river." for n in range(100)) + " The miller was called Anselm."
    assert ranked("what was the miller called?", text)[0].text == "The miller was called Anselm."


@pytest.mark.parametrize("text", ["", "   ", "\n\n\f", "湖は北にある。山は高い。", "word " * 700, "a" * 3_000])
def test_odd_texts_are_no_error(text: str) -> None:
    assert all(0.0 <= one.probability <= 1.0 for one in ranked("what is it?", text))
    assert all(0.0 <= one.probability <= 1.0 for one in ranked("?", text, DAMS))


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("when was the dam of Orsk finished?", "The dam of Orsk was finished in 1931."),
        ("which engineer designed the lighthouse of Lindau?",
         "The lighthouse of Lindau was built in 1853. It was designed by the engineer Ruber."),
        ("how tall is a mast?", "The mast is made of oak. It is 20 metres tall."),
    ],
)  # fmt: skip
def test_a_sentence_brings_the_one_that_it_needs(question: str, answer: str) -> None:
    text = (
        "The dam of Orsk was finished in 1931. A lake lies there. The lighthouse of Lindau was built in 1853. It was "
        "designed by the engineer Ruber. Dogs are welcome. The mast is made of oak. It is 20 metres tall."
    )
    best = with_context(question, ranked(question, text)[0])
    assert best.text == answer and text[best.start : best.end] == answer


HOURS = "# Kel library\n\n## Opening hours\n\nMonday to Friday from nine.\n\nClosed in May.\n\n## Rules\n\nNo dogs.\n"


def test_a_section_is_quoted_whole_where_its_heading_is_asked_for() -> None:
    (best,) = ranked("what are the opening hours?", HOURS, limit=1)
    whole = with_context("what are the opening hours?", best)
    assert whole.shown == "Monday to Friday from nine. Closed in May." and whole.probability > 0.5


def test_headings_and_the_sentence_before_count() -> None:
    asked = "who mends the tap of the mill?"
    alone, heading, before = (
        ranked(asked, text, limit=1)[0].probability
        for text in (
            "Tom mends it.",
            "# The tap of the mill\n\nTom mends it.",
            "A tap of the mill leaks. Tom mends it.",
        )
    )
    assert alone < heading and alone < before


def test_a_row_is_found_by_the_names_of_its_columns() -> None:
    table = "| code | meaning |\n|---|---|\n| E3 | pump blocked |\n| E4 | too hot |\n"
    best = ranked("what is the meaning of code E4?", table)[0]
    assert best.shown == "code: E4; meaning: too hot" and best.text == "| E4 | too hot |"
    assert with_context("what is the meaning of code E4?", best) == best


def test_a_source_without_the_identifier_of_the_question_does_not_answer() -> None:
    table = "| code | meaning |\n|---|---|\n| E3 | pump blocked |\n| E4 | too hot |\n"
    assert ranked("what is the meaning of code E7?", table, BRIDGE) == []


@pytest.mark.parametrize("budget", [0, 20, 60, 1_000])
def test_windows_are_the_best_statements_at_their_places_within_a_budget(budget: int) -> None:
    question = "when was the dam of Orsk finished?"
    best = ranked(question, DAMS, BRIDGE, limit=100)
    found = windows(question, best, budget, lambda text: len(text.split()))
    assert sum(len(each.text.split()) + 8 for each in found) <= budget
    assert [each.label for each in found] == [f"S{number}" for number in range(1, len(found) + 1)]
    assert [(each.document, each.start) for each in found] == sorted((each.document, each.start) for each in found)
    for each in found:
        assert (DAMS, BRIDGE)[each.document - 1][each.start : each.end] == each.text
    assert budget < 20 or any("finished in 1931" in each.text for each in found)


def test_windows_that_touch_are_one() -> None:
    best = ranked("bridge Kel arches storm", BRIDGE, limit=100)
    (whole,) = windows("bridge Kel arches storm", best, 1_000, len)
    assert whole.text == BRIDGE


def test_a_windows_place_counts_from_the_beginning_of_its_document() -> None:
    later = source(1, DAMS, start=500)
    best = SentenceRanker(WordEmbedder()).rank("when was the dam finished?", [later], lambda stem: 1.0, 1)
    (found,) = windows("when was the dam finished?", best, 100, lambda text: len(text.split()))
    assert found.start == 500 + DAMS.index("The dam of Orsk was")
