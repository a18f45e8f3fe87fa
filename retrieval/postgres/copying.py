"""Copies the documents of a folder from SQLite into an empty PostgreSQL database, whole or not at all.

Each table is read back before the copy is kept: it must have as many rows as its source, and the same digest of them.
Words are indexed anew. Files stay in the folder, to which the database's rows lead as before.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from retrieval.document_database import DatabaseFile, StoreConnection
from retrieval.library import lock_folder
from retrieval.postgres.postgres_database import PostgresDatabase

_BATCH_ROWS, _BATCH_BYTES = 1000, 16 << 20
# In an order in which references lead to what is there.
_TABLES: Mapping[str, str] = {
    "collections": "id, name, owner, created_at, attached",
    "members": 'collection, "user", role',
    "invitations": 'collection, "user", role, declined, created_at',
    "folders": 'id, collection, "user", path, name, created_at',
    "documents": """id, collection, source, version, title, media_type, bytes, characters, metadata, faults, text, file,
        owned, root, folder, added_by, created_at, updated_at""",
    "pages": 'document, start, "end", number',
    "parents": 'document, number, start, "end"',
    "chunks": 'id, document, collection, number, start, "end", parent, context, text, hash, added',
    "vectors": "hash, embedder, vector",
    "jobs": 'id, collection, "user", status, created_at, ended_at, replace',
    "job_files": """job, number, source, path, owned, root, folder, metadata, bytes, status, document, pages, chunks,
        embedded, error, faults, change""",
}
_FLAGS = frozenset({"attached", "declined", "owned", "replace"})
_NUMBERED = ("collections", "folders", "documents", "chunks")


class NotCopied(Exception):
    """The documents could not be copied; nothing was."""


@contextmanager
def documents_copied(folder: Path, engine: Engine, tell: Callable[[str, int], None]) -> Iterator[None]:
    """The copy is kept once the block ends without an error. `tell` gets each table and its rows.

    Raises:
        NotCopied: the database has documents already, or a table was not copied whole.
        InUse: another process has the folder open.
        StoreError, sqlite3.Error, OSError, NewerFile: one of the two cannot be used.
    """
    lock, _ = lock_folder(folder)
    try:
        with (
            closing(DatabaseFile(folder / "documents.db")) as source,
            closing(PostgresDatabase(engine)) as target,
            source.reading() as given,
            target.writing() as db,
        ):
            for table in ("collections", "jobs", "vectors"):
                (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
                if count:
                    raise NotCopied(f"The PostgreSQL database has documents already: {table} has {count} rows")
            for table, columns in _TABLES.items():
                tell(table, _copy(table, columns, source, given, target, db))
            (generation,) = given.execute("SELECT value FROM state WHERE key = 'generation'").fetchone()
            db.execute("UPDATE state SET value = ? WHERE key = 'generation'", (generation,))
            for table in _NUMBERED:
                last = given.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
                if last is not None and last[0]:
                    db.execute("SELECT setval(pg_get_serial_sequence(?, 'id'), ?)", (table, last[0]))
            target.index_words(db, 0)
            yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)
        lock.close()


def _copy(
    table: str, columns: str, source: DatabaseFile, given: StoreConnection, target: PostgresDatabase,
    db: StoreConnection,
) -> int:  # fmt: skip
    """Returns the rows of a table.

    Raises:
        NotCopied: the copy differs.
    """
    names = [name.strip().strip('"') for name in columns.split(",")]
    insert = f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(names))})"
    # Jobs of a time are in the order of their rows.
    order = "ORDER BY rowid" if table == "jobs" else ""
    before, after = _Digest(), _Digest()
    for batch in _batches(given.execute(f"SELECT {columns} FROM {table} {order}")):
        rows = [_plain(names, row, source) for row in batch]
        before.add(rows)
        db.executemany(insert, [_converted(names, row, target) for row in rows])
    for batch in _batches(db.execute(f"SELECT {columns} FROM {table}")):
        after.add([_plain(names, row, target) for row in batch])
    if before != after:
        raise NotCopied(
            f"The table {table} was not copied whole: {before.rows} rows with the digest {before.sum:x} became "
            f"{after.rows} with {after.sum:x}"
        )
    return before.rows


def _batches(rows: Any) -> Iterator[list[Any]]:
    batch, size = list[Any](), 0
    for row in rows:
        batch.append(row)
        size += sum(len(value) for value in tuple(row) if isinstance(value, str | bytes))
        if len(batch) == _BATCH_ROWS or size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _plain(names: Sequence[str], row: Any, database: DatabaseFile | PostgresDatabase) -> list[Any]:
    """A row's values as both databases give them: flags as such, a vector as numbers."""
    made = list[Any]()
    for name, value in zip(names, tuple(row), strict=True):
        if name in _FLAGS:
            made.append(bool(value))
        elif name == "vector":
            made.append(database.decode_vector(value).astype("float16"))
        else:
            made.append(value)
    return made


def _converted(names: Sequence[str], row: Sequence[Any], target: PostgresDatabase) -> list[Any]:
    return [target.encode_vector(value) if name == "vector" else value for name, value in zip(names, row, strict=True)]


@dataclass
class _Digest:
    """Digest of rows in whatever order: the sum of each one's SHA-256."""

    rows: int = 0
    sum: int = 0

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        for row in rows:
            values = [value.hex() if isinstance(value, bytes) else value for value in map(_as_bytes, row)]
            self.rows += 1
            self.sum = (self.sum + int(hashlib.sha256(json.dumps(values).encode()).hexdigest(), 16)) % 2**256


def _as_bytes(value: Any) -> Any:
    return value.tobytes() if hasattr(value, "tobytes") else value
