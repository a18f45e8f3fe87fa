"""The truth about documents in one SQLite file: collections and who may see them, documents, chunks, vectors.

What a search may show is decided here, in one read transaction, whatever the indexes still hold. Reads run on a
connection of the calling thread; writes take turns. Knows nothing of parsing, embedding or searching.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrieval.chunking import Cut
from retrieval.filters import Filters, as_sql
from retrieval.parsing.parsed import Fault, Page, Parsed
from retrieval.schema import STEPS

Role = Literal["owner", "writer", "reader"]
Metadata = Mapping[str, str | int | float | bool]


class NotFound(Exception):
    """There is no such collection or document, or this user may not know of it."""


class NotAllowed(Exception):
    """The user may see it but not do this."""


class NewerIndex(Exception):
    """The file was written by a newer version than this one."""


@dataclass(frozen=True, slots=True)
class Collection:
    """`role` is what the asking user is to it."""

    id: int
    name: str
    owner: str
    role: Role
    documents: int


@dataclass(frozen=True, slots=True)
class Document:
    id: int
    collection: int
    source: str
    title: str
    media_type: str
    version: str
    bytes: int
    characters: int
    chunks: int
    metadata: Metadata
    faults: tuple[Fault, ...]
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk as a search shows it: characters `start` to `end` of its document; `text` is that part."""

    id: int
    document: int
    collection: int
    title: str
    source: str
    start: int
    end: int
    parent: int
    context: str
    text: str
    page: int | None
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class Change:
    """What an index has to do to come from one generation to the next: chunks that went, then chunks that came."""

    generation: int
    gone: NDArray[np.int64]
    added: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class New:
    """A document to be stored; `hashes` are those of its chunks, in order."""

    source: str
    version: str
    parsed: Parsed
    cut: Cut
    hashes: Sequence[bytes]
    bytes: int
    metadata: Metadata
    file: str | None = None


