"""Documents of a server whose settings name a PostgreSQL database: opened there, or refused with what is missing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.config import BadSetting, Settings
from app.document_library import documents_dir, open_library
from app.errors import from_exception
from retrieval import Library, Query, Text
from retrieval.document_database import StoreError
from tests.app import postgres
from tests.retrieval.words import WordEmbedder

pytestmark = pytest.mark.slow


@pytest.fixture
def given(tmp_path: Path, postgres_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings of a server with a new database, and an embedder without weights."""
    monkeypatch.setattr("app.document_library.SentenceEmbedder", lambda name: WordEmbedder())
    with postgres.schema(postgres_address) as address:
        yield Settings(data_dir=str(tmp_path), database=address)


def test_documents_are_in_the_database_and_files_in_the_folder(
    given: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with Library.open(documents_dir(given), WordEmbedder()) as files:
        files.add("ana", files.collection("ana").id, [Text("old", "A lake.")])
    with open_library(given) as library:
        assert "`ponder migrate` copies them" in caplog.text
        library.add("ana", library.collection("ana").id, [Text("new", "A dam.")])
        with open_library(given) as beside:  # another server of the same database and folder
            assert [hit.passage.source for hit in beside.search(Query("ana", "dam lake")).hits] == ["new"]
            assert beside.new_file().parent == library.new_file().parent
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        open_library(given).close()
    assert caplog.text == ""


def test_a_server_without_pgvector_is_refused_with_what_to_install(given: Settings, tmp_path: Path) -> None:
    with postgres.cluster(postgres.without_pgvector()) as address:
        bare = Settings(data_dir=str(tmp_path), database=address)
        with pytest.raises(BadSetting, match=r"used for documents: it has no pgvector.*apt install postgresql"):
            open_library(bare)


def test_vectors_that_are_too_long_for_an_index_are_refused(given: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WordEmbedder, "size", 4001)
    with pytest.raises(BadSetting, match="4001 numbers, and pgvector's index takes 4000; accepted: another embedder"):
        open_library(given)


def test_a_database_that_is_away_is_told_as_such() -> None:
    told = from_exception(StoreError("the connection is lost", None))
    assert (told.status, told.code) == (503, "database_unreachable")
    assert from_exception(StoreError("could not extend file", "53100")).status == 507
