"""Collections: who reads, writes, shares and deletes them, and what the others are told."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine

from retrieval import (
    Given,
    Library,
    Member,
    NotAllowed,
    NotFound,
    Query,
    SourceTaken,
    Text,
    TooManyInvited,
    document_database,
    rights,
)
from retrieval.browse import Browser
from retrieval.document_store import DocumentStore
from tests.app import postgres
from tests.retrieval.conftest import admit
from tests.retrieval.words import WordEmbedder

DATABASES = postgres.DATABASES_SLOW


def _shared(library: Library) -> tuple[int, int]:
    """A collection of Ana's that Ben may read and Cy may write to, with a document."""
    number = library.collection("ana", "Dams").id
    library.add("ana", number, [Text("orsk", "The dam of Orsk was finished in 1931.")])
    admit(library, "ana", number, "ben", "reader")
    admit(library, "ana", number, "cy", "writer")
    return number, library.store.documents("ana")[0].id


def test_a_collection_is_made_once_for_a_name(library: Library) -> None:
    assert library.collection("ana", "Dams") == library.collection("ana", " Dams ")
    assert library.collection("ben", "Dams").id != library.collection("ana", "Dams").id


@pytest.mark.parametrize("name", ["", "   ", "x" * 201])
def test_a_name_that_is_none_is_refused(library: Library, name: str) -> None:
    with pytest.raises(ValueError, match="1 to 200 characters"):
        library.collection("ana", name)


def test_a_reader_reads_and_changes_nothing(library: Library) -> None:
    number, document = _shared(library)
    assert library.store.text("ben", document).startswith("The dam of Orsk")
    for forbidden in (
        lambda: library.add("ben", number, [Text("mine", "Not welcome.")]),
        lambda: library.delete("ben", document),
        lambda: library.rights.invite("ben", number, "dan", "reader"),
        lambda: library.delete_collection("ben", number),
    ):
        with pytest.raises(NotAllowed, match="A reader may not"):
            forbidden()
    assert len(library.store.documents("ana")) == 1


def test_a_writer_adds_and_deletes_documents_but_does_not_share(library: Library) -> None:
    number, document = _shared(library)
    library.add("cy", number, [Text("money", "The city paid for the dam.")])
    library.delete("cy", document)
    assert [each.source for each in library.store.documents("ana")] == ["money"]
    with pytest.raises(NotAllowed, match="takes the owner"):
        library.rights.invite("cy", number, "dan", "reader")


def test_a_stranger_is_told_that_nothing_is_there(library: Library) -> None:
    number, document = _shared(library)
    for asked in (
        lambda: library.store.document("eve", document),
        lambda: library.store.text("eve", document),
        lambda: library.store.pages("eve", document),
        lambda: library.store.file("eve", document),
        lambda: library.store.documents("eve", number),
        lambda: library.rights.collection("eve", number),
        lambda: library.rights.members("eve", number),
        lambda: library.delete("eve", document),
        lambda: library.delete_collection("eve", number),
        lambda: library.search(Query("eve", "dam", collections=frozenset({number}))),
    ):
        with pytest.raises(NotFound, match="There is no"):
            asked()
    assert library.store.documents("eve") == [] and library.rights.collections("eve") == []


def test_what_is_not_readable_sounds_like_what_is_not_there(library: Library) -> None:
    _, document = _shared(library)
    with pytest.raises(NotFound) as hidden:
        library.store.document("eve", document)
    with pytest.raises(NotFound) as absent:
        library.store.document("ana", document + 1)
    assert str(hidden.value).replace(str(document), "N") == str(absent.value).replace(str(document + 1), "N")


def test_a_right_that_is_taken_away_is_gone_at_once(library: Library) -> None:
    number, _ = _shared(library)
    assert library.search(Query("ben", "Orsk", collections="all")).hits
    library.rights.remove("ana", number, "ben")
    assert not library.search(Query("ben", "Orsk", collections="all")).hits


