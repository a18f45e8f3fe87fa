"""Folders as sources: two of a name are kept apart, and a document that is renamed is embedded no second time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from sqlalchemy import Engine

from retrieval import Folder, Given, Job, Library, NotAllowed, NotFound, SourceTaken
from retrieval.embedding import Vectors
from tests.app import postgres
from tests.retrieval.conftest import add, admit, hits
from tests.retrieval.words import WordEmbedder

pytestmark = pytest.mark.slow
DATABASES = postgres.DATABASES


class Counting(WordEmbedder):
    def __init__(self) -> None:
        self.texts = list[str]()

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.texts += texts
        return super().embed(texts)


def _enter(library: Library, path: str | Path, user: str = "ana") -> Folder:
    return library.store.folders.enter(user, library.collection(user).id, str(path))


def _index(library: Library, root: Path, **files: str) -> tuple[Folder, Job]:
    """Write files into a folder and index them."""
    folder = _enter(library, root)
    given = list[Given]()
    root.mkdir(parents=True, exist_ok=True)
    for stem, content in files.items():
        (root / f"{stem}.txt").write_text(content)
        given.append(Given(f"{folder.name}/{stem}.txt", root / f"{stem}.txt", root=root, folder=folder.id))
    return folder, library.ingest.wait(library.ingest.submit("ana", folder.collection, given).id, 60)


def test_a_folder_is_the_same_at_the_same_path(library: Library) -> None:
    first = _enter(library, "/srv/notes")
    assert _enter(library, "/srv/notes") == first and first.name == "notes" and first.documents == 0


def test_two_folders_of_a_name_keep_their_documents(library: Library, tmp_path: Path) -> None:
    first, _ = _index(library, tmp_path / "work" / "notes", a="A lake at work.")
    second, _ = _index(library, tmp_path / "home" / "notes", a="A lake at home.")
    assert [first.name, second.name] == ["notes", "notes (2)"]
    found = {document.source: document.folder for document in library.store.documents("ana")}
    assert found == {"notes/a.txt": first.id, "notes (2)/a.txt": second.id}
    assert [hit.passage.text for hit in hits(library, "ana", "lake work", 1)] == ["A lake at work."]


def test_documents_from_before_folders_were_recorded_become_the_folders_own(library: Library, tmp_path: Path) -> None:
    root = tmp_path / "work" / "notes"
    root.mkdir(parents=True)
    (root / "a.txt").write_text("A lake.")
    collection = library.collection("ana").id
    job = library.ingest.submit("ana", collection, [Given("notes/a.txt", root / "a.txt")])
    library.ingest.wait(job.id, 60)
    other = _enter(library, tmp_path / "home" / "notes")
    assert other.name == "notes (2)" and other.documents == 0  # the name is that of what was there
    assert _enter(library, root).documents == 1


def test_only_its_user_sees_a_folder(library: Library) -> None:
    folder = _enter(library, "/home/ana/secret plans")
    admit(library, "ana", folder.collection, "ben", "writer")
    folders = library.store.folders
    assert folders.of("ben", folder.collection) == []
    with pytest.raises(NotFound):
        folders.get("ben", folder.collection, folder.id)
    with pytest.raises(NotFound):
        library.ingest.submit("ben", folder.collection, [Given("x", Path("x"), folder=folder.id)])
    with pytest.raises(NotFound):
        library.delete_folder("ben", folder.collection, folder.id)


def test_a_reader_enters_no_folder(library: Library) -> None:
    number = library.collection("ana").id
    admit(library, "ana", number, "ben", "reader")
    with pytest.raises(NotAllowed):
        library.store.folders.enter("ben", number, "/x")


def test_a_folder_is_deleted_with_its_documents(library: Library, tmp_path: Path) -> None:
    folder, _ = _index(library, tmp_path / "notes", a="A lake.", b="A dam.")
    add(library, "ana", tmp_path / "notes" / "a.txt")
    library.delete_folder("ana", folder.collection, folder.id)
    assert [document.source for document in library.store.documents("ana")] == ["a.txt"]
    assert library.store.folders.of("ana", folder.collection) == [] and hits(library, "ana", "dam")[0].score >= 0
    assert all("dam" not in hit.passage.text for hit in hits(library, "ana", "dam"))


def test_a_job_says_which_files_are_new_and_which_changed(library: Library, tmp_path: Path) -> None:
    _, first = _index(library, tmp_path / "notes", a="A lake.", b="A dam.")
    _, second = _index(library, tmp_path / "notes", a="A lake.", b="Two dams.", c="A hill.")
    assert [file.change for file in first.files] == ["new", "new"]
    assert [(file.status, file.change) for file in second.files] == [
        ("unchanged", None), ("done", "changed"), ("done", "new"),
    ]  # fmt: skip


def test_a_file_that_moved_is_read_where_it_is(library: Library, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    for place in ("x", "y"):
        (tmp_path / place / "a.txt").write_text("A lake.")
        add(library, "ana", tmp_path / place / "a.txt")
    (document,) = library.store.documents("ana")
    assert library.store.file("ana", document.id) == (tmp_path / "y" / "a.txt", tmp_path / "y")


def test_a_renamed_document_is_found_by_its_new_name_without_embedding(tmp_path: Path, engine: Engine | None) -> None:
    counting = Counting()
    with Library.open(tmp_path / "library", counting, engine=engine) as library:
        _index(library, tmp_path / "notes", zebra="A lake.")
        (document,) = library.store.documents("ana")
        counting.texts.clear()
        library.rename("ana", document.id, "notes/giraffe.txt")
        assert counting.texts == []
        renamed = library.store.document("ana", document.id)
        assert (renamed.source, renamed.title) == ("notes/giraffe.txt", "notes/giraffe.txt")
        assert [hit.passage.source for hit in hits(library, "ana", "giraffe lake")] == ["notes/giraffe.txt"]
        assert len(library.views.scope("ana", {document.collection}, None).lexical("giraffe", 9)) == 1
        assert not library.views.scope("ana", {document.collection}, None).lexical("zebra", 9)
    with Library.open(tmp_path / "library", counting, engine=engine) as again:
        assert [hit.passage.text for hit in hits(again, "ana", "lake")] == ["A lake."]


def test_a_title_of_the_documents_own_outlives_a_rename(library: Library, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# The dam\n\nIt is of stone.")
    add(library, "ana", tmp_path / "a.md")
    (document,) = library.store.documents("ana")
    library.rename("ana", document.id, "b.md")
    assert library.store.document("ana", document.id).title == "The dam"


def test_a_source_that_is_taken_is_not_given_twice(library: Library, tmp_path: Path) -> None:
    _index(library, tmp_path / "notes", a="A lake.", b="A dam.")
    first, second = sorted(library.store.documents("ana"), key=lambda document: document.source)
    with pytest.raises(SourceTaken, match="already"):
        library.rename("ana", first.id, second.source)
    library.rename("ana", first.id, first.source)
