"""Database of documents: the interface that the stores use, and SQLite's, its transactions and migrations.

The stores' statements run on SQLite and PostgreSQL alike (`retrieval/postgres/`): places are `?`, `?1` or `:name`,
flags `TRUE`, and the columns "user" and "end" are quoted, which PostgreSQL would read as something else. In SQLite each
thread has a connection; reads run at any time, writes in turn. A migration that was released is never edited; a change
is a new one. A document is (collection, source) and has one version, the hash of its bytes. A chunk's number is never
used twice, so an index's stale entry for a deleted chunk can never mean another. `generation` counts the changes that
searches can see; an index that knows its own generation can catch up on `chunks.added` and `gone`.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.durable import make_folder

_SETTINGS = """PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;
PRAGMA temp_store = MEMORY; PRAGMA secure_delete = FAST;"""


# The record of taken steps, in the form that sqlite-utils has written it since the first release.
_SET = ("retrieval",)
_TAKEN = (
    """CREATE TABLE IF NOT EXISTS _sqlite_migrations (
        id INTEGER PRIMARY KEY, migration_set TEXT, name TEXT, applied_at TEXT)""",
    """CREATE UNIQUE INDEX IF NOT EXISTS idx__sqlite_migrations_migration_set_name
        ON _sqlite_migrations (migration_set, name)""",
)


class NewerFile(Exception):
    """The file or database was written by a newer version than this one."""


class StoreError(Exception):
    """An error of PostgreSQL: its message without the statement and its values, which may hold users' words.

    `sqlstate`: its code (PostgreSQL's appendix A); None where the server did not answer.
    """

    def __init__(self, message: str, sqlstate: str | None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate

    @property
    def is_away(self) -> bool:
        """True where the server could not be reached, or takes no connection or no work now."""
        return self.sqlstate is None or self.sqlstate.startswith(("08", "57P")) or self.sqlstate in ("53300", "55P03")


class ResultRows(Protocol):
    """The result of a statement. A row is read by place, by name, or as a mapping by `dict`."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class StoreConnection(Protocol):
    """A connection in a transaction. `sqlite3.Connection` is one."""

    def execute(self, sql: str, values: Any = ..., /) -> ResultRows: ...
    def executemany(self, sql: str, values: Any, /) -> object: ...


class DocumentDatabase(Protocol):
    """The database that documents, chunks, rights and jobs are kept in. Safe in threads."""

    @property
    def backend(self) -> Literal["sqlite", "postgresql"]: ...

    def rows(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """Returns the rows of one statement."""
        ...

    def writing(self) -> AbstractContextManager[StoreConnection]:
        """A write, whole or not at all; one at a time, and what it reads holds until it ends."""
        ...

    def reading(self) -> AbstractContextManager[StoreConnection]:
        """Reads that all see the same state."""
        ...

    def index_words(self, db: StoreConnection, generation: int) -> None:
        """Indexes the words of chunks that came with a generation or later, where the database indexes words."""
        ...

    def encode_vector(self, vector: NDArray[np.float16]) -> bytes | str:
        """A vector as a value of `vectors.vector`."""
        ...

    def decode_vector(self, value: Any) -> NDArray[np.float32]:
        """A value of `vectors.vector` as numbers, (size,)."""
        ...

    def close(self) -> None:
        """Once no other thread uses it."""
        ...


class DatabaseFile:
    """SQLite's. One process at a time writes to it."""

    backend: Literal["sqlite"] = "sqlite"

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError, sqlite3.Error: the file cannot be used.
            NewerFile: it has taken steps that `STEPS` does not have.
        """
        make_folder(path.parent)
        self.path = path
        self._local = threading.local()
        self._all: list[sqlite3.Connection] = []
        self._write_lock = threading.Lock()
        self._migrate()

    def _migrate(self) -> None:
        """Takes the steps that the file has not taken, each whole or not at all, and notes them in the file."""
        with self.writing() as db:
            for statement in _TAKEN:
                db.execute(statement)
        with self.reading() as db:
            taken = {
                name for (name,) in db.execute("SELECT name FROM _sqlite_migrations WHERE migration_set = ?", _SET)
            }
        if newer := taken - STEPS.keys():
            raise NewerFile(f"{self.path} has taken the step {min(newer)!r}, unknown here: a newer Ponder wrote it.")
        for name, statements in STEPS.items():
            with self.writing() as db:
                at = datetime.now(UTC).isoformat(" ")
                noted = db.execute(
                    "INSERT OR IGNORE INTO _sqlite_migrations (migration_set, name, applied_at) VALUES (?, ?, ?)",
                    (*_SET, name, at),
                )
                for statement in statements if noted.rowcount else ():
                    db.execute(statement)

    def close(self) -> None:
        """Once no other thread uses it."""
        for connection in self._all:
            connection.close()
        self._all.clear()

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self.path, isolation_level=None, timeout=30, check_same_thread=False)
            connection.row_factory = sqlite3.Row
            connection.executescript(_SETTINGS)
            self._local.connection = connection
            self._all.append(connection)
        return connection

    def rows(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        """Returns the rows of one statement."""
        return self._connection().execute(sql, values).fetchall()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A write, whole or not at all; one at a time."""
        connection = self._connection()
        with self._write_lock:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # SQLite ends some by itself, say when the disk is full
                    connection.execute("ROLLBACK")
                raise

    def index_words(self, db: StoreConnection, generation: int) -> None:
        """Does nothing: the lexical index is a file that catches up."""

    def encode_vector(self, vector: NDArray[np.float16]) -> bytes:
        return vector.tobytes()

    def decode_vector(self, value: Any) -> NDArray[np.float32]:
        return np.frombuffer(value, np.float16).astype(np.float32)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Reads that all see the same state."""
        connection = self._connection()
        connection.execute("BEGIN")
        try:
            yield connection
        finally:
            connection.execute("ROLLBACK")


def marks(values: Sequence[Any]) -> str:
    """Question marks for a list of values; NULL for none: PostgreSQL has no empty list, and nothing is in this one."""
    return ",".join("?" * len(values)) or "NULL"


# By name, in order.
STEPS: Mapping[str, tuple[str, ...]] = {
    "1-documents": (
        "CREATE TABLE state (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
        "INSERT INTO state VALUES ('generation', 0)",
        """CREATE TABLE collections (
            id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, owner TEXT NOT NULL, created_at REAL NOT NULL,
            UNIQUE (owner, name))""",
        """CREATE TABLE members (
            collection INTEGER NOT NULL REFERENCES collections (id) ON DELETE CASCADE, user TEXT NOT NULL,
            role TEXT NOT NULL CHECK (role IN ('reader', 'writer')), PRIMARY KEY (collection, user)) WITHOUT ROWID""",
        "CREATE INDEX members_user ON members (user)",
        """CREATE TABLE documents (
            id INTEGER PRIMARY KEY AUTOINCREMENT, collection INTEGER NOT NULL REFERENCES collections (id),
            source TEXT NOT NULL, version TEXT NOT NULL, title TEXT NOT NULL, media_type TEXT NOT NULL,
            bytes INTEGER NOT NULL, characters INTEGER NOT NULL, metadata TEXT NOT NULL DEFAULT '{}',
            faults TEXT NOT NULL DEFAULT '[]', text TEXT NOT NULL, file TEXT, owned INTEGER NOT NULL,
            created_at REAL NOT NULL, updated_at REAL NOT NULL, UNIQUE (collection, source))""",
        """CREATE TABLE pages (
            document INTEGER NOT NULL REFERENCES documents (id) ON DELETE CASCADE, start INTEGER NOT NULL,
            end INTEGER NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (document, start, number)) WITHOUT ROWID""",
        """CREATE TABLE parents (
            document INTEGER NOT NULL REFERENCES documents (id) ON DELETE CASCADE, number INTEGER NOT NULL,
            start INTEGER NOT NULL, end INTEGER NOT NULL, PRIMARY KEY (document, number)) WITHOUT ROWID""",
        """CREATE TABLE chunks (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            document INTEGER NOT NULL REFERENCES documents (id) ON DELETE CASCADE, collection INTEGER NOT NULL,
            number INTEGER NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL, parent INTEGER NOT NULL,
            context TEXT NOT NULL, text TEXT NOT NULL, hash BLOB NOT NULL, added INTEGER NOT NULL)""",
        "CREATE INDEX chunks_document ON chunks (document)",
        "CREATE INDEX chunks_hash ON chunks (hash)",
        "CREATE INDEX chunks_added ON chunks (added)",
        "CREATE TABLE gone (chunk INTEGER PRIMARY KEY, generation INTEGER NOT NULL)",
        "CREATE INDEX gone_generation ON gone (generation)",
        """CREATE TABLE vectors (
            hash BLOB NOT NULL, embedder TEXT NOT NULL, vector BLOB NOT NULL,
            PRIMARY KEY (hash, embedder)) WITHOUT ROWID""",
        """CREATE TABLE jobs (
            id TEXT PRIMARY KEY, collection INTEGER NOT NULL, user TEXT NOT NULL, status TEXT NOT NULL,
            created_at REAL NOT NULL, ended_at REAL)""",
        "CREATE INDEX jobs_running ON jobs (status) WHERE status = 'running'",
        """CREATE TABLE job_files (
            job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, number INTEGER NOT NULL, source TEXT NOT NULL,
            path TEXT NOT NULL, owned INTEGER NOT NULL, metadata TEXT NOT NULL, bytes INTEGER NOT NULL,
            status TEXT NOT NULL, document INTEGER, pages INTEGER NOT NULL DEFAULT 0, chunks INTEGER NOT NULL DEFAULT 0,
            embedded INTEGER NOT NULL DEFAULT 0, error TEXT, faults TEXT NOT NULL DEFAULT '[]',
            PRIMARY KEY (job, number)) WITHOUT ROWID""",
    ),
    "2-invitations": (  # members of before stay members: what was shared with them they go on reading
        """CREATE TABLE invitations (
            collection INTEGER NOT NULL REFERENCES collections (id) ON DELETE CASCADE, user TEXT NOT NULL,
            role TEXT NOT NULL CHECK (role IN ('reader', 'writer')), declined INTEGER NOT NULL DEFAULT 0,
            created_at REAL NOT NULL, PRIMARY KEY (collection, user)) WITHOUT ROWID""",
        "CREATE INDEX invitations_user ON invitations (user)",
    ),
    "3-roots": (
        "ALTER TABLE documents ADD COLUMN root TEXT",
        "ALTER TABLE job_files ADD COLUMN root TEXT",
    ),
    "4-folders": (
        """CREATE TABLE folders (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            collection INTEGER NOT NULL REFERENCES collections (id) ON DELETE CASCADE, user TEXT NOT NULL,
            path TEXT NOT NULL, name TEXT NOT NULL, created_at REAL NOT NULL,
            UNIQUE (collection, user, path), UNIQUE (collection, name))""",
        "ALTER TABLE documents ADD COLUMN folder INTEGER REFERENCES folders (id) ON DELETE SET NULL",
        "CREATE INDEX documents_folder ON documents (folder)",
        "ALTER TABLE job_files ADD COLUMN folder INTEGER",
        "ALTER TABLE job_files ADD COLUMN change TEXT",
    ),
    "5-added-by": (
        "ALTER TABLE documents ADD COLUMN added_by TEXT",
        "UPDATE documents SET added_by = (SELECT owner FROM collections c WHERE c.id = documents.collection)",
        "ALTER TABLE jobs ADD COLUMN replace INTEGER NOT NULL DEFAULT 0",
    ),
    "6-attached": ("ALTER TABLE collections ADD COLUMN attached INTEGER NOT NULL DEFAULT 0",),
}