def test_collections_are_listed_with_the_role_of_who_asks(library: Library) -> None:
    number, _ = _shared(library)
    library.collection("ben", "Mine")
    assert [(c.name, c.owner, c.role, c.documents) for c in library.rights.collections("ben")] == [
        ("Mine", "ben", "owner", 0),
        ("Dams", "ana", "reader", 1),
    ]
    assert library.rights.members("cy", number) == [Member("ben", "reader", "member"), Member("cy", "writer", "member")]


def test_an_invitation_gives_no_right_until_it_is_accepted(library: Library) -> None:
    number, document = _shared(library)
    library.rights.invite("ana", number, "eve", "reader")
    assert library.rights.collections("eve") == [] and library.store.documents("eve") == []
    assert not library.search(Query("eve", "Orsk", collections="all")).hits
    with pytest.raises(NotFound):
        library.store.text("eve", document)
    (invitation,) = library.rights.invitations("eve")
    assert (invitation.collection, invitation.name, invitation.owner, invitation.role) == (
        number, "Dams", "ana", "reader"
    )  # fmt: skip
    library.rights.accept("eve", number)
    assert library.store.text("eve", document) and library.rights.invitations("eve") == []


def test_what_is_shared_is_found_only_where_it_is_asked_for(library: Library) -> None:
    number, _ = _shared(library)
    assert not library.search(Query("ben", "Orsk")).hits
    assert library.search(Query("ben", "Orsk", collections="all")).hits
    assert library.search(Query("ben", "Orsk", collections=frozenset({number}))).hits
    assert Browser(library, "ben").search("Orsk") == [] and Browser(library, "ben").list() == []


def test_an_invitation_that_is_declined_is_gone_for_the_user_and_open_for_the_owner(library: Library) -> None:
    number, _ = _shared(library)
    for user in ("eve", "nobody at all"):
        library.rights.invite("ana", number, user, "reader")
    library.rights.decline("eve", number)
    library.rights.invite("ana", number, "eve", "writer")
    assert library.rights.invitations("eve") == []
    for answer in (library.rights.accept, library.rights.decline):
        with pytest.raises(NotFound, match="no invitation"):
            answer("eve", number)
    told = [(each.user, each.status) for each in library.rights.members("ana", number)]
    assert told == [("ben", "member"), ("cy", "member"), ("eve", "invited"), ("nobody at all", "invited")]


def test_only_the_owner_sees_who_is_invited(library: Library) -> None:
    number, _ = _shared(library)
    library.rights.invite("ana", number, "eve", "reader")
    assert [each.user for each in library.rights.members("cy", number)] == ["ben", "cy"]


def test_a_member_leaves_and_takes_nobody_along(library: Library) -> None:
    number, document = _shared(library)
    with pytest.raises(NotAllowed, match="takes the owner"):
        library.rights.remove("ben", number, "cy")
    assert library.rights.remove("ben", number, "ben")
    with pytest.raises(NotFound):
        library.store.text("ben", document)
    with pytest.raises(NotFound):
        library.rights.remove("ben", number, "ben")
    assert [each.user for each in library.rights.members("ana", number)] == ["cy"]


def test_a_member_gets_another_role_without_being_asked_again(library: Library) -> None:
    number, _ = _shared(library)
    assert library.rights.invite("ana", number, "ben", "writer") == Member("ben", "writer", "member")
    assert library.rights.invitations("ben") == []
    library.add("ben", number, [Text("mine", "Welcome now.")])


