"""Documents in PostgreSQL: the same numbers as beside SQLite, rights inside the search, and what keeps it usable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from retrieval import Library, Query, Text
from retrieval.document_database import NewerFile, StoreError
from retrieval.document_store import DocumentStore
from retrieval.index.filters import as_sql
from retrieval.postgres import postgres_index
from retrieval.postgres.postgres_database import PostgresDatabase
from tests.app import postgres
from tests.retrieval.conftest import admit, engine_of
from tests.retrieval.words import WordEmbedder

DATABASES = (pytest.param("postgresql", id="postgresql"),)
pytestmark = pytest.mark.slow

DAMS = [
    Text("orsk", "The dam of Orsk was finished in 1931, of granite from the valley.", "The dam of Orsk"),
    Text("bees", "Bees of the valley dance; a dam is nothing to them.", "Bees"),
    Text("code", "def parseHttpHeader(raw_line): return raw_line", "parser.py"),
    *(Text(f"note{n}", f"A note on the dam, {n}: {'granite ' * (n % 7)}valley.", f"Note {n}") for n in range(60)),
]
QUERIES = ("dam", "granite dam of the valley", "who paid for the dam in Orsk?", "http header", "the of", "zeppelin")


def test_scores_are_those_of_the_indexes_beside_sqlite(tmp_path: Path, library: Library) -> None:
    bees, new = Text("bees", "Bees of a hill.", "Bees"), Text("granite dam", "A granite hill.")
    mine = library.collection("ana").id
    library.add("ana", mine, DAMS)
    library.add("ana", mine, [bees, Text("new", new.text)])
    number = {document.source: document.id for document in library.store.documents("ana")}
    library.delete("ana", number["note3"])
    library.rename("ana", number["new"], new.source)
    with Library.open(tmp_path / "files", WordEmbedder()) as files:  # where tantivy counts what was deleted for a while
        kept = [each for each in DAMS if each.source not in ("bees", "note3")]
        files.add("ana", files.collection("ana").id, [*kept, bees, new])
        for text in QUERIES:
            for share in (0.0, 0.5, 1.0):
                asked = Query("ana", text, 100, repeats=True, dense_share=share)
                expected, got = (
                    {hit.passage.source: hit for hit in each.search(asked).hits} for each in (files, library)
                )
                assert got.keys() == expected.keys(), (text, share)
                for source, hit in expected.items():
                    assert (got[source].lexical or 0.0) == pytest.approx(hit.lexical or 0.0, rel=1e-9)
                    if source != new.source:  # which keeps the vector of its first title
                        # The query is in half precision.
                        assert (got[source].dense or 0.0) == pytest.approx(hit.dense or 0.0, abs=2e-3)
                        assert got[source].cosine == pytest.approx(hit.cosine, abs=1e-6)
            stem = text.split()[0]
            assert files.rarity("ana")(stem) == library.rarity("ana")(stem)


def test_a_statement_finds_nothing_that_its_user_may_not_read(library: Library) -> None:
    mine = library.collection("ana").id
    library.add("ana", mine, DAMS)
    vector = library.embedder.embed_query("granite dam")
    for exact in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(postgres_index, "EXACT_UP_TO", 10_000 if exact else 0)
            theirs = library.views.scope("eve", {mine}, None)
            assert theirs.dense(vector, 5) == {} and theirs.lexical("granite dam", 5) == {}
            own = library.views.scope("ana", {mine}, None)
            assert len(own.dense(vector, 5)) == len(own.lexical("granite dam", 5)) == 5
    admit(library, "ana", mine, "eve", "reader")
    shared = library.views.scope("eve", {mine}, None)
    assert len(shared.dense(vector, 5)) == len(shared.lexical("granite dam", 5)) == 5
    library.rights.remove("ana", mine, "eve")
    assert shared.dense(vector, 5) == {} and shared.lexical("granite dam", 5) == {}


@pytest.fixture
def crowd(library: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library whose graph is nearly all another user's, and is searched as if it were large."""
    monkeypatch.setattr(postgres_index, "EXACT_UP_TO", 10)
    words = [f"word{n}" for n in range(300)]
    rng = np.random.default_rng(0)
    for user, count in (("ben", 1500), ("ana", 40)):
        texts = [Text(f"{user}{n}", " ".join(rng.choice(words, 12))) for n in range(count)]
        library.add(user, library.collection(user).id, texts)
    return library


