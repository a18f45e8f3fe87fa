"""Jobs: what is read again, what is embedded again, what a failure costs, and what a user sees meanwhile."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from sqlalchemy import Engine

from retrieval import Given, Library, NotAllowed, NotFound, OverQuota, document_database
from retrieval.embedding import Vectors
from retrieval.ingest import said
from retrieval.jobs import JobStatus
from retrieval.parsing.parsed import Parsed
from tests.app import postgres
from tests.retrieval.conftest import add, admit, hits
from tests.retrieval.words import WordEmbedder

pytestmark = pytest.mark.slow
DATABASES = postgres.DATABASES

Write = Callable[[str, str | bytes], Path]


class Counting(WordEmbedder):
    """Counts the texts that are embedded, and waits at a gate if there is one."""

    def __init__(self) -> None:
        self.texts = list[str]()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def embed(self, texts: Sequence[str]) -> Vectors:
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(30)
        self.texts += texts
        return super().embed(texts)


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def counted(tmp_path: Path, counting: Counting, engine: Engine | None) -> Library:
    return Library.open(tmp_path / "counted", counting, engine=engine)


def _page(number: int, word: str = "stone") -> str:
    return "\n\n".join(f"# Part {part} of {number}\n\n" + f"A {word} of part {part}. " * 60 for part in range(4))


def test_files_become_documents_that_are_found(library: Library, write: Write) -> None:
    job = add(library, "ana", write("a.md", "# Dams\n\nOrsk was finished in 1931."), write("b.txt", "A green lake."))
    assert job.status == "done" and job.counts == {"done": 2}
    assert [hit.passage.source for hit in hits(library, "ana", "Orsk finished", 1)] == ["a.md"]
    assert [document.title for document in library.store.documents("ana")] == ["b.txt", "Dams"]


def test_the_same_bytes_are_not_read_again(counted: Library, counting: Counting, write: Write) -> None:
    with counted:
        path = write("a.md", _page(1))
        add(counted, "ana", path)
        counting.texts.clear()
        assert add(counted, "ana", path).counts == {"unchanged": 1}
        assert not counting.texts


def test_a_change_embeds_only_what_changed(counted: Library, counting: Counting, write: Write) -> None:
    with counted:
        add(counted, "ana", write("a.md", _page(1)))
        before = len(counting.texts)
        add(counted, "ana", write("a.md", _page(1).replace("stone of part 3", "brick of part 3")))
        assert 0 < len(counting.texts) - before < before / 2
        assert all("part 3" in text for text in counting.texts[before:])


def test_a_changed_document_keeps_its_number_and_loses_its_old_text(library: Library, write: Write) -> None:
    add(library, "ana", write("a.md", "The old word is zebra."))
    (old,) = library.store.documents("ana")
    add(library, "ana", write("a.md", "The new word is giraffe."))
    (new,) = library.store.documents("ana")
    assert new.id == old.id and new.version != old.version and new.created_at == old.created_at
    assert all("zebra" not in hit.passage.text for hit in hits(library, "ana", "zebra"))


def test_one_bad_file_costs_only_itself(library: Library, write: Write, tmp_path: Path) -> None:
    job = add(
        library, "ana", write("a.md", "One lake."), write("b.pdf", b"%PDF-1.4\nbroken"), tmp_path / "none.txt",
        write("c.txt", ""), write("d.md", "Another lake."),
    )  # fmt: skip
    assert job.counts == {"done": 2, "failed": 3} and job.status == "done"
    errors = {file.source: file.error or "" for file in job.files if file.status == "failed"}
    assert "damaged" in errors["b.pdf"] and "not there" in errors["none.txt"] and "empty" in errors["c.txt"]
    assert len(hits(library, "ana", "lake")) == 2


def test_a_source_given_twice_in_one_job_is_one_document(library: Library, write: Write) -> None:
    first, second = write("x/a.md", "First words."), write("y/a.md", "Second words.")
    job = add(library, "ana", first, second)
    assert [file.status for file in job.files] == ["failed", "done"] and "same name" in (job.files[0].error or "")
    (document,) = library.store.documents("ana")
    assert library.store.text("ana", document.id) == "Second words."


def test_nothing_of_a_document_is_seen_before_all_of_it(counted: Library, counting: Counting, write: Write) -> None:
    with counted:
        add(counted, "ana", write("a.md", "The old word is zebra."))
        counting.gate.clear()
        path = write("a.md", "The new word is giraffe. " * 400)
        job = counted.ingest.submit("ana", counted.collection("ana").id, [Given("a.md", path)])
        assert counting.waiting.wait(30)
        assert "zebra" in counted.store.text("ana", 1)
        progress = counted.ingest.jobs.get(job.id).files[0]
        assert progress.status == "embedding" and progress.chunks > progress.embedded
        counting.gate.set()
        assert counted.ingest.wait(job.id, 60).status == "done"
        assert "giraffe" in hits(counted, "ana", "word")[0].passage.text


def test_a_cancelled_job_leaves_what_is_done_and_nothing_else(
    counted: Library, counting: Counting, write: Write
) -> None:
    with counted:
        counting.gate.clear()
        number = counted.collection("ana").id
        paths = [write(f"{n}.md", _page(n, f"word{n}") * 30) for n in range(3)]
        running = counted.ingest.submit("ana", number, [Given(path.name, path) for path in paths])
        waiting = counted.ingest.submit("ana", number, [Given("later.md", write("later.md", "Later."))])
        assert counting.waiting.wait(30)
        counted.ingest.cancel("ana", waiting.id)
        counted.ingest.cancel("ana", running.id)
        counting.gate.set()
        for job in (running.id, waiting.id):
            ended = counted.ingest.wait(job, 60)
            assert ended.status == "cancelled"
            assert {file.status for file in ended.files} <= {"done", "cancelled"}
        done = {file.source for file in counted.ingest.jobs.get(running.id).files if file.status == "done"}
        assert {document.source for document in counted.store.documents("ana")} == done


def test_nobody_cancels_or_sees_the_job_of_another(library: Library, write: Write) -> None:
    job = add(library, "ana", write("a.md", "A lake."))
    for asked in (lambda: library.ingest.cancel("ben", job.id), lambda: library.ingest.jobs.get(job.id, "ben")):
        with pytest.raises(NotFound, match="There is no job"):
            asked()
    assert library.ingest.jobs.of("ben") == [] and library.ingest.jobs.of("ana") == [job.id]


def test_a_job_for_a_collection_of_others_is_refused(library: Library, write: Write) -> None:
    number = library.collection("ana").id
    path = write("a.md", "A lake.")
    with pytest.raises(NotFound):
        library.ingest.submit("ben", number, [Given("a.md", path)])
    admit(library, "ana", number, "ben", "reader")
    with pytest.raises(NotAllowed):
        library.ingest.submit("ben", number, [Given("a.md", path)])


def test_a_right_that_goes_meanwhile_fails_the_files(counted: Library, counting: Counting, write: Write) -> None:
    with counted:
        number = counted.collection("ana").id
        admit(counted, "ana", number, "ben", "writer")
        counting.gate.clear()
        job = counted.ingest.submit("ben", number, [Given("a.md", write("a.md", "A lake."))])
        assert counting.waiting.wait(30)
        counted.rights.remove("ana", number, "ben")
        counting.gate.set()
        ended = counted.ingest.wait(job.id, 60)
        assert ended.counts == {"failed": 1} and "no collection" in (ended.files[0].error or "")
        assert counted.store.documents("ana") == []


def test_an_owned_file_lives_as_long_as_its_document(library: Library) -> None:
    number = library.collection("ana").id

    def upload(text: str) -> Path:
        path = library.new_file()
        path.write_text(text)
        library.ingest.wait(library.ingest.submit("ana", number, [Given("a.md", path, owned=True)]).id, 60)
        return path

    first = upload("A lake.")
    assert first.exists()
    assert not upload("A lake.").exists()  # unchanged: the copy is not needed
    second = upload("A pond.")
    assert second.exists() and not first.exists()
    library.delete("ana", library.store.documents("ana")[0].id)
    assert not second.exists()


def test_a_job_is_over_once_the_copies_nothing_needs_are_gone(
    library: Library, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = library.collection("ana").id
    library.ingest.wait(library.ingest.submit("ana", number, [Given("a.md", write("a.md", "A lake."))]).id, 60)
    copy = library.new_file()
    copy.write_text("A lake.")
    left: list[bool] = []
    end = library.ingest.jobs.end

    def looked_at(job: str, status: JobStatus) -> None:
        left.append(copy.exists())
        end(job, status)

    monkeypatch.setattr(library.ingest.jobs, "end", looked_at)
    job = library.ingest.submit("ana", number, [Given("a.md", copy, owned=True)])
    library.ingest.wait(job.id, 60)
    assert left == [False]


def test_vectors_go_with_the_last_document_that_has_their_text(library: Library, write: Write) -> None:
    add(library, "ana", write("a.md", "The same lake."), write("b.md", "The same lake."))
    add(library, "ben", write("a.md", "The same lake."))
    for user in ("ana", "ben"):
        for document in library.store.documents(user):
            library.delete(user, document.id)
    assert library.store.database.rows("SELECT * FROM vectors") == []


def test_the_index_is_made_again_from_the_truth(tmp_path: Path, embedder: WordEmbedder, write: Write) -> None:
    folder = tmp_path / "library"
    with Library.open(folder, embedder) as library:
        add(library, "ana", write("a.md", "The dam of Orsk."), write("b.md", "A green lake."))
        before = [(hit.passage.source, round(hit.score, 5)) for hit in hits(library, "ana", "green lake")]
    for name in ("dense.json", "lexical/generation.json"):
        (folder / "index" / name).write_text("damaged")
    for file in (folder / "index").glob("*.faiss"):
        file.write_bytes(b"damaged")
    with Library.open(folder, embedder) as library:
        after = [(hit.passage.source, round(hit.score, 5)) for hit in hits(library, "ana", "green lake")]
        assert after == before


def test_a_full_disk_is_said_and_the_job_goes_on_later(
    tmp_path: Path, embedder: WordEmbedder, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, job = _left_undone(tmp_path, embedder, write)
    with monkeypatch.context() as patch:
        patch.setattr(document_database, "_SETTINGS", f"{document_database._SETTINGS} PRAGMA max_page_count = 40;")
        with Library.open(folder, embedder) as library:
            library.ingest.wait(job, 60)
            assert "The disk is full" in (library.ingest.stalled(job) or "")
            assert len(hits(library, "ana", "lake")) == 1  # what was there is there
    with Library.open(folder, embedder) as library:
        assert library.ingest.wait(job, 60).counts == {"done": 1}
        assert len(library.store.documents("ana")) == 2


def test_a_disk_that_cannot_be_written_to_is_said_and_nothing_is_lost(
    tmp_path: Path, embedder: WordEmbedder, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, job = _left_undone(tmp_path, embedder, write)
    with monkeypatch.context() as patch:
        patch.setattr(document_database, "_SETTINGS", f"{document_database._SETTINGS} PRAGMA query_only = 1;")
        with pytest.raises(sqlite3.OperationalError, match="readonly") as raised:
            Library.open(folder, embedder)
        assert "cannot be written to" in said(raised.value)
    with Library.open(folder, embedder) as library:
        assert library.ingest.wait(job, 60).counts == {"done": 1}


def _left_undone(tmp_path: Path, embedder: WordEmbedder, write: Write) -> tuple[Path, str]:
    """A library with a document, closed while a job for another waits."""
    folder = tmp_path / "library"
    with Library.open(folder, embedder) as library:
        add(library, "ana", write("a.md", "A lake."))
        job = library.ingest.jobs.create("ana", 1, [Given("b.md", write("b.md", _page(1) * 20))])
    return folder, job.id


class Slow:
    """A parser whose files are never done, except by being cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.futures: list[Future[Parsed]] = []

    def submit(self, path: Path, name: str, root: Path | None = None) -> Future[Parsed]:
        self.futures.append(Future())
        return self.futures[-1]

    def result(self, future: Future[Parsed]) -> Parsed:
        self.begun.set()
        return future.result(30)

    def close(self) -> None:
        pass