def test_open_invitations_are_bounded(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    number, _ = _shared(library)
    monkeypatch.setattr(rights, "MAX_INVITATIONS", 2)
    library.rights.invite("ana", number, "dan", "reader")
    library.rights.invite("ana", number, "eve", "reader")
    library.rights.invite("ana", number, "eve", "writer")
    with pytest.raises(TooManyInvited, match="2 open invitations"):
        library.rights.invite("ana", number, "fay", "reader")


def test_members_of_before_there_were_invitations_stay_members(tmp_path: Path) -> None:
    path = tmp_path / "documents.db"
    with closing(sqlite3.connect(path)) as old, old:
        old.execute(  # as sqlite-utils 3 and 4 wrote it
            "CREATE TABLE _sqlite_migrations (id INTEGER PRIMARY KEY, migration_set TEXT, name TEXT, applied_at TEXT)"
        )
        old.execute("INSERT INTO _sqlite_migrations VALUES (1, 'retrieval', '1-documents', '2026-11-20 10:00:00')")
        for statement in document_database.STEPS["1-documents"]:
            old.execute(statement)
        old.execute("INSERT INTO collections VALUES (1, 'Dams', 'ana', 0.0)")
        old.execute("INSERT INTO members VALUES (1, 'ben', 'reader'), (1, 'cy', 'writer')")
    with closing(DocumentStore(path)) as store:
        assert store.rights.members("ana", 1) == [Member("ben", "reader", "member"), Member("cy", "writer", "member")]
        assert store.rights.readable("ben") == {1} and store.rights.readable("ben", "own") == frozenset()


def test_a_document_that_came_while_a_job_waited_is_not_replaced(
    tmp_path: Path, embedder: WordEmbedder, engine: Engine | None
) -> None:
    def given(user: str, *names: str) -> list[Given]:
        (tmp_path / user).mkdir()
        for name in names:
            (tmp_path / user / name).write_text(f"A lake of {user}.")
        return [Given(name, tmp_path / user / name) for name in names]

    with Library.open(tmp_path / "library", embedder, engine=engine) as library:
        number = library.collection("ana").id
        admit(library, "ana", number, "ben", "writer")
        waiting = library.ingest.jobs.create("ben", number, given("ben", "a.txt", "b.txt"))  # worked off below
        library.ingest.wait(library.ingest.submit("ana", number, given("ana", "a.txt")).id, 60)
    with Library.open(tmp_path / "library", embedder, engine=engine) as library:
        files = library.ingest.wait(waiting.id, 60).files
        assert [file.status for file in files] == ["failed", "done"] and "another user added" in (files[0].error or "")
        texts = {each.source: library.store.text("ana", each.id) for each in library.store.documents("ana")}
    assert texts == {"a.txt": "A lake of ana.", "b.txt": "A lake of ben."}


def test_documents_of_before_are_their_owners(tmp_path: Path) -> None:
    path = tmp_path / "documents.db"
    with closing(sqlite3.connect(path)) as old, old:
        old.execute(
            "CREATE TABLE _sqlite_migrations (id INTEGER PRIMARY KEY, migration_set TEXT, name TEXT, applied_at TEXT)"
        )
        for number, name in enumerate(("1-documents", "2-invitations"), 1):
            old.execute("INSERT INTO _sqlite_migrations VALUES (?, 'retrieval', ?, '2026-11-20')", (number, name))
            for statement in document_database.STEPS[name]:
                old.execute(statement)
        old.execute("INSERT INTO collections VALUES (1, 'Dams', 'ana', 0.0)")
        old.execute(
            """INSERT INTO documents (collection, source, version, title, media_type, bytes, characters, text, owned,
               created_at, updated_at) VALUES (1, 'a.txt', '1:0', 'a.txt', 'text/plain', 1, 1, 'a', 0, 0.0, 0.0)"""
        )
    with closing(DocumentStore(path)) as store, store.database.reading() as db:
        rights.check_source(db, "ana", 1, "a.txt")
        with pytest.raises(SourceTaken):
            rights.check_source(db, "ben", 1, "a.txt")


def test_a_file_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "documents.db"
    DocumentStore(path).close()
    with closing(sqlite3.connect(path)) as newer, newer:
        newer.execute("INSERT INTO _sqlite_migrations VALUES (9, 'retrieval', '9-tomorrow', '2030-01-01')")
    before = path.read_bytes()
    with pytest.raises(document_database.NewerFile, match="9-tomorrow"):
        DocumentStore(path)
    assert path.read_bytes() == before
