"""A person's documents in one folder: the store, the indexes, the embedder and the ingest that feeds them, opened together.

    with Library.open(Path("data/documents")) as library:
        job = library.ingest.submit("ana", library.collection("ana").id, [Given("notes.md", Path("notes.md"))])
        library.ingest.wait(job.id)
        print(library.search("ana", "when was the dam finished?").hits[0].passage.text)
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

from retrieval.embedding import Embedder, SentenceEmbedder
from retrieval.ingest import Ingest
from retrieval.search import Found, Searcher
from retrieval.store import Collection, DocumentStore
from retrieval.views import Views

DEFAULT_COLLECTION = "Documents"


class InUse(Exception):
    """Another process has the folder open."""


class Library:
    """Everything of one folder, which one process at a time may have open. Safe in threads."""

    def __init__(self, store: DocumentStore, views: Views, embedder: Embedder, ingest: Ingest, lock: IO[str]) -> None:
        self.store, self.views, self.embedder, self.ingest = store, views, embedder, ingest
        self._lock = lock
        self._searcher = Searcher(store, views, embedder)
        self.search: Callable[..., Found] = self._searcher.search

    @classmethod
    def open(cls, folder: Path, embedder: Embedder | None = None) -> Library:
        """
        Raises:
            InUse: another process has it open.
            OSError, sqlite3.Error: the folder cannot be used.
        """
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise InUse(f"Another process has the documents in {folder} open.") from None
        embedder = embedder or SentenceEmbedder()
        store = DocumentStore(folder / "documents.db")
        views = Views(store, embedder, folder / "index")
        views.catch_up()
        ingest = Ingest(store, views, embedder)
        ingest.start()
        return cls(store, views, embedder, ingest, lock)

    def collection(self, user: str, name: str = DEFAULT_COLLECTION) -> Collection:
        """The user's collection of that name, made if there is none."""
        return self.store.create_collection(user, name)

    def close(self) -> None:
        self.ingest.stop()
        self.views.close()
        self.store.close()
        self._lock.close()

    def __enter__(self) -> Library:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