@pytest.fixture
def slow(
    tmp_path: Path, embedder: WordEmbedder, monkeypatch: pytest.MonkeyPatch, engine: Engine | None
) -> Iterator[tuple[Library, Slow]]:
    parser = Slow()
    monkeypatch.setattr("retrieval.ingest.Parser", lambda: parser)
    with Library.open(tmp_path / "slow", embedder, engine=engine) as library:
        yield library, parser


def test_a_file_that_is_being_read_does_not_hold_up_a_cancel(slow: tuple[Library, Slow], write: Write) -> None:
    library, parser = slow
    paths = [write(f"{n}.md", "A lake.") for n in range(3)]
    job = library.ingest.submit("ana", library.collection("ana").id, [Given(p.name, p) for p in paths])
    assert parser.begun.wait(10)
    library.ingest.cancel("ana", job.id)
    assert library.ingest.wait(job.id, 10).counts == {"cancelled": 3}
    assert all(future.cancelled() for future in parser.futures)


def test_a_defect_of_a_parser_costs_its_file_alone(slow: tuple[Library, Slow], write: Write) -> None:
    library, parser = slow
    paths = [write(f"{n}.md", "A lake.") for n in range(2)]
    job = library.ingest.submit("ana", library.collection("ana").id, [Given(p.name, p) for p in paths])
    assert parser.begun.wait(10)
    parser.futures[0].set_exception(AttributeError("a defect"))
    parser.futures[1].set_result(Parsed("A lake.", "", "prose", "text/plain"))
    ended = library.ingest.wait(job.id, 10)
    assert [file.status for file in ended.files] == ["failed", "done"]
    assert "internal error (AttributeError)" in (ended.files[0].error or "")


