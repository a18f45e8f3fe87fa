"""Dense and lexical index as a search sees them: a read-write lock, filter bitmaps.

Both are kept at the generation of the document store: they catch up on changes, and are rebuilt where they can't.
Searches and changes take turns: a search sees the documents of one generation, all of each or nothing. A writer that
waits goes before new readers, so it never starves. `FilterBitmaps` has two numbers a chunk, so a million chunks take 8
MB and a millisecond; it is not thread-safe, `Views` guards it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.durable import Damaged, clear_away, make_folder, read_record, write_record
from retrieval.embedding import Embedder, Vectors
from retrieval.index.chunks import ChunkRow, Chunks
from retrieval.index.dense import Bits, DenseIndex, Ids
from retrieval.index.lexical import LexicalIndex, unbroken


class FilterBitmaps:
    """Collections and documents by chunk; 0 where there is no chunk."""

    def __init__(self) -> None:
        self._collections = np.zeros(0, np.int32)
        self._documents = np.zeros(0, np.int32)

    def add(self, places: NDArray[np.int64]) -> None:
        """(chunks, 3): number, document, collection."""
        if not len(places):
            return
        if (needed := int(places[:, 0].max()) + 1) > len(self._documents):
            room = np.zeros(max(needed, len(self._documents) * 5 // 4) - len(self._documents), np.int32)
            self._collections = np.concatenate([self._collections, room])
            self._documents = np.concatenate([self._documents, room])
        self._documents[places[:, 0]] = places[:, 1]
        self._collections[places[:, 0]] = places[:, 2]

    def remove(self, chunks: Ids) -> None:
        held = chunks[chunks < len(self._documents)]
        self._collections[held] = self._documents[held] = 0

    def bits(self, collections: Collection[int], documents: Collection[int] | None = None) -> Bits:
        """The chunks of these collections, and of these documents if given."""
        allowed = _table(collections, self._collections)[self._collections]
        if documents is not None:
            allowed &= _table(documents, self._documents)[self._documents]
        return np.packbits(allowed, bitorder="little")


def _table(numbers: Collection[int], held: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Returns whether a number is among `numbers`, for all in `held`."""
    size = int(held.max(initial=0)) + 1
    table = np.zeros(size, bool)
    table[[number for number in numbers if 0 < number < size]] = True
    return table


class ReadWriteLock:
    """A lock with two sides. Neither side may be taken twice by one thread."""

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


log = logging.getLogger("ponder.retrieval")
BATCH = 10_000  # chunks that are read at once to catch up


