"""Tests what can be quoted from a text: sentences, items of lists, lines of a name and a value, rows of tables."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.spans import statements

HANDBOOK = """# Library

## Opening hours

Monday to Thursday 9:00–18:00. Closed on
Sundays.

## Loans

| item | period |
|---|---|
| film | 1 week |
| e-reader | 3 weeks |

You need:
1. A card. It is free.
2. A name

Head librarian: Dorothea Finch
Telephone: 555 0142
"""


def shown(text: str, context: str = "") -> list[tuple[str, list[str]]]:
    """Returns the quotable statements as they are shown, each with the headings above it."""
    return [
        (each.shown(text), [text[slice(*heading)] for heading in each.headings]) for each in statements(text, context)
    ]


def test_a_handbook_is_cut_along_its_structure() -> None:
    loans = ["# Library", "## Loans"]
    assert shown(HANDBOOK) == [
        ("Monday to Thursday 9:00–18:00.", ["# Library", "## Opening hours"]),
        ("Closed on Sundays.", ["# Library", "## Opening hours"]),
        ("item: film; period: 1 week", loans),
        ("item: e-reader; period: 3 weeks", loans),
        ("A card.", [*loans, "You need:"]),
        ("It is free.", [*loans, "You need:"]),
        ("A name", [*loans, "You need:"]),
        ("Head librarian: Dorothea Finch", loans),
        ("Telephone: 555 0142", loans),
    ]


@pytest.mark.parametrize(
    ("text", "context", "wanted"),
    [
        ("name,price\nlamp,39.90\nchair,249", "", ["name: lamp; price: 39.90", "name: chair; price: 249"]),
        ("lamp,39.90\nchair,249", "prices › name,price", ["name: lamp; price: 39.90", "name: chair; price: 249"]),
        ("| lamp | 39.90 |", "name | price", ["name: lamp; price: 39.90"]),
        ('a,b\n"x, y",2\nz,', "", ["a: x, y; b: 2", "a: z"]),
        (
            "Well, he came.\nSo, she went.\nOh, they stayed.",
            "",
            ["Well, he came.", "So, she went.", "Oh, they stayed."],
        ),
    ],
)
def test_a_row_is_shown_with_the_names_of_its_columns(text: str, context: str, wanted: list[str]) -> None:
    assert [words for words, _ in shown(text, context)] == wanted


def test_titles_of_plain_text_are_headings() -> None:
    text = (
        "Plum cake\n\nKnead the dough. Bake it.\n\n2. Water\nThe tap at plot 17 leaks, and it has done so for weeks.\n"
    )
    assert shown(text) == [
        ("Knead the dough.", ["Plum cake"]),
        ("Bake it.", ["Plum cake"]),
        ("The tap at plot 17 leaks, and it has done so for weeks.", ["Plum cake", "2. Water"]),
    ]


def test_headings_that_a_pdf_joined_with_a_paragraph_are_headings() -> None:
    text = "First use\n\n1. Remove the tape. 2. Press the button. Care\n\nRinse it.\n\n2. Errors\n\nE1: no water."
    assert shown(text) == [
        ("Remove the tape.", ["First use"]),
        ("Press the button.", ["First use"]),
        ("Rinse it.", ["Care"]),
        ("E1: no water.", ["Care", "2. Errors"]),
    ]


@pytest.mark.parametrize(
    "text", ["Buy milk\n\nCall Ana\n\nPay the rent", "# Closed on Mondays\n\n# Open on Fridays", "Hello world"]
)
def test_a_heading_above_nothing_can_be_quoted(text: str) -> None:
    said = {words for words, _ in shown(text)} | {heading for _, above in shown(text) for heading in above}
    assert said == {line.lstrip("# ") for line in text.split("\n\n")}


@given(st.text(alphabet='aB1. \n|,-#:;\t"?\f', max_size=120), st.text(alphabet="aB|,› ", max_size=12))
def test_any_text_is_cut_into_spans_in_order(text: str, context: str) -> None:
    """Spans do not overlap, lie within the text, and leave no letter out that is in no heading or header."""
    made = statements(text, context)
    assert all(0 <= each.start < each.end <= len(text) for each in made)
    assert all(one.end <= other.start for one, other in pairwise(made))
    if not any(each.header for each in made):
        held = {at for each in made for span in ((each.start, each.end), *each.headings) for at in range(*span)}
        assert all(at in held for at, letter in enumerate(text) if letter.isalpha())


@given(st.text(alphabet='aB1. \n|,-#:;\t"', max_size=120))
def test_nothing_is_shown_that_the_text_does_not_have(text: str) -> None:
    letters = {
        word for each in statements(text) for word in each.shown(text).replace(";", " ").replace(":", " ").split()
    }
    assert all(word.strip('",|') in text for word in letters)
