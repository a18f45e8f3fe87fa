"""The log of chunks that indexes follow: chunks that came and went by generation, and the vectors of their texts.

Asks for no right: it is for ingesting and indexing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieval.document_database import DocumentDatabase, ResultRows, marks

AT_ONCE = 500  # values in one statement
T = TypeVar("T")


class ChunkRow(NamedTuple):
    """A chunk, as an index needs it."""

    id: int
    document: int
    collection: int
    hash: bytes
    text: str
    context: str
    title: str


@dataclass(frozen=True, slots=True)
class Change:
    """The change from one generation of an index to the next: chunks that went, then chunks that came."""

    generation: int
    gone: NDArray[np.int64]
    added: NDArray[np.int64]


class Chunks:
    """The chunks of a database."""

    def __init__(self, database: DocumentDatabase) -> None:
        self._database = database

    def generation(self) -> int:
        (row,) = self._database.rows("SELECT value FROM state WHERE key = 'generation'")
        return int(row[0])

    def changes(self, since: int) -> Change:
        """Returns the chunks added and deleted after generation `since`; -1 asks for all."""
        with self._database.reading() as db:
            (now,) = db.execute("SELECT value FROM state WHERE key = 'generation'").fetchone()
            gone = _ids(db.execute("SELECT chunk FROM gone WHERE generation > ? ORDER BY chunk", (since,)))
            added = _ids(db.execute("SELECT id FROM chunks WHERE added > ? ORDER BY id", (since,)))
        return Change(int(now), gone, added)

    def forget_gone(self, up_to: int) -> None:
        """Forget deletions up to generation `up_to`, once every index has it."""
        with self._database.writing() as db:
            db.execute("DELETE FROM gone WHERE generation <= ?", (up_to,))

    def rows(self, chunks: Sequence[int]) -> list[ChunkRow]:
        """Those of the chunks that are there, in no order."""
        found = list[ChunkRow]()
        for some in _batches(chunks):
            found += (
                ChunkRow(*row)
                for row in self._database.rows(
                    f"""SELECT c.id, c.document, c.collection, c.hash, c.text, c.context, d.title
                        FROM chunks c JOIN documents d ON d.id = c.document WHERE c.id IN ({marks(some)})""",
                    some,
                )
            )
        return found

    def places(self, since: int = -1) -> NDArray[np.int64]:
        """(chunks, 3): number, document and collection of the chunks that came after generation `since`."""
        rows = self._database.rows("SELECT id, document, collection FROM chunks WHERE added > ? ORDER BY id", (since,))
        return np.array([tuple(row) for row in rows], np.int64).reshape(-1, 3)

    # Vectors

    def known(self, embedder: str, hashes: Sequence[bytes]) -> set[bytes]:
        """Those of the hashes with stored vectors."""
        sql = "SELECT hash FROM vectors WHERE embedder = ? AND hash IN ({})"
        return {
            row[0]
            for some in _batches(hashes)
            for row in self._database.rows(sql.format(marks(some)), (embedder, *some))
        }

    def vectors(self, embedder: str, hashes: Sequence[bytes]) -> dict[bytes, NDArray[np.float32]]:
        """The stored vectors among these."""
        sql = "SELECT hash, vector FROM vectors WHERE embedder = ? AND hash IN ({})"
        return {
            digest: self._database.decode_vector(vector)
            for some in _batches(hashes)
            for digest, vector in self._database.rows(sql.format(marks(some)), (embedder, *some))
        }

    def put_vectors(self, embedder: str, hashes: Sequence[bytes], vectors: NDArray[np.float32]) -> None:
        """Keep vectors, in half precision."""
        halves = vectors.astype(np.float16)
        with self._database.writing() as db:
            db.executemany(
                """INSERT INTO vectors (hash, embedder, vector) VALUES (?, ?, ?)
                   ON CONFLICT (hash, embedder) DO UPDATE SET vector = excluded.vector""",
                [
                    (digest, embedder, self._database.encode_vector(row))
                    for digest, row in zip(hashes, halves, strict=True)
                ],
            )

    def forget_unused_vectors(self) -> None:
        """Of texts that no document has, such as those of a job that was cancelled."""
        with self._database.writing() as db:
            db.execute("DELETE FROM vectors WHERE hash NOT IN (SELECT hash FROM chunks)")


def _ids(rows: ResultRows) -> NDArray[np.int64]:
    return np.fromiter((row[0] for row in rows), np.int64)


def _batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(values), AT_ONCE):
        yield values[at : at + AT_ONCE]
