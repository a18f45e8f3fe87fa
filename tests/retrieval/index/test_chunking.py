"""Cutting: what holds for every text of every kind, and where a text is cut by preference."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retrieval.index.chunking import ChunkShape, Cut, cut
from retrieval.parsing.parsed import Kind, Parsed
from tests.retrieval.words import WordEmbedder

PIECES = WordEmbedder().pieces
SMALL = ChunkShape(child=12, overlap=4, parent_low=20, parent_high=40, longest=80)
WILD = {
    "parentheses": "(" * 20_000,
    "one word": "x" * 20_000,
    "only newlines": "\n" * 20_000,
    "spaces between two words": "a" + " " * 20_000 + "b",
    "fences within fences, none closed": "".join("`" * width + "\n# not closed\n" for width in range(3, 60)),
    "Chinese": "中文没有空格。" * 3_000,
    "what a tokenizer leaves out": "\u200d" * 20_000,
    "quotes that nothing closes": '"a,b\n' * 2_000,
    "a table's rules": "|---\n" * 2_000,
    "bullets": "- \n" * 2_000,
    "headings alone": "# a\n" * 2_000,
}
kinds = st.sampled_from(["prose", "markdown", "table", "code"])
fragments = st.sampled_from(
    [
        "One two. ", "Three four five! ", "(six) ", "sev\u00aden ", '"Eight," he said. ', "\n", "\n\n", "\f",
        "# A\n", "## B b\n", "A\n===\n", "```\n", "~~~py\n", "| a | b |\n", "| --- | --- |\n", "- item\n", "1. item\n",
        "    code()\n", '"x\ny",z\n', "a;b;c\n", "。", "中文", "x" * 90, " " * 90, "-" * 90, "\t", "é", "𝄞", '"', "`",
    ]
)  # fmt: skip
texts = st.lists(fragments, max_size=60).map("".join) | st.text(max_size=300)
shapes = st.builds(
    ChunkShape,
    child=st.integers(1, 12),
    overlap=st.integers(0, 6),
    parent_low=st.integers(1, 20),
    parent_high=st.integers(20, 40),
    longest=st.integers(1, 80),
)


def cut_up(text: str, kind: Kind = "prose", shape: ChunkShape = SMALL) -> Cut:
    return cut(Parsed(text, "", kind, ""), PIECES, shape)


def children(text: str, kind: Kind = "prose", shape: ChunkShape = SMALL) -> list[str]:
    return [text[chunk.start : chunk.end] for chunk in cut_up(text, kind, shape).chunks]


def assert_sound(text: str, kind: Kind, shape: ChunkShape) -> None:
    made = cut_up(text, kind, shape)
    assert all(0 <= low < high <= len(text) for low, high in made.parents)
    assert all(before[1] <= after[0] for before, after in pairwise(made.parents))
    starts, ends = [chunk.start for chunk in made.chunks], [chunk.end for chunk in made.chunks]
    assert starts == sorted(set(starts)) and ends == sorted(set(ends))  # so no child lies within another
    held, reached = [""], 0
    for chunk in made.chunks:
        low, high = made.parents[chunk.parent]
        assert low <= chunk.start < chunk.end <= high
        assert chunk.end - chunk.start <= shape.longest
        assert len(PIECES([text[chunk.start : chunk.end]])[0]) <= shape.child
        held.append(text[max(reached, chunk.start) : chunk.end])
        reached = chunk.end
    assert "".join("".join(held).split()) == "".join(text.split())
    assert made == cut_up(text, kind, shape)


@given(text=texts, kind=kinds, shape=shapes)
@example(text="| a |\n|---|\n" + "| b |\n" * 30, kind="markdown", shape=SMALL)
@example(text="# A\n" + "x " * 11 + ".\n# B\n" + "y " * 12, kind="markdown", shape=SMALL)
def test_every_character_lies_in_a_child_within_its_parent_and_within_the_limits(
    text: str, kind: Kind, shape: ChunkShape
) -> None:
    assert_sound(text, kind, shape)


@pytest.mark.parametrize("kind", ["prose", "markdown", "table", "code"])
@pytest.mark.parametrize("text", WILD.values(), ids=WILD)
def test_wild_texts_are_cut_like_others(text: str, kind: Kind) -> None:
    assert_sound(text, kind, ChunkShape())


def test_headings_are_the_context_of_what_stands_under_them() -> None:
    text = "# Guide\n\nIntro.\n\n## Install\n\nRun it.\n\n### Linux\n\nUse apt.\n\n## Use\n\nOpen it.\n"
    made = cut_up(text, "markdown", ChunkShape(child=4, overlap=0, parent_low=4, parent_high=4))
    context = {text[chunk.start : chunk.end].splitlines()[-1]: chunk.context for chunk in made.chunks}
    assert context["Intro."] == "Guide"
    assert context["Use apt."] == "Guide › Install › Linux"
    assert context["Open it."] == "Guide › Use"


def test_a_heading_may_be_underlined() -> None:
    text = "Guide\n=====\n\nIntro.\n\nInstall\n-------\n\nRun it.\n"
    made = cut_up(text, "markdown", ChunkShape(child=11, overlap=0))
    assert [chunk.context for chunk in made.chunks] == ["Guide", "Guide › Install"]


@pytest.mark.parametrize("fence", ["```", "~~~~", "  ```"])
def test_a_number_sign_within_a_fence_is_no_heading(fence: str) -> None:
    text = f"# Real\n\nText.\n\n{fence}sh\n# a comment\nrun\n{fence}\n\nMore text.\n"
    assert {chunk.context for chunk in cut_up(text, "markdown").chunks} == {"Real"}


def test_headings_after_a_fence_that_nothing_closes_are_headings() -> None:
    text = "# A\n\n```\ncode\n\n# B\n\n" + "Some words stand here. " * 3
    assert cut_up(text, "markdown").chunks[-1].context == "B"


def test_a_heading_goes_with_what_follows_it() -> None:
    text = "".join(f"## Part {number}\n\n{'Some words stand here. ' * 7}\n\n" for number in range(9))
    assert not [child for child in children(text, "markdown") if "#" in child.splitlines()[-1]]


def test_sentences_stay_whole() -> None:
    text = " ".join(
        f'"Number {number}, e.g. by Dr. Who and A. Turing, is a sentence." (Indeed.)' for number in range(40)
    )
    for child in children(text, shape=ChunkShape(child=40, overlap=18)):
        assert child.startswith(('"Number', "(Indeed")) and child.endswith(('sentence."', "(Indeed.)"))


def test_what_is_no_longer_than_the_overlap_lies_whole_in_a_child() -> None:
    sentences = [f"This is the sentence {number}." for number in range(60)]
    made = children(" ".join(sentences), shape=ChunkShape(child=30, overlap=12))
    for pair in pairwise(sentences):
        assert any(" ".join(pair) in child for child in made)


def test_rows_stay_whole_and_carry_their_header() -> None:
    rows = [f'{number},"a note\nof two lines",{number * 2}' for number in range(50)]
    text = "\n".join(["number,note,double", *rows])
    made = cut_up(text, "table", ChunkShape(child=60, overlap=0))
    assert [chunk.context for chunk in made.chunks] == ["", *["number,note,double"] * (len(made.chunks) - 1)]
    for chunk in made.chunks:
        child = text[chunk.start : chunk.end]
        assert child.endswith(tuple(rows)) and child.startswith(("number,note", *rows))


def test_rows_of_a_table_in_markdown_carry_headings_and_header() -> None:
    rows = [f"| star {number}. Bright | {number} |" for number in range(30)]
    text = "\n".join(["# Stars", "", "Seen today:", "| name | mass |", "| --- | --- |", *rows])
    made = cut_up(text, "markdown", ChunkShape(child=40, overlap=0))
    assert {chunk.context for chunk in made.chunks[1:]} == {"Stars › name | mass"}
    assert all(text[chunk.start : chunk.end].startswith("| star") for chunk in made.chunks[1:])


def test_code_is_cut_between_lines_and_keeps_its_indentation() -> None:
    text = "\n\n".join(f"def f{number}(x):\n    return x * {number}" for number in range(20))
    for child in children(text, "code", ChunkShape(child=20, overlap=0)):
        assert child.startswith(("def", "    return"))


def test_a_sentence_too_long_is_cut_between_words() -> None:
    words = [f"word{number}" for number in range(100)]
    assert {word for child in children(" ".join(words)) for word in child.split()} == set(words)
