"""Sentences of an answer held to their sources, however the answer comes in pieces and wherever its labels stand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval import PromptSource
from retrieval.citations import MAX_HELD, CheckedText, CitationChecker, as_text, is_refusal
from retrieval.parsing.parsed import ParsedPage

BEGUN = "The dam of Orsk was begun in 1925. It was planned by A. Lindqvist, an engineer of the railway."
PAID = "Intro.\nThe dam of Orsk was finished in 1931, at a cost of 4,200,000 crowns.\fThe city did not pay for it."
SOURCES = (
    PromptSource("S1", 7, "Dams", 1000, 1000 + len(BEGUN), BEGUN, 0.9),
    PromptSource(
        "S2",
        8,
        "Money",
        0,
        len(PAID),
        PAID,
        0.8,
        (ParsedPage(1, 0, PAID.index("\f")), ParsedPage(2, PAID.index("\f") + 1, 200)),
    ),
)


def checked(answer: str, cuts: list[int] | None = None) -> list[CheckedText]:
    checker = CitationChecker(SOURCES)
    made, start = list[CheckedText](), 0
    for cut in [*sorted(cuts or []), len(answer)]:
        made += checker.feed(answer[start:cut])
        start = cut
    return made + checker.finish()


def supports(answer: str) -> list[tuple[str, list[str]]]:
    return [(one.support, [citation.label for citation in one.citations]) for one in checked(answer)]


@pytest.mark.parametrize(
    "answer",
    [
        "[S2] The dam of Orsk was finished in 1931.", "The dam of Orsk was finished in 1931 [S2].",
        "The dam of Orsk was finished in 1931. [S2]", "S2: The dam of Orsk was finished in 1931.",
        "(S2) The dam of Orsk was finished in 1931.", "The dam of Orsk was finished in 1931 [S1, S2].",
        "- **The dam of Orsk** was finished in 1931 [S2].",
    ],
)  # fmt: skip
def test_a_label_is_read_wherever_it_stands(answer: str) -> None:
    assert supports(answer) == [("supported", ["S2"])]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_sentence_that_never_ends_is_cut_at_a_word(size: int) -> None:
    text = "The dam of Orsk was begun in 1925, " + "and the dam and " * 300 + "so it was. It was planned by Lindqvist."
    made = checked(text, list(range(size, len(text), size)))
    assert "".join(one.text + one.space for one in made) == text
    assert len(made) == 4 and all(len(one.text) <= MAX_HELD for one in made)
    assert all(one.space == " " for one in made[:-1]) and made[-1].text == "It was planned by Lindqvist."
    (word, rest) = checked("x" * (MAX_HELD + 10), list(range(size, MAX_HELD, size)))
    assert (len(word.text), rest.text) == (MAX_HELD, "x" * 10)


def test_text_is_held_until_its_sentence_ends() -> None:
    checker = CitationChecker(SOURCES)
    held = [
        checker.held for text in ("\n", "The dam of Orsk", " was begun in 1925. ", "It") if checker.feed(text) or True
    ]
    assert held == [False, True, True, True]
    checker.finish()
    assert not checker.held


def test_a_citation_is_the_span_in_its_document() -> None:
    (one,) = checked("It was planned by Lindqvist, an engineer of the railway [S1].")
    (citation,) = one.citations
    assert (citation.document, citation.title, citation.page) == (7, "Dams", None)
    assert BEGUN[citation.start - 1000 : citation.end - 1000] == citation.snippet == BEGUN[BEGUN.index("It was") :]


def test_a_citation_knows_the_page_of_its_span() -> None:
    first, second = checked("The dam cost 4200000 crowns [S2]. The city did not pay for it [S2].")
    assert [one.citations[0].page for one in (first, second)] == [1, 2]


def test_a_quotation_is_found_however_it_is_spaced() -> None:
    (one,) = checked("“the dam  of ORSK was finished in 1931”")
    assert one.support == "supported" and one.citations[0].score == 1.0
    assert one.citations[0].snippet == "The dam of Orsk was finished in 1931"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("The dam of Orsk was finished in 1932 [S2].", "another number"),
        ("The dam of Orsk was not finished in 1931 [S2].", "denied"),
        ("The city did pay for the dam [S2].", "no longer denied"),
        ("It was planned by Berg, an engineer of the railway [S1].", "another name"),
        ("The dam of Orsk feeds nine villages with water [S2].", "other words"),
    ],
)
def test_what_the_source_does_not_say_is_unsupported(answer: str, why: str) -> None:
    assert supports(answer) == [("unsupported", [])], why


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("The dam of Orsk was begun in 1925 by seabranes [S1].", "a word that stands in no source"),
        ("Orsk railway begun A. Lindqvist dam engineer 1925 planned [S1].", "a word salad"),
        ("The railway of A. Lindqvist planned an engineer [S1].", "swapped roles"),
    ],
)
def test_words_in_another_order_or_foreign_are_supported_in_part(answer: str, why: str) -> None:
    assert supports(answer) == [("partial", ["S1"])], why


def test_of_two_sources_that_say_it_in_part_the_better_one_is_cited() -> None:
    texts = ("The old mill of Kel grinds fine white flour.", "The old mill of Kel grinds fine white flour daily.")
    checker = CitationChecker([PromptSource(f"S{n}", n, "", 0, len(t), t, 0.5) for n, t in enumerate(texts, 1)])
    (one,) = [*checker.feed("The old mill of Kel grinds fine white flour daily indoors."), *checker.finish()]
    assert one.support == "partial" and [citation.label for citation in one.citations] == ["S2"]


@pytest.mark.parametrize("answer", ["The people, as many do not know, built it of gold.", "1942.", "Neptunium."])
def test_short_claims_and_asides_are_checked_too(answer: str) -> None:
    assert supports(answer) == [("unsupported", [])]


def test_a_passive_sentence_may_turn_the_order() -> None:
    assert supports("A. Lindqvist, an engineer of the railway, planned it [S1].")[0][0] == "supported"


def test_a_wrong_label_is_put_right_and_said() -> None:
    assert supports("The dam of Orsk was begun in 1925 [S2].") == [("elsewhere", ["S1"])]


def test_a_source_that_supports_a_sentence_far_better_is_cited_instead_of_the_named_one() -> None:
    loose = "The old mill of Kel, restored, has nine large wheels of oak."
    exact = "The old mill of Kel, restored, has nine large wheels of oak from Brenn."
    both = [PromptSource(f"S{n}", n, "", 0, len(text), text, 0.5) for n, text in enumerate((loose, exact), 1)]
    checker = CitationChecker(both)
    (one,) = [*checker.feed("The old mill of Kel has nine large wheels of oak from Brenn [S1]."), *checker.finish()]
    assert (one.support, [citation.label for citation in one.citations]) == ("elsewhere", ["S2"])


def test_a_label_of_no_source_is_none() -> None:
    assert supports("The dam of Orsk was begun in 1925 [S9].") == [("elsewhere", ["S1"])]


@pytest.mark.parametrize(
    "answer",
    [
        "I don't know. The sources do not say.",
        "Hello!",
        "Which dam do you mean?",
        "\n\n",
        "Certainly.",
        "Unfortunately, your documents do not mention who paid.",
        "There is no information about that.",
    ],
)
def test_what_claims_nothing_is_plain(answer: str) -> None:
    assert {support for support, _ in supports(answer)} <= {"plain"}


def test_a_shortened_name_ends_no_sentence() -> None:
    assert [one.text for one in checked("It was planned by A. Lindqvist. It stands.")] == [
        "It was planned by A. Lindqvist.",
        "It stands.",
    ]


def test_sentences_come_as_soon_as_they_are_whole() -> None:
    checker = CitationChecker(SOURCES)
    assert checker.feed("[S1] The dam of Orsk was begun in 1925") == []
    (first,) = checker.feed(". [S2] The dam")
    assert first.text == "The dam of Orsk was begun in 1925." and first.support == "supported"


def test_a_judge_is_asked_where_words_do_not_decide() -> None:
    asked = list[tuple[str, str]]()

    def judge(claim: str, text: str) -> float:
        asked.append((claim, text))
        return 0.9

    checker = CitationChecker(SOURCES, judge)
    (one,) = [*checker.feed("Construction of the dam of Orsk commenced [S1]."), *checker.finish()]
    assert one.support == "supported" and asked[0][0].startswith("Construction")


ANSWERS = st.lists(
    st.sampled_from(
        [
            "The dam of Orsk was begun in 1925 [S1].", "[S2] The dam of Orsk was finished in 1931.",
            "A claim, 7.",
            "\n\n", " ", "- It was planned by A. Lindqvist (S1, S2).", "I don't know.", "S2: ",
            "[S", "3.5 m high!", "…",
        ]
    ),
    max_size=8,
).map("".join)  # fmt: skip


def test_a_bare_label_belongs_to_what_follows_it_however_it_is_cut() -> None:
    answer = "It was planned by A. Lindqvist. [S2] The dam was finished in 1931.\n\nS2: The dam of Orsk is old."
    whole = checked(answer)
    assert all(checked(answer, [at]) == whole for at in range(len(answer) + 1))
    assert not any("S2" in sentence.text for sentence in whole)


@settings(max_examples=150)
@given(ANSWERS, st.data())
def test_however_it_is_cut_the_outcome_is_the_same(answer: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=12))
    assert checked(answer, cuts) == checked(answer)


@settings(max_examples=100)
@given(ANSWERS)
def test_nothing_but_labels_is_lost(answer: str) -> None:
    def letters(text: str) -> str:
        return "".join(character for character in text if character.isalpha())

    shown = "".join(as_text(one).replace(" [unsupported]", "") for one in checked(answer))
    left = letters(shown)
    for label in ("S", "S"):
        left, answer = left.replace(label, ""), answer.replace(label, "")
    assert letters(answer) == left


def test_unsupported_sentences_are_marked_or_dropped() -> None:
    wrong, right = checked("The dam has nine towers [S1]. The dam of Orsk was begun in 1925 [S1].")
    assert as_text(wrong) == "The dam has nine towers. [unsupported] " and as_text(wrong, "drop") == ""
    assert as_text(right) == "The dam of Orsk was begun in 1925. [S1]"


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        ("I don't know. The sources do not say.", True),
        ("The text does not mention when it was built.", True),
        ("I do not know that. A larger model may.", True),
        ("I don't know the day, but the year was 1931.", False),
        ("It was built in 1931. I don't know by whom.", False),
        ("", False),
    ],
)
def test_an_answer_that_says_it_does_not_know_is_told_from_others(text: str, refuses: bool) -> None:
    assert is_refusal(text) is refuses