def test_users_take_turns_however_much_one_of_them_sent(
    counted: Library, counting: Counting, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrieval.ingest.TURN_S", 0.0)
    monkeypatch.setattr("retrieval.ingest.GROUP_S", 0.0)
    ana, bob = counted.collection("ana"), counted.collection("bob")
    counting.gate.clear()
    many = [Given(f"{at}.txt", write(f"{at}.txt", f"Text number {at}.")) for at in range(12)]
    first = counted.ingest.submit("ana", ana.id, many)
    assert counting.waiting.wait(30)  # the first of them is at hand
    second = counted.ingest.submit("ana", ana.id, [Given("late.txt", write("late.txt", "Late."))])
    other = counted.ingest.submit("bob", bob.id, [Given("bob.txt", write("bob.txt", "Only one text."))])
    ended = dict[str, int]()  # files of Ana's first job that were done when each ended
    monkeypatch.setattr(counted.ingest.jobs, "end", _noting(counted, first.id, ended))
    counting.gate.set()
    for job in (other, first, second):
        assert counted.ingest.wait(job.id, 60).status == "done"
    assert ended[other.id] < len(many) == ended[first.id] == ended[second.id]
    assert list(ended) == [other.id, first.id, second.id]
    counted.close()


def _noting(library: Library, job: str, ended: dict[str, int]) -> Callable[[str, JobStatus], None]:
    end = library.ingest.jobs.end

    def noting(which: str, status: JobStatus) -> None:
        ended[which] = library.ingest.jobs.get(job).counts.get("done", 0)
        end(which, status)

    return noting


def test_an_owner_keeps_no_more_than_the_quota(
    tmp_path: Path, embedder: WordEmbedder, write: Write, engine: Engine | None
) -> None:
    with Library.open(tmp_path / "quota", embedder, quota_bytes=100, engine=engine) as library:
        mine = library.collection("ana")
        admit(library, "ana", mine.id, "bob", "writer")
        half, more = write("half.txt", "x" * 60), write("more.txt", "y" * 41)
        assert add(library, "ana", half).status == "done"
        for user in ("ana", "bob"):
            with pytest.raises(OverQuota, match="41 bytes, and of the 100 .* 60 are in use; accepted: at most 40 more"):
                library.ingest.submit(user, mine.id, [Given("more.txt", more)])
        changed = library.ingest.submit("ana", mine.id, [Given("half.txt", write("other.txt", "z" * 99))])
        assert library.ingest.wait(changed.id, 30).counts == {"done": 1}  # it takes the other's place
        assert add(library, "bob", half).status == "done"  # who has room in a collection of his own
        library.delete("ana", library.store.documents("ana")[0].id)
        assert add(library, "ana", more).status == "done"