def test_a_scan_of_the_graph_goes_on_until_enough_may_be_read(crowd: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = crowd.embedder.embed_query("word1 word2 word3")
    for user, collection in (("ana", crowd.collection("ana").id), ("ben", crowd.collection("ben").id)):
        scope = crowd.views.scope(user, {collection}, None)
        near = scope.dense(vector, 20)
        with monkeypatch.context() as patch:
            patch.setattr(postgres_index, "EXACT_UP_TO", 10_000)
            exact = scope.dense(vector, 20)
        assert len(near) == 20 and len(near.keys() & exact.keys()) >= 18
    monkeypatch.setattr(postgres_index, "_GRAPH", tuple(  # the graph gives up before Ana's are reached
        each for each in postgres_index._GRAPH if "iterative_scan" not in each))  # fmt: skip
    scope = crowd.views.scope("ana", {crowd.collection("ana").id}, None)
    assert scope.dense(vector, 20).keys() == exact_of(crowd, vector).keys()


def exact_of(library: Library, vector: Any) -> dict[int, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgres_index, "EXACT_UP_TO", 10_000)
        return library.views.scope("ana", {library.collection("ana").id}, None).dense(vector, 20)


def test_the_graph_is_what_a_large_search_is_answered_from(crowd: Library, engine: Engine) -> None:
    statements = list[str]()
    with crowd.store.database.reading() as db:
        for setting in postgres_index._GRAPH:
            db.execute(setting)
        allowed = {"collections": [crowd.collection("ben").id], "user": "ben", "embedder": "words-64", "count": 20}
        vector = crowd.store.database.encode_vector(crowd.embedder.embed_query("word1")[0].astype(np.float16))
        sql = postgres_index._NEAREST.replace("{size}", "64").replace("{allowed}", postgres_index._READABLE)
        statements = [row[0] for row in db.execute(f"EXPLAIN {sql}", {**allowed, "vector": vector})]
    assert any("Index Scan using vectors_" in line for line in statements), "\n".join(statements)
    assert not any("Sort" in line for line in statements), "\n".join(statements)


def test_words_of_what_was_deleted_are_counted_no_more(library: Library) -> None:
    mine, other = library.collection("ana").id, library.collection("ana", "other").id
    for number in (mine, other):
        library.add("ana", number, DAMS)
    before = rows(library, "SELECT term, chunks FROM terms WHERE collection = ? ORDER BY term", other)
    library.add("ana", other, [Text("more", "A secret quince.", "Quinces")])
    library.delete("ana", next(d.id for d in library.store.documents("ana") if d.source == "more"))
    assert rows(library, "SELECT term, chunks FROM terms WHERE collection = ? ORDER BY term", other) == before
    for number in (mine, other):
        library.delete_collection("ana", number)
    for table in ("terms", "lexical_totals", "vectors", "chunks", "documents"):
        assert rows(library, f"SELECT count(*) FROM {table}") == [(0,)], table


def rows(library: Library, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in library.store.database.rows(sql, values)]


class Other(WordEmbedder):
    name = key = "words-64 of another kind"


def test_another_embedder_embeds_what_is_there_anew(tmp_path: Path, engine: Engine) -> None:
    with Library.open(tmp_path / "a", WordEmbedder(), engine=engine) as library:
        library.add("ana", library.collection("ana").id, DAMS)
        before = library.search(Query("ana", "granite dam", dense_share=1.0)).hits
    with Library.open(tmp_path / "a", Other(), engine=engine) as library:
        found = library.search(Query("ana", "granite dam", dense_share=1.0)).hits
        assert [hit.passage.id for hit in found] == [hit.passage.id for hit in before]
        assert rows(library, "SELECT count(DISTINCT embedder) FROM vectors") == [(2,)]


def test_a_vector_that_went_meanwhile_is_made_again(library: Library) -> None:
    mine = library.collection("ana").id
    (made,) = [library.publisher.prepare("a", "1", parsed, {}, 1) for parsed in [_parsed("A lake.")]]
    library.publisher.embed([made])
    library.store.chunks.forget_unused_vectors()  # as another server's delete of the same text would
    library.publisher.show("ana", mine, [made])
    (hit,) = library.search(Query("ana", "lake", dense_share=1.0)).hits
    assert hit.dense is not None and hit.dense > 0


def _parsed(text: str) -> Any:
    from retrieval.parsing.parsed import Parsed

    return Parsed(text, "", "prose", "text/plain")


_scalars = st.one_of(
    st.integers(-3, 3),
    st.booleans(),
    st.sampled_from(["a", "B", "é", "1", "2.5", "", "10"]),
    st.floats(allow_nan=False),
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, postgres_address: str) -> Iterator[tuple[DocumentStore, ...]]:
    """Stores of the same documents, each with another value of a field, in SQLite and in PostgreSQL."""
    values = [1, 0, 2.5, True, False, "a", "B", "é", "1", "", -1, "10", 10, None]
    with engine_of(postgres_address) as engine:
        opened = (
            DocumentStore(tmp_path_factory.mktemp("both") / "documents.db"),
            DocumentStore(PostgresDatabase(engine)),
        )
        for store in opened:
            number = store.rights.create("ana", "mine").id
            with store.database.writing() as db:
                for at, value in enumerate(values):
                    metadata = json.dumps({} if value is None else {"field": value})
                    db.execute(
                        """INSERT INTO documents (collection, source, version, title, media_type, bytes, characters,
                           metadata, text, owned, created_at, updated_at)
                           VALUES (?, ?, '1', 'B', 'text/plain', 1, 1, ?, '', FALSE, ?, 2.5)""",
                        (number, str(at), metadata, float(at)),
                    )
        yield opened
        for store in opened:
            store.close()


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(["field", "source", "title", "document", "created_at", 'fi"eld', "none such", "a.b"]),
    operator=st.sampled_from(["eq", "ne", "gt", "gte", "lt", "lte", "in"]),
    value=_scalars,
)
def test_filters_mean_what_they_mean_in_sqlite(
    both: tuple[DocumentStore, ...], name: str, operator: str, value: Any
) -> None:
    if name in ("source", "title") and isinstance(value, float):
        return  # SQLite writes such numbers its own way
    filters = {name: {operator: [value, "x"] if operator == "in" else value}}
    as_sql(filters)
    found = [store.matching([1], filters) for store in both]
    assert found[0] == found[1], filters


