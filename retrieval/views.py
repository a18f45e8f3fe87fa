"""Both indexes, kept at the truth's generation: they catch up on what changed, and are made again where they can't.

Searches and changes take turns: a search sees the documents of one generation, all of each or nothing. Which chunks a
user may find is a set of bits, kept until a document or a right changes.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.dense import Bits, DenseIndex, Ids, bits
from retrieval.embedding import Embedder, Vectors
from retrieval.lexical import LexicalIndex
from retrieval.store import DocumentStore

log = logging.getLogger("ponder.retrieval")
BATCH = 10_000  # chunks that are read at once to catch up
KEPT_SETS = 64  # sets of bits


class Views:
    """The indexes under one folder. Safe in threads."""

    def __init__(self, store: DocumentStore, embedder: Embedder, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._store = store
        self._embedder = embedder
        self._folder = folder
        self._lock = _ReadersWriter()
        self.lexical = LexicalIndex(folder / "lexical")
        self.dense, self._dense_generation = self._load_dense()
        self._sets: OrderedDict[tuple[frozenset[int], frozenset[int] | None], Bits] = OrderedDict()

    def _load_dense(self) -> tuple[DenseIndex, int]:
        size, path = self._embedder.size, self._folder / "dense.faiss"
        try:
            about = json.loads((self._folder / "dense.json").read_text("utf-8"))
            if about["embedder"] == self._embedder.name:
                return DenseIndex.load(path, size), int(about["generation"])
        except (OSError, ValueError, KeyError) as error:
            log.info("The dense index is made again: %s", error)
        return DenseIndex(size), -1

    def save(self) -> None:
        """Keep the dense index on disk for the next start; the lexical one is there already."""
        with self._lock.reading():
            self.dense.save(self._folder / "dense.faiss")
            about = {"embedder": self._embedder.name, "generation": self._dense_generation}
            partial = self._folder / "dense.partial"
            partial.write_text(json.dumps(about), "utf-8")
            os.replace(partial, self._folder / "dense.json")

    def close(self) -> None:
        self.save()
        self.lexical.close()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change of the truth: no search sees it before both indexes have it."""
        with self._lock.writing():
            try:
                yield
            finally:
                self._catch_up()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a search."""
        with self._lock.reading():
            yield

    def catch_up(self) -> None:
        with self._lock.writing():
            self._catch_up()

    def _catch_up(self) -> None:
        self._catch_up_lexical()
        self._catch_up_dense()
        self._sets.clear()

    def _catch_up_lexical(self) -> None:
        held = self.lexical.generation
        if held == self._store.generation():
            return
        if held < 0:
            self.lexical.clear()
        change = self._store.changes(held)
        self.lexical.remove(change.gone.tolist())
        self.lexical.remove(change.added.tolist() if held >= 0 else ())  # a crash may have left some of them there
        for ids in _batches(change.added):
            for row in self._store.rows(ids):
                self.lexical.add(row["id"], row["collection"], row["document"], _worded(row), row["title"])
        self.lexical.commit(change.generation)

    def _catch_up_dense(self) -> None:
        if self._dense_generation == self._store.generation():
            return
        change = self._store.changes(self._dense_generation)
        self.dense.remove(change.gone)
        for ids in _batches(change.added):
            rows = self._store.rows(ids)
            vectors = self.vectors(rows)
            self.dense.add(np.array([row["id"] for row in rows], np.int64), vectors)
        self._dense_generation = change.generation

    def vectors(self, rows: Sequence[sqlite3.Row]) -> Vectors:
        """Of stored chunks, in order; what is not stored is embedded and stored."""
        known = self._store.vectors(self._embedder.name, [row["hash"] for row in rows])
        missing = {row["hash"]: embedded_text(row["title"], row["context"], row["text"]) for row in rows}
        missing = {digest: text for digest, text in missing.items() if digest not in known}
        if missing:
            made = self._embedder.embed(list(missing.values()))
            self._store.put_vectors(self._embedder.name, list(missing), made)
            known |= dict(zip(missing, made, strict=True))
        return np.stack([known[row["hash"]] for row in rows]) if rows else np.zeros((0, self._embedder.size), np.float32)

    def allowed(self, collections: frozenset[int], documents: frozenset[int] | None) -> Bits:
        """The chunks of these collections, and of these documents if given, as bits. Call it while `reading`."""
        key = (collections, documents)
        found = self._sets.get(key)
        if found is None:
            found = self._set(collections, documents)
            self._sets[key] = found
            while len(self._sets) > KEPT_SETS:
                self._sets.popitem(last=False)
        return found

    def _set(self, collections: frozenset[int], documents: frozenset[int] | None) -> Bits:
        ids = self._store.chunk_ids(collections, documents)
        return bits(ids, int(ids[-1]) + 1 if len(ids) else 0)


def embedded_text(title: str, context: str, text: str) -> str:
    """What is embedded for a chunk: where it stands, then its text."""
    head = context if context.startswith(title) else f"{title} › {context}" if context else title
    return f"{head[:200]}\n{text}" if head else text


def _worded(row: sqlite3.Row) -> str:
    return f"{row['context']}\n{row['text']}" if row["context"] else row["text"]


def _batches(ids: NDArray[np.int64]) -> Iterator[list[int]]:
    for at in range(0, len(ids), BATCH):
        yield ids[at : at + BATCH].tolist()


class _ReadersWriter:
    """Many readers or one writer; a writer that waits goes before new readers."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._writing = False
        self._waiting = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._writing and not self._waiting)
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._condition:
            self._waiting += 1
            self._condition.wait_for(lambda: not self._writing and not self._readers)
            self._waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()
