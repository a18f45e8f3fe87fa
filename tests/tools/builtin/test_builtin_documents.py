"""The documents tools on a real library: what they say, what they cite, and that nobody reads another's documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ponder import Context, Retry
from retrieval import Library, Text
from retrieval.browse import Browser
from tests.retrieval.words import WordEmbedder
from tools.builtin import documents

DAM = "The dam at Hollow Creek was finished in 1931. It is built of granite."


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library.open(tmp_path, WordEmbedder()) as library:
        mine = library.collection("ana").id
        library.add("ana", mine, [Text("dam.txt", DAM, "The dam"), Text("bees.txt", "Bees dance in the hive.", "Bees")])
        yield library


def context(library: Library, user: str = "ana") -> Context:
    provided: dict[type, Any] = {Browser: Browser(library, user)}
    return Context(user=user, call_id="c1", provided=provided)


def test_a_search_tells_and_cites_the_very_characters(library: Library) -> None:
    ctx = context(library)
    told = documents.search_documents(ctx, "when was the dam finished", 1)
    (source,) = ctx.sources
    assert "1931" in told and told.startswith("[S1] ")
    assert source.text is not None and DAM[source.start : source.end] == source.text and source.title == "The dam"


def test_what_is_found_can_be_opened(library: Library) -> None:
    ctx = context(library)
    found = documents.find_in_documents(ctx, "built of granite")
    assert "granite" in found
    number = ctx.sources[0].document
    assert isinstance(number, int) and "1931" in documents.open_document(ctx, number, 0)


def test_they_are_listed_the_newest_first(library: Library) -> None:
    assert [line.split(": ")[1].split(",")[0] for line in documents.list_documents(context(library)).splitlines()] == [
        "Bees", "The dam",
    ]  # fmt: skip


def test_another_user_finds_nothing(library: Library) -> None:
    ctx = context(library, "bob")
    assert documents.search_documents(ctx, "dam granite") == "No document says anything of it."
    assert documents.find_in_documents(ctx, "granite") == "These words stand nowhere."
    assert documents.list_documents(ctx) == "There are none." and ctx.sources == []
    with pytest.raises(Retry, match="no document"):
        documents.open_document(ctx, 1, 0)


@pytest.mark.parametrize(("document", "start"), [(99, 0), (1, 10_000)])
def test_a_place_that_is_not_there_is_a_hint_to_try_again(library: Library, document: int, start: int) -> None:
    with pytest.raises(Retry):
        documents.open_document(context(library), document, start)


def test_an_empty_query_is_a_hint_to_try_again(library: Library) -> None:
    with pytest.raises(Retry, match="empty"):
        documents.search_documents(context(library), " ")
