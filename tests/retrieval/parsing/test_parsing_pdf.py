"""PDF: a page's text is where its page says, and a word's boxes are where it was drawn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrieval.parsing import pdf
from retrieval.parsing.parsed import Box, Parsed, ParsedPage, Unreadable
from retrieval.parsing.parser import parse
from tests.retrieval import made

Write = Callable[[str, str | bytes], Path]
PAGES = [
    [
        "Trade between the islands grew, and inter-",
        "national treaties (of which one is called",
        "the well-known state-of-the-",
        "art pact) in the café.",
        "2 The second section",
        "A paragraph that begins here goes on over",
        "the end of its line.",
    ],
    [],
    ["The third page has 𝄞 and 中 before the word", "harbour, which is drawn in its second line."],
]


def box_of(path: Path, parsed: Parsed, word: str, page: int) -> Box:
    """Returns where the only occurrence of a word on a page is, by its place in the text."""
    leaf = parsed.pages[page - 1]
    start = parsed.text.index(word, leaf.start, leaf.end)
    (box,) = pdf.boxes(path, leaf, start, start + len(word))
    return box


def assert_drawn_there(box: Box, drawn: made.Drawn) -> None:
    """Within the space of its letters across, and over their lower halves at least upwards."""
    assert box.page == drawn.page
    assert drawn.left - 1 <= box.left <= drawn.left + 4 and drawn.right - 4 <= box.right <= drawn.right + 1
    assert box.bottom <= drawn.baseline + 0.5 and drawn.baseline + 3 <= box.top <= drawn.baseline + made.LEADING


@pytest.fixture
def path(write: Write) -> Path:
    return write("paper.pdf", made.pdf(PAGES, "Über Handel", unicode="𝄞中"))


def test_lines_flow_into_paragraphs_and_broken_words_are_whole(path: Path) -> None:
    first = parse(path, "paper.pdf").text.split("\f")[0]
    assert first == (
        "Trade between the islands grew, and international treaties (of which one is called the well-known "
        "state-of-the-art pact) in the café.\n\n2 The second section\n\n"
        "A paragraph that begins here goes on over the end of its line."
    )


def test_the_title_and_pages_are_the_files(path: Path) -> None:
    parsed = parse(path, "paper.pdf")
    assert parsed.title == "Über Handel"
    assert [page.number for page in parsed.pages] == [1, 2, 3]
    assert [parsed.text[page.start : page.end] for page in parsed.pages] == parsed.text.split("\f")
    assert parsed.text.split("\f")[2].startswith("The third page has 𝄞 and 中")


def test_a_page_without_text_is_a_fault_and_the_others_are_read(path: Path) -> None:
    (fault,) = parse(path, "paper.pdf").faults
    assert fault.page == 2 and "picture" in fault.message


@pytest.mark.parametrize(
    ("word", "page"),
    [("Trade", 1), ("treaties", 1), ("well-known", 1), ("café", 1), ("section", 1), ("goes", 1), ("harbour", 3)],
)
def test_a_words_box_is_where_it_was_drawn(path: Path, word: str, page: int) -> None:
    (drawn,) = (each for each in made.drawn(PAGES, word) if each.page == page)
    assert_drawn_there(box_of(path, parse(path, "paper.pdf"), word, page), drawn)


def test_a_span_of_several_lines_has_a_box_for_each(path: Path) -> None:
    parsed = parse(path, "paper.pdf")
    start, end = parsed.text.index("international"), parsed.text.index(" (of which")
    upper, lower = pdf.boxes(path, parsed.pages[0], start, end)
    assert upper.bottom > lower.top and upper.left > lower.right


def test_a_span_has_boxes_on_its_own_page_alone(path: Path) -> None:
    parsed = parse(path, "paper.pdf")
    assert pdf.boxes(path, parsed.pages[2], 0, parsed.pages[0].end) == []
    assert pdf.boxes(path, parsed.pages[1], 0, len(parsed.text)) == []


@pytest.mark.parametrize("turned", [0, 90, 180, 270])
def test_boxes_are_on_the_page_as_it_is_shown(write: Write, turned: int) -> None:
    lines = [["One word stands here."]]
    upright = write("a.pdf", made.pdf(lines))
    shown = write("b.pdf", made.pdf(lines, about=f"/Rotate {turned} /CropBox [50 60 450 780]"))
    before = box_of(upright, parse(upright, "a.pdf"), "stands", 1)
    after = box_of(shown, parse(shown, "b.pdf"), "stands", 1)
    left, bottom, right, top = before.left - 50, before.bottom - 60, before.right - 50, before.top - 60
    expected = {
        0: (left, bottom, right, top),
        90: (bottom, 400 - right, top, 400 - left),
        180: (400 - right, 720 - top, 400 - left, 720 - bottom),
        270: (720 - top, left, 720 - bottom, right),
    }[turned]
    assert (after.left, after.bottom, after.right, after.top) == pytest.approx(expected, abs=1)
    assert (after.width, after.height) == ((400, 720) if turned % 180 == 0 else (720, 400))


def test_boxes_of_another_file_are_refused(write: Write) -> None:
    other = write("other.pdf", made.pdf([["Other text."]]))
    with pytest.raises(Unreadable, match="not the one that was read"):
        pdf.boxes(other, ParsedPage(1, 0, 400), 0, 10)


def test_threads_may_ask_for_boxes_at_once(path: Path) -> None:
    page = parse(path, "paper.pdf").pages[0]
    with ThreadPoolExecutor(8) as pool:
        made_of = list(pool.map(lambda start: pdf.boxes(path, page, start, start + 20), [5] * 200))
    assert all(each == made_of[0] != [] for each in made_of)


words = st.text(st.sampled_from("abcdeABCDE1,.(-é𝄞中"), min_size=1, max_size=9).filter(lambda word: word.strip("-"))
lines = st.lists(words, min_size=1, max_size=8).map(" ".join)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pages=st.lists(st.lists(lines, max_size=8), min_size=1, max_size=3))
def test_every_word_of_the_text_is_found_where_it_was_drawn(write: Write, pages: list[list[str]]) -> None:
    path = write("any.pdf", made.pdf([["Begin", *rows] for rows in pages], unicode="𝄞中"))
    parsed = parse(path, "any.pdf")
    assert "\f".join(parsed.text[page.start : page.end] for page in parsed.pages) == parsed.text
    pages = [["Begin", *rows] for rows in pages]
    for leaf in parsed.pages:
        at = leaf.start
        for word in parsed.text[leaf.start : leaf.end].split():
            at = parsed.text.index(word, at)
            places = made.drawn(pages[: leaf.number], word)
            found = pdf.boxes(path, leaf, at, at + len(word))
            at += len(word)
            if len(found) == 1 and places and word.isascii() and word.isalpha():  # others are drawn smaller
                assert any(
                    place.page == leaf.number
                    and abs(place.left - found[0].left) < 4
                    and abs(place.baseline - found[0].bottom) < 4
                    for place in places
                )
