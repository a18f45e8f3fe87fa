"""A folder of documents: the store, the indexes, the embedder and the ingest that feeds them, opened together.

with Library.open(Path("data/documents")) as library:
    mine = library.collection("ana")
    job = library.ingest.submit("ana", mine.id, [Given("notes.md", Path("notes.md"))])
    library.ingest.wait(job.id)
    print(library.search(Query("ana", "when was the dam finished?")).hits[0].passage.text)
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, TypeVar

from pebble import ProcessFuture

from retrieval.document_store import DocumentStore
from retrieval.durable import make_folder
from retrieval.embedding import Embedder, SentenceEmbedder
from retrieval.evidence import Rarity
from retrieval.index.hybrid import Query, Scorer, Searcher
from retrieval.index.publish import Publisher, Text
from retrieval.index.search_index import SearchIndex
from retrieval.index.views import Views
from retrieval.ingest import Ingest
from retrieval.jobs import Given, JobStore
from retrieval.parsing.parsed import Box
from retrieval.parsing.parser import Parser
from retrieval.parsing.sniff import PDF
from retrieval.records import Among, AttachedFile, Collection, Found, NotFound
from retrieval.sentence_ranking import SentenceRanker

if TYPE_CHECKING:
    from sqlalchemy import Engine

T = TypeVar("T")

DEFAULT_COLLECTION = "Documents"
CLEARED_UP_S = 10.0  # for a server that starts to delete the leftovers of those before it
DETACHED_S = 10.0  # for a cancelled job to end
VIEWED_S = 12.0  # limit for rendering a page or finding the boxes of a span


class InUse(Exception):
    """Another process has the folder open; `holder` is its process id."""

    def __init__(self, folder: Path, holder: str) -> None:
        super().__init__(f"Another process ({holder}) has the documents in {folder} open.")
        self.holder = holder


class Library:
    """Everything of one folder, which one process at a time may have open where its documents are SQLite's. Safe in
    threads."""

    def __init__(
        self,
        folder: Path,
        store: DocumentStore,
        views: SearchIndex,
        embedder: Embedder,
        parts: ExitStack,
        quota_bytes: int | None = None,
        jobs: JobStore | None = None,
    ) -> None:
        self.folder, self.store, self.rights, self.views, self.embedder = folder, store, store.rights, views, embedder
        self.publisher = Publisher(store, views, embedder)
        self.ingest = Ingest(store, views, self.publisher, quota_bytes=quota_bytes, jobs=jobs)
        self._searcher = Searcher(store, views, embedder)
        self.ranker = SentenceRanker(embedder)
        # Beside the one that ingests, which may be busy for long; two, so that one file cannot keep all others waiting.
        self._viewer = Parser(workers=2, deadline_s=VIEWED_S, max_deadline_s=VIEWED_S)
        self._parts = parts  # to be closed, the last opened first

    @classmethod
    def open(
        cls,
        folder: Path,
        embedder: Embedder | None = None,
        quota_bytes: int | None = None,
        engine: Engine | None = None,
    ) -> Library:
        """
        Args:
            engine: of a PostgreSQL database that has documents, indexes and jobs in the folder's place. Files stay in
                the folder, which several servers of the database share, at the same path.

        Raises:
            InUse: another process has it open, and not as this one.
            OSError, sqlite3.Error, NewerFile: the folder cannot be used.
            StoreError, NewerFile: the PostgreSQL database cannot be used.
            ValueError: the embedder's vectors are too long for its index.
        """
        make_folder(folder / "files")
        folder.chmod(0o700)
        embedder = embedder or SentenceEmbedder()
        with ExitStack() as parts:
            opened, alone = lock_folder(folder) if engine is None else _locked_with_others(folder)
            lock = parts.enter_context(opened)
            parts.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # closing is not enough: a starting child may have a copy
            store, views, jobs = _stores(folder, embedder, quota_bytes, engine)
            parts.callback(store.close)
            parts.callback(views.close)
            made = cls(folder, store, views, embedder, parts, quota_bytes, jobs)
            if alone:
                store.relocate(folder / "files")  # before `_sweep`, which deletes unreferenced files
                made._sweep()
            if engine is not None:
                fcntl.flock(lock, fcntl.LOCK_SH)
            parts.callback(made._viewer.close)
            parts.callback(made.ingest.stop)
            made.ingest.start()
            made._parts = parts.pop_all()
        return made

    def collection(self, user: str, name: str = DEFAULT_COLLECTION) -> Collection:
        """The user's collection of that name, made if there is none."""
        return self.rights.create(user, name)

    def add(self, user: str, collection: int, texts: Sequence[Text]) -> None:
        """Texts as documents, visible when this returns. Files go through `ingest`.

        Raises:
            NotFound, NotAllowed: as `DocumentStore.put`.
        """
        self.publisher.add(user, collection, texts)

    def search(self, query: Query, scorer: Scorer | None = None) -> Found:
        """The passages that answer best; see `Searcher.search`."""
        return self._searcher.search(query, scorer)

    def attach(self, user: str, name: str, source: str, path: Path) -> None:
        """Begins to read a file of ours into an attached collection, `name`, which is unique among the user's.

        Raises:
            OverQuota: the user may not keep that much.
        """
        collection = self.rights.attach(user, name)
        try:
            self.ingest.submit(user, collection, [Given(source, path, owned=True)], attached=True)
        except BaseException:
            self.store.delete_collection(user, collection, attached=True)
            raise

    def files_of(self, user: str, names: Sequence[str]) -> frozenset[int]:
        """Returns the numbers of the user's attached collections of these names, as `Query.files` takes them."""
        return frozenset(self.rights.attached(user, names).values())

    def attached(self, user: str, names: Sequence[str]) -> dict[str, AttachedFile]:
        """The user's attached files of these names, by name; without those that are not there."""
        found = dict[str, AttachedFile]()
        for name, collection in self.rights.attached(user, names).items():
            job = self.ingest.jobs.newest(collection)
            document = self.store.newest(collection)
            error: str | None = None
            if document is None:
                if job is not None:
                    error = self.ingest.stalled(job.id) or next((file.error for file in job.files), None)
                if error is None and (job is None or job.status != "running"):
                    error = "It was not read to its end, or was deleted since. Send it again."
            found[name] = AttachedFile(name, collection, document, error)
        return found

    def detach(self, user: str, names: Sequence[str]) -> int:
        """Deletes the user's attached files of these names from everything at once; returns how many documents went."""
        count = 0
        for collection in self.rights.attached(user, names).values():
            with suppress(NotFound):  # somebody else is deleting it, too
                count += self._detach(user, collection)
        return count

    def _detach(self, user: str, collection: int) -> int:
        job = self.ingest.jobs.newest(collection)
        if job is not None and job.status == "running":
            self.ingest.cancel(user, job.id)
        documents = int(self.store.newest(collection) is not None)
        self.ingest.jobs.forget(collection)  # first: without its collection nobody would find a job any more
        with self.views.changing():
            files = self.store.delete_collection(user, collection, attached=True)
        _unlink(files)
        if job is not None and job.status == "running":
            self.ingest.wait(job.id, DETACHED_S)
            self.ingest.jobs.forget(collection)
        return documents

    def rarity(self, user: str, among: Among = "own", files: frozenset[int] = frozenset()) -> Rarity:
        """Returns a function of a stem's inverse document frequency in these collections, attached ones of `files`
        among them.

        Raises:
            NotFound: there is no such collection.
        """
        return self.views.rarity(self.rights.readable(user, among, files))

    def boxes(self, user: str, document: int, start: int, end: int) -> ProcessFuture[list[Box]]:
        """Returns where characters `start` to `end` of a PDF's text stand on its pages; `viewed` takes it.

        Raises:
            NotFound: there is no such document, the user may not read it, or it has no pages or no file any more.
        """
        pages = [p for p in self.store.pages(user, document) if p.start < end and start < p.end]
        return self._viewer.boxes(*self._pdf(user, document), pages, start, end)

    def sizes(self, user: str, document: int) -> ProcessFuture[list[tuple[float, float]]]:
        """Width and height of each page of a PDF as it is shown, in points; `viewed` takes it.

        Raises:
            NotFound: as `boxes`.
        """
        return self._viewer.sizes(*self._pdf(user, document))

    def draw(self, user: str, document: int, page: int, width: int) -> ProcessFuture[bytes]:
        """A page of a PDF as a PNG `width` pixels wide, once rendered; `viewed` takes it.

        Raises:
            NotFound: as `boxes`.
        """
        return self._viewer.draw(*self._pdf(user, document), page, width)

    def viewed(self, future: ProcessFuture[T]) -> T:
        """
        Raises:
            Unreadable: the file changed, cannot be read any more, or not in time.
            NotFound: it is gone, or a link is in its place.
        """
        try:
            return self._viewer.result(future)
        except OSError as error:
            raise NotFound(f"The document's file cannot be opened: {error.strerror}.") from None

    def _pdf(self, user: str, document: int) -> tuple[Path, Path | None]:
        path, root = self.store.file(user, document)
        if self.store.document(user, document).media_type != PDF or not path.is_file():
            raise NotFound(f"Document {document} has no pages to show.")
        return path, root

    def delete(self, user: str, document: int) -> None:
        """Delete a document from everything at once.

        Raises:
            NotFound, NotAllowed: as `DocumentStore.delete`.
        """
        with self.views.changing():
            files = self.store.delete(user, document)
        _unlink(files)

    def rename(self, user: str, document: int, source: str) -> None:
        """Give a document another source.

        Raises:
            NotFound, NotAllowed, SourceTaken: as `DocumentStore.rename`.
        """
        with self.views.changing():
            self.store.rename(user, document, source)

    def delete_collection(self, user: str, collection: int) -> None:
        """Delete a collection with its documents from everything at once.

        Raises:
            NotFound, NotAllowed: as `DocumentStore.delete_collection`.
        """
        with self.views.changing():
            files = self.store.delete_collection(user, collection)
        _unlink(files)

    def delete_user(self, user: str) -> int:
        """Cancels the user's jobs, deletes the collections that the user owns, with attached ones, and takes all roles
        in others; returns how many documents went. What the user added to others' collections belongs to those, and
        stays."""
        for job in self.ingest.jobs.of(user, running=True):
            self.ingest.cancel(user, job)
        attached = self.detach(user, list(self.rights.attached(user)))
        owned = [each for each in self.rights.collections(user) if each.role == "owner"]
        for collection in owned:
            self.delete_collection(user, collection.id)
        self.rights.forget_user(user)
        self.ingest.jobs.forget_user(user)
        return attached + sum(each.documents for each in owned)

    def delete_folder(self, user: str, collection: int, folder: int) -> None:
        """Delete a folder with its documents from everything at once.

        Raises:
            NotFound, NotAllowed: as `DocumentStore.delete_folder`.
        """
        with self.views.changing():
            files = self.store.delete_folder(user, collection, folder)
        _unlink(files)

    def new_file(self) -> Path:
        """A path for a copy of ours, deleted with its document."""
        return self.folder / "files" / uuid.uuid4().hex

    def _sweep(self) -> None:
        """Delete the leftovers of a killed process: unreferenced files, vectors of texts that no chunk has."""
        needed = self.store.files() | self.ingest.jobs.files()
        _unlink(path for path in (self.folder / "files").iterdir() if path not in needed)
        if not self.ingest.jobs.any_running():
            self.store.chunks.forget_unused_vectors()

    def close(self) -> None:
        """End the job at hand after its batch, and keep the indexes for the next start."""
        self._parts.close()

    def __enter__(self) -> Library:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stores(
    folder: Path, embedder: Embedder, quota_bytes: int | None, engine: Engine | None
) -> tuple[DocumentStore, SearchIndex, JobStore | None]:
    """The store with its indexes; and its jobs where several servers share them."""
    with ExitStack() as parts:
        if engine is None:
            store = parts.enter_context(closing(DocumentStore(folder / "documents.db")))
            made: tuple[DocumentStore, SearchIndex, JobStore | None] = (
                store, Views(store.chunks, embedder, folder / "index"), None
            )  # fmt: skip
        else:
            from retrieval.postgres.leased_jobs import LeasedJobs
            from retrieval.postgres.postgres_database import PostgresDatabase
            from retrieval.postgres.postgres_index import PostgresIndex

            database = PostgresDatabase(engine)
            store = parts.enter_context(closing(DocumentStore(database)))
            index = PostgresIndex(database, store.chunks, embedder)
            made = store, index, LeasedJobs(database, store.rights, quota_bytes)
        parts.pop_all()
    return made


def _locked_with_others(folder: Path) -> tuple[IO[str], bool]:
    """Locks the folder with other servers of a database; True where there is none yet, and as long as none may come.

    Raises:
        InUse: a server has it for itself, for longer than it takes to clear up.
    """
    try:
        return lock_folder(folder)
    except InUse as error:
        lock = (folder / "lock").open("a+")
        until = time.monotonic() + CLEARED_UP_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return lock, False
            except BlockingIOError:
                if time.monotonic() > until:
                    lock.close()
                    raise error from None
                time.sleep(0.05)


def lock_folder(folder: Path) -> tuple[IO[str], bool]:
    """Locks the folder for this process alone.

    Raises:
        InUse: another one has it.
    """
    lock = (folder / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise InUse(folder, holder) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock, True


def _unlink(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