class DocumentStore:
    """One SQLite file. Safe in threads; one process at a time writes to it."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError, sqlite3.Error: the file cannot be used.
            NewerIndex: a newer version wrote it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._local = threading.local()
        self._all: list[sqlite3.Connection] = []
        self._write_lock = threading.Lock()
        self._migrate()

    def close(self) -> None:
        for connection in self._all:
            connection.close()
        self._all.clear()

    # Connections

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self.path, isolation_level=None, timeout=30, check_same_thread=False)
            connection.row_factory = sqlite3.Row
            connection.executescript(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON; PRAGMA temp_store = MEMORY;"
            )
            self._local.connection = connection
            self._all.append(connection)
        return connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A write, whole or not at all; one at a time."""
        connection = self._connection()
        with self._write_lock:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Reads that all see the same state."""
        connection = self._connection()
        connection.execute("BEGIN")
        try:
            yield connection
        finally:
            connection.execute("ROLLBACK")

    def _migrate(self) -> None:
        (version,) = self._connection().execute("PRAGMA user_version").fetchone()
        if version > len(STEPS):
            raise NewerIndex(f"{self.path} has format {version}, and this Ponder knows formats up to {len(STEPS)}.")
        for number, statements in enumerate(STEPS[version:], version + 1):
            with self.transaction() as db:
                for statement in statements:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {number}")

    # Collections and rights

    def create_collection(self, user: str, name: str) -> Collection:
        """The user's collection of that name, made if there is none."""
        with self.transaction() as db:
            db.execute(
                "INSERT OR IGNORE INTO collections (name, owner, created_at) VALUES (?, ?, ?)", (name, user, time.time())
            )
            self._rights_changed(db)
        return next(each for each in self.collections(user) if each.owner == user and each.name == name)

    def collections(self, user: str) -> list[Collection]:
        """All that the user may read, with the user's role."""
        rows = self._connection().execute(
            """SELECT c.id, c.name, c.owner, m.role,
                      (SELECT count(*) FROM documents d WHERE d.collection = c.id) AS documents
               FROM collections c LEFT JOIN members m ON m.collection = c.id AND m.user = :user
               WHERE c.owner = :user OR m.user IS NOT NULL ORDER BY c.owner != :user, c.name""",
            {"user": user},
        )
        return [
            Collection(row["id"], row["name"], row["owner"], "owner" if row["owner"] == user else row["role"], row["documents"])
            for row in rows
        ]

    def role(self, user: str, collection: int) -> Role:
        """
        Raises:
            NotFound: there is none, or the user may not read it.
        """
        return self._role(self._connection(), user, collection)

    def _role(self, db: sqlite3.Connection, user: str, collection: int) -> Role:
        row = db.execute(
            """SELECT c.owner, m.role FROM collections c LEFT JOIN members m ON m.collection = c.id AND m.user = ?
               WHERE c.id = ?""",
            (user, collection),
        ).fetchone()
        if row is None or (row["owner"] != user and row["role"] is None):
            raise NotFound(f"There is no collection {collection}.")
        role: Role = "owner" if row["owner"] == user else row["role"]
        return role

    def share(self, owner: str, collection: int, user: str, role: Literal["reader", "writer"] | None) -> None:
        """Give a user a role in the owner's collection, or take it away with None.

        Raises:
            NotFound: there is no such collection.
            NotAllowed: it is not the owner who asks.
        """
        with self.transaction() as db:
            self._need(db, owner, collection, ("owner",), "share")
            if role is None:
                db.execute("DELETE FROM members WHERE collection = ? AND user = ?", (collection, user))
            else:
                db.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?)", (collection, user, role))
            self._rights_changed(db)

    def delete_collection(self, user: str, collection: int) -> None:
        """Delete it with all its documents.

        Raises:
            NotFound: there is no such collection.
            NotAllowed: it is not the owner who asks.
        """
        with self.transaction() as db:
            self._need(db, user, collection, ("owner",), "delete")
            generation = self._next_generation(db)
            self._remove(db, "collection = ?", (collection,), generation)
            db.execute("DELETE FROM documents WHERE collection = ?", (collection,))
            db.execute("DELETE FROM collections WHERE id = ?", (collection,))
            self._rights_changed(db)

    def readable(self, user: str) -> frozenset[int]:
        """The collections that the user may read, by number."""
        rows = self._connection().execute(
            "SELECT id FROM collections WHERE owner = ? UNION SELECT collection FROM members WHERE user = ?", (user, user)
        )
        return frozenset(row[0] for row in rows)

    def _need(self, db: sqlite3.Connection, user: str, collection: int, roles: Sequence[Role], what: str) -> None:
        role = self._role(db, user, collection)
        if role not in roles:
            raise NotAllowed(f"A {role} may not {what} in this collection.")

    def need_writer(self, db: sqlite3.Connection, user: str, collection: int) -> None:
        """
        Raises:
            NotFound: there is no such collection.
            NotAllowed: the user may only read it.
        """
        self._need(db, user, collection, ("owner", "writer"), "add documents")

    def _rights_changed(self, db: sqlite3.Connection) -> None:
        db.execute("UPDATE state SET value = value + 1 WHERE key = 'rights'")

    # Documents

    def put(self, user: str, collection: int, documents: Sequence[New]) -> list[int]:
        """Store documents, each in place of the one with its source, in one transaction. Returns their numbers.

        Raises:
            NotFound: there is no such collection.
            NotAllowed: the user may only read it.
        """
        with self.transaction() as db:
            self.need_writer(db, user, collection)
            generation = self._next_generation(db)
            return [self._put(db, collection, new, generation) for new in documents]

    def _put(self, db: sqlite3.Connection, collection: int, new: New, generation: int) -> int:
        now = time.time()
        old = db.execute(
            "SELECT id, created_at FROM documents WHERE collection = ? AND source = ?", (collection, new.source)
        ).fetchone()
        values = {
            "collection": collection,
            "source": new.source,
            "version": new.version,
            "title": new.parsed.title or new.source,
            "media_type": new.parsed.media_type,
            "bytes": new.bytes,
            "characters": len(new.parsed.text),
            "metadata": json.dumps(dict(new.metadata)),
            "pages": json.dumps([(page.number, page.start, page.end) for page in new.parsed.pages]),
            "faults": json.dumps([(fault.message, fault.page) for fault in new.parsed.faults]),
            "text": new.parsed.text,
            "file": new.file,
            "created_at": old["created_at"] if old else now,
            "updated_at": now,
        }
        if old:
            document = int(old["id"])
            self._remove(db, "document = ?", (document,), generation)
            db.execute("DELETE FROM parents WHERE document = ?", (document,))
            db.execute(
                f"UPDATE documents SET {', '.join(f'{key} = :{key}' for key in values)} WHERE id = :id",
                {**values, "id": document},
            )
        else:
            document = self._insert(db, "documents", values)
        db.executemany(
            "INSERT INTO parents VALUES (?, ?, ?, ?)",
            [(document, number, start, end) for number, (start, end) in enumerate(new.cut.parents)],
        )
        db.executemany(
            """INSERT INTO chunks (document, collection, number, start, end, parent, context, text, hash, added)
               VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
            [
                (
                    *(document, collection, number, chunk.start, chunk.end, chunk.parent, chunk.context),
                    *(new.parsed.text[chunk.start : chunk.end], digest, generation),
                )
                for number, (chunk, digest) in enumerate(zip(new.cut.chunks, new.hashes, strict=True))
            ],
        )
        return document

    @staticmethod
    def _insert(db: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> int:
        names = ", ".join(values)
        marks = ", ".join(f":{key}" for key in values)
        number = db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values).lastrowid
        assert number is not None
        return number

    def delete(self, user: str, document: int) -> None:
        """Delete a document; no search shows it from here on.

        Raises:
            NotFound: there is none, or the user may not read it.
            NotAllowed: the user may only read it.
        """
        with self.transaction() as db:
            row = db.execute("SELECT collection FROM documents WHERE id = ?", (document,)).fetchone()
            if row is None:
                raise NotFound(f"There is no document {document}.")
            try:
                self._need(db, user, row["collection"], ("owner", "writer"), "delete documents")
            except NotFound:
                raise NotFound(f"There is no document {document}.") from None
            generation = self._next_generation(db)
            self._remove(db, "document = ?", (document,), generation)
            db.execute("DELETE FROM documents WHERE id = ?", (document,))

    def _remove(self, db: sqlite3.Connection, where: str, values: tuple[Any, ...], generation: int) -> None:
        """Take chunks out, and note for the indexes that they went. Their vectors stay for a copy or a return."""
        db.execute(f"INSERT INTO gone SELECT id, {int(generation)} FROM chunks WHERE {where}", values)
        db.execute(f"DELETE FROM chunks WHERE {where}", values)

    @staticmethod
    def _next_generation(db: sqlite3.Connection) -> int:
        (number,) = db.execute(
            "UPDATE state SET value = value + 1 WHERE key = 'generation' RETURNING value"
        ).fetchone()
        return int(number)

    # What indexes follow

    def generation(self) -> int:
        (number,) = self._connection().execute("SELECT value FROM state WHERE key = 'generation'").fetchone()
        return int(number)

    def changes(self, since: int) -> Change:
        """What came and went after generation `since`; chunks that did both are not named."""
        with self.snapshot() as db:
            (now,) = db.execute("SELECT value FROM state WHERE key = 'generation'").fetchone()
            gone = [row[0] for row in db.execute("SELECT chunk FROM gone WHERE generation > ? ORDER BY chunk", (since,))]
            added = [row[0] for row in db.execute("SELECT id FROM chunks WHERE added > ? ORDER BY id", (since,))]
        return Change(int(now), np.array(gone, np.int64), np.array(added, np.int64))

    def rows(self, chunks: Sequence[int]) -> list[sqlite3.Row]:
        """id, document, collection, hash, text, context and title of chunks that are there, in no order."""
        found: list[sqlite3.Row] = []
        for at in range(0, len(chunks), 500):
            some = [int(chunk) for chunk in chunks[at : at + 500]]
            found += self._connection().execute(
                f"""SELECT c.id, c.document, c.collection, c.hash, c.text, c.context, d.title
                    FROM chunks c JOIN documents d ON d.id = c.document WHERE c.id IN ({",".join("?" * len(some))})""",
                some,
            )
        return found

    def stored(self, collection: int, source: str) -> Document | None:
        """The document of that source, if there is one. Asks for no right: it is for ingesting."""
        row = self._connection().execute(
            f"{_DOCUMENTS} WHERE d.collection = ? AND d.source = ?", (collection, source)
        ).fetchone()
        return _document(row) if row else None

    def known(self, embedder: str, hashes: Sequence[bytes]) -> set[bytes]:
        """Those of the hashes whose vectors are stored."""
        found = set[bytes]()
        for at in range(0, len(hashes), 500):
            some = hashes[at : at + 500]
            found |= {
                row[0]
                for row in self._connection().execute(
                    f"SELECT hash FROM vectors WHERE embedder = ? AND hash IN ({_marks(some)})", (embedder, *some)
                )
            }
        return found

    def chunk_ids(self, collections: Iterable[int], documents: Iterable[int] | None = None) -> NDArray[np.int64]:
        """The chunks of these collections, and of these documents if given, in rising order."""
        where, values = f"collection IN ({_marks(collections := list(collections))})", [*collections]
        if documents is not None:
            where += f" AND document IN ({_marks(documents := list(documents))})"
            values += documents
        found = self._connection().execute(f"SELECT id FROM chunks WHERE {where} ORDER BY id", values)
        return np.fromiter((row[0] for row in found), np.int64)

    def vectors(self, embedder: str, hashes: Sequence[bytes]) -> dict[bytes, NDArray[np.float32]]:
        """The stored vectors among these."""
        known: dict[bytes, NDArray[np.float32]] = {}
        for at in range(0, len(hashes), 500):
            some = hashes[at : at + 500]
            for digest, vector in self._connection().execute(
                f"SELECT hash, vector FROM vectors WHERE embedder = ? AND hash IN ({_marks(some)})", (embedder, *some)
            ):
                known[digest] = np.frombuffer(vector, np.float16).astype(np.float32)
        return known

    def put_vectors(self, embedder: str, hashes: Sequence[bytes], vectors: NDArray[np.float32]) -> None:
        """Keep vectors, in half precision."""
        with self.transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)",
                [(embedder, digest, row.astype(np.float16).tobytes()) for digest, row in zip(hashes, vectors, strict=True)],
            )

    # What users are shown

    def matching(self, collections: Iterable[int], filters: Filters) -> frozenset[int]:
        """The documents in these collections that a filter lets through.

        Raises:
            BadFilter: it cannot be applied.
        """
        condition, values = as_sql(filters)
        among = list(collections)
        rows = self._connection().execute(
            f"SELECT id FROM documents WHERE collection IN ({_marks(among)}) AND {condition}", [*among, *values]
        )
        return frozenset(row[0] for row in rows)

    def passages(self, user: str, chunks: Sequence[int]) -> dict[int, Passage]:
        """Those of the chunks that are there and that the user may read, by number."""
        found: dict[int, Passage] = {}
        with self.snapshot() as db:
            for at in range(0, len(chunks), 500):
                some = [int(chunk) for chunk in chunks[at : at + 500]]
                rows = db.execute(
                    f"""SELECT c.*, d.title, d.source, d.pages, d.metadata FROM chunks c
                        JOIN documents d ON d.id = c.document JOIN collections o ON o.id = c.collection
                        WHERE c.id IN ({_marks(some)}) AND (o.owner = ? OR EXISTS
                            (SELECT 1 FROM members m WHERE m.collection = o.id AND m.user = ?))""",
                    (*some, user, user),
                )
                found |= {row["id"]: _passage(row) for row in rows}
        return found

    def parent(self, user: str, document: int, number: int) -> tuple[int, int, str]:
        """Start, end and text of the window that a chunk stands in.

        Raises:
            NotFound: there is none, or the user may not read it.
        """
        with self.snapshot() as db:
            self._readable_document(db, user, document)
            row = db.execute(
                """SELECT p.start, p.end, substr(d.text, p.start + 1, p.end - p.start) FROM parents p
                   JOIN documents d ON d.id = p.document WHERE p.document = ? AND p.number = ?""",
                (document, number),
            ).fetchone()
        if row is None:
            raise NotFound(f"Document {document} has no part {number}.")
        return int(row[0]), int(row[1]), str(row[2])

    def text(self, user: str, document: int, start: int = 0, end: int | None = None) -> str:
        """A part of a document's text.

        Raises:
            NotFound: there is no such document, or the user may not read it.
        """
        with self.snapshot() as db:
            self._readable_document(db, user, document)
            length = -1 if end is None else max(0, end - start)
            part = "substr(text, ? + 1)" if length < 0 else "substr(text, ? + 1, ?)"
            values = (start,) if length < 0 else (start, length)
            (found,) = db.execute(f"SELECT {part} FROM documents WHERE id = ?", (*values, document)).fetchone()
        return str(found)

    def document(self, user: str, document: int) -> Document:
        """
        Raises:
            NotFound: there is none, or the user may not read it.
        """
        with self.snapshot() as db:
            self._readable_document(db, user, document)
            return _document(db.execute(f"{_DOCUMENTS} WHERE d.id = ?", (document,)).fetchone())

    def documents(self, user: str, collection: int | None = None) -> list[Document]:
        """The documents that the user may read, in one collection or in all, the newest first."""
        among = sorted(self.readable(user) if collection is None else self.readable(user) & {collection})
        rows = self._connection().execute(
            f"{_DOCUMENTS} WHERE d.collection IN ({_marks(among)}) ORDER BY d.updated_at DESC, d.id DESC", among
        )
        return [_document(row) for row in rows]

    def pages(self, user: str, document: int) -> tuple[Page, ...]:
        """
        Raises:
            NotFound: there is no such document, or the user may not read it.
        """
        with self.snapshot() as db:
            self._readable_document(db, user, document)
            (held,) = db.execute("SELECT pages FROM documents WHERE id = ?", (document,)).fetchone()
        return tuple(Page(*page) for page in json.loads(held))

    def _readable_document(self, db: sqlite3.Connection, user: str, document: int) -> None:
        row = db.execute("SELECT collection FROM documents WHERE id = ?", (document,)).fetchone()
        try:
            if row is not None:
                self._role(db, user, row["collection"])
                return
        except NotFound:
            pass
        raise NotFound(f"There is no document {document}.")


_DOCUMENTS = """SELECT d.id, d.collection, d.source, d.title, d.media_type, d.version, d.bytes, d.characters, d.metadata,
    d.faults, d.created_at, d.updated_at, (SELECT count(*) FROM chunks c WHERE c.document = d.id) AS chunks
    FROM documents d"""


def _document(row: sqlite3.Row) -> Document:
    return Document(
        **{key: row[key] for key in ("id", "collection", "source", "title", "media_type", "version", "bytes")},
        **{key: row[key] for key in ("characters", "chunks", "created_at", "updated_at")},
        metadata=json.loads(row["metadata"]),
        faults=tuple(Fault(message, page) for message, page in json.loads(row["faults"])),
    )


def _passage(row: sqlite3.Row) -> Passage:
    pages = json.loads(row["pages"])
    at = bisect_right(pages, row["start"], key=lambda page: page[1]) - 1
    return Passage(
        **{key: row[key] for key in ("id", "document", "collection", "title", "source", "start", "end", "parent")},
        context=row["context"],
        text=row["text"],
        page=pages[at][0] if at >= 0 else None,
        metadata=json.loads(row["metadata"]),
    )

def _marks(values: Sequence[Any]) -> str:
    return ",".join("?" * len(values))