class Views:
    """The indexes under one folder. Safe in threads."""

    def __init__(self, chunks: Chunks, embedder: Embedder, folder: Path) -> None:
        """Indexes that are damaged, missing or of another state of the truth are made again, and the log says why."""
        if not folder.is_dir():
            clear_away(folder)
        make_folder(folder)
        self._chunks = chunks
        self._embedder = embedder
        self._folder = folder
        self._turns = ReadWriteLock()
        self._saving = threading.Lock()
        self.lexical = LexicalIndex(folder / "lexical")
        self._places = FilterBitmaps()
        self._placed = -1  # generation
        self.dense, self._dense_generation = self._load_dense()
        self._saved, self._unsaved = self._dense_generation, 0  # generation, chunks that came or went since
        try:
            self._forget_strange()
            self.catch_up()
            self._forget_strange()
            self.catch_up()
        except BaseException:
            self.lexical.close()
            raise

    def _load_dense(self) -> tuple[DenseIndex, int]:
        try:
            about = read_record(self._folder / "dense.json")
            if about["embedder"] != self._embedder.key:
                return DenseIndex(self._embedder.size), -1
            index = DenseIndex.load(self._folder / about["file"], self._embedder.size, about["sha256"])
            return index, int(about["generation"])
        except FileNotFoundError:
            if any(self._folder.glob("dense-*.faiss")):
                log.warning("The dense index is made again: dense.json is missing.")
        except Damaged as error:
            log.warning("The dense index is made again: %s.", error)
        return DenseIndex(self._embedder.size), -1

    def _forget_strange(self) -> None:
        """Forget indexes that the truth does not lead to: newer than it, or with other chunks though caught up.

        Such are files that were copied here from elsewhere, or that stayed when the database was put back.
        """
        now, count = self._chunks.generation(), len(self._chunks.places())
        for name, generation, held in (
            ("lexical", self.lexical.generation, len(self.lexical)),
            ("dense", self._dense_generation, len(self.dense)),
        ):
            if generation <= now and (generation < now or held == count):
                continue
            reason = f"it has {held} chunks at generation {generation}, and the documents {count} at {now}"
            log.warning("The %s index is made again: %s.", name, reason)
            if name == "dense":
                self.dense, self._dense_generation = DenseIndex(self._embedder.size), -1
            else:
                self.lexical.clear()

    def save(self, at_least: float = 0.0) -> None:
        """Keep the dense index on disk for the next start, if more than that share of it changed since the last time.

        An index that is not saved is read from the truth again at the next start. The lexical index is on disk already.
        """
        with self._saving, self._turns.reading():
            if self._saved == self._dense_generation or self._unsaved < at_least * len(self.dense):
                return
            name = f"dense-{self._dense_generation}.faiss"
            digest = self.dense.save(self._folder / name)
            about = {"embedder": self._embedder.key, "generation": self._dense_generation}
            write_record(self._folder / "dense.json", {**about, "file": name, "sha256": digest})  # now it counts
            self._saved, self._unsaved = self._dense_generation, 0
        for old in self._folder.glob("dense-*.faiss"):
            if old.name != name:
                clear_away(old)
        self._chunks.forget_gone(self._saved)

    def close(self) -> None:
        try:
            self.save()
        finally:
            self.lexical.close()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change of the truth: no search sees it before both indexes have it."""
        with self._turns.writing():
            try:
                yield
            finally:
                self._catch_up()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a search."""
        with self._turns.reading():
            yield

    def catch_up(self) -> None:
        with self._turns.writing():
            self._catch_up()
        self.spread()

    def spread(self) -> None:
        """Put a dense index that has grown into cells, while searches go on with the one they have."""
        with self._turns.reading():
            if not self.dense.crowded:
                return
            (ids, vectors), generation = self.dense.all(), self._dense_generation
        made = DenseIndex.in_cells(ids, vectors)
        with self._turns.writing():
            self.dense, self._dense_generation = made, generation
            self._catch_up()

    def _catch_up(self) -> None:
        now = self._chunks.generation()
        if self._placed != now:
            self._catch_up_places()
        if self.lexical.generation != now:
            self._catch_up_lexical()
        if self._dense_generation != now:
            self._catch_up_dense()

    def _catch_up_places(self) -> None:
        change = self._chunks.changes(self._placed)
        self._places.remove(change.gone)
        self._places.add(self._chunks.places(self._placed))
        self._placed = change.generation

    def _catch_up_lexical(self) -> None:
        held = self.lexical.generation
        if held < 0:
            self.lexical.clear()
        change = self._chunks.changes(held)
        self.lexical.remove(change.gone.tolist())
        self.lexical.remove(change.added.tolist() if held >= 0 else ())  # a crash may have left some of them there
        for ids in _batches(change.added):
            for row in self._chunks.rows(ids):
                self.lexical.add(row.id, row.collection, row.document, indexed_text(row), row.title)
        self.lexical.commit(change.generation)

    def _catch_up_dense(self) -> None:
        change = self._chunks.changes(self._dense_generation)
        self.dense.remove(change.gone)
        for ids in _batches(change.added):
            rows = self._chunks.rows(ids)
            self.dense.add(np.array([row.id for row in rows], np.int64), vectors_of(self._chunks, self._embedder, rows))
        self._dense_generation = change.generation
        self._unsaved += len(change.gone) + len(change.added)

    def stored(self, chunks: Sequence[int]) -> dict[int, Vectors]:
        """The vectors of those of the chunks that are there, by number."""
        rows = self._chunks.rows(chunks)
        vectors = vectors_of(self._chunks, self._embedder, rows)
        return {row.id: vector for row, vector in zip(rows, vectors, strict=True)}

    def scope(self, user: str, collections: Collection[int], documents: Collection[int] | None) -> _Scope:
        """The chunks that a search may find; the store checks the user's rights again. Call it while `reading`."""
        return _Scope(self, collections, documents, self.allowed(collections, documents))

    def rarity(self, collections: Collection[int]) -> Callable[[str], float]:
        """Returns a function of a stem's inverse document frequency in these collections."""
        return self.lexical.rarity(collections)

    def allowed(self, collections: Collection[int], documents: Collection[int] | None) -> Bits:
        """The chunks of these collections, and of these documents if given. Call it while `reading`."""
        return self._places.bits(collections, documents)


@dataclass(frozen=True, slots=True)
class _Scope:
    """The chunks that one search may find."""

    views: Views
    collections: Collection[int]
    documents: Collection[int] | None
    allowed: Bits

    def dense(self, vector: Vectors, count: int) -> dict[int, float]:
        ids, cosines = self.views.dense.search(vector, count, self.allowed)
        return {int(i): float(c) for i, c in zip(ids[0], cosines[0], strict=True) if i >= 0}

    def lexical(self, text: str, count: int) -> dict[int, float]:
        ids, scores = self.views.lexical.search(text, count, self.collections, self.documents, self.allowed)
        return {int(i): s for i, s in zip(ids, scores, strict=True)}


def vectors_of(chunks: Chunks, embedder: Embedder, rows: Sequence[ChunkRow]) -> Vectors:
    """Of stored chunks, in order; missing vectors are embedded and stored."""
    known = chunks.vectors(embedder.key, [row.hash for row in rows])
    texts = {row.hash: embedded_text(row.title, row.context, row.text) for row in rows if row.hash not in known}
    if texts:
        made = embedder.embed(list(texts.values()))
        chunks.put_vectors(embedder.key, list(texts), made)
        known |= dict(zip(texts, made, strict=True))
    return np.stack([known[row.hash] for row in rows]) if rows else np.zeros((0, embedder.size), np.float32)


def embedded_text(title: str, context: str, text: str) -> str:
    """Returns the text to embed for a chunk: its title and headings, then its text."""
    head = context if context.startswith(title) else f"{title} › {context}" if context else title
    return f"{head[:200]}\n{unbroken(text)}" if head else unbroken(text)


def indexed_text(row: ChunkRow) -> str:
    """Returns the text whose words a lexical index has for a chunk: its headings, then its text."""
    return unbroken(f"{row.context}\n{row.text}" if row.context else row.text)


def _batches(ids: NDArray[np.int64]) -> Iterator[list[int]]:
    for at in range(0, len(ids), BATCH):
        yield ids[at : at + BATCH].tolist()