def test_a_connection_that_broke_is_made_anew(library: Library, postgres_address: str) -> None:
    library.add("ana", library.collection("ana").id, DAMS[:2])
    with psycopg.connect(postgres_address, autocommit=True) as db:
        ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid != pg_backend_pid() AND "
        (count,) = db.execute(f"{ended} application_name = 'ponder'").fetchone() or (0,)
    assert count and library.search(Query("ana", "dam")).hits


def test_an_error_leaves_without_the_words_of_users(library: Library) -> None:
    library.collection("ana", "a secret name")
    with pytest.raises(StoreError, match="duplicate key value") as told, library.store.database.writing() as db:
        db.execute("INSERT INTO collections (name, owner, created_at) VALUES (?, ?, 0)", ("a secret name", "ana"))
    assert "secret" not in str(told.value) and told.value.sqlstate == "23505" and not told.value.is_away
    assert library.collection("ana", "another").id  # the connection is of use


def test_a_text_with_nul_comes_back_the_same(library: Library) -> None:
    library.add(
        "ana",
        library.collection("ana").id,
        [Text("a\0b", "A lake\0 and \ufdd0 more.", "T\0", {"m": "x\0", "half": "\ud83d"})],
    )
    (document,) = library.store.documents("ana")
    assert (document.source, document.title) == ("a\0b", "T\0")
    for filters in ({"source": "a\0b"}, {"title": "T\0"}):
        assert library.search(Query("ana", "lake", filters=filters)).hits
    assert not library.search(Query("ana", "lake", filters={"half": "x"})).hits
    library.add("ana", library.collection("ana").id, [Text("b", "A lake.", metadata={"m": "x\0"})])
    assert [hit.passage.source for hit in library.search(Query("ana", "lake", filters={"m": "x\0"})).hits] == ["b"]


def test_a_database_of_a_newer_ponder_is_refused(library: Library, engine: Engine) -> None:
    with library.store.database.writing() as db:
        db.execute("INSERT INTO document_migrations (name) VALUES ('9-tomorrow')")
    with pytest.raises(NewerFile, match="9-tomorrow"):
        PostgresDatabase(engine)


def test_without_pgvector_it_is_said_how_to_get_it() -> None:
    with (
        postgres.cluster(postgres.without_pgvector()) as address,
        engine_of(address) as engine,
        pytest.raises(StoreError, match="no pgvector.*accepted: a server with the extension installed"),
    ):
        PostgresDatabase(engine)
