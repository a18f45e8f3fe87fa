"""One SQLite file: a connection for each thread, reads at any time, writes in turn, steps to today's shape.

Knows nothing of what is in it.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlite_utils import Database, Migrations

from retrieval.durable import make_folder

_SETTINGS = """PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;
PRAGMA temp_store = MEMORY; PRAGMA secure_delete = FAST;"""


class NewerFile(Exception):
    """The file was written by a newer version than this one."""


class DatabaseFile:
    """Safe in threads; one process at a time writes to it."""

    def __init__(self, path: Path, migrations: Migrations) -> None:
        """
        Raises:
            OSError, sqlite3.Error: the file cannot be used.
            NewerFile: it has taken steps that `migrations` does not have.
        """
        make_folder(path.parent)
        self.path = path
        self._local = threading.local()
        self._all: list[sqlite3.Connection] = []
        self._write_lock = threading.Lock()
        db = Database(self._connection())
        steps = len(migrations.applied(db)) + len(migrations.pending(db))
        if (known := len(migrations.pending(Database(memory=True)))) < steps:
            raise NewerFile(f"{path} has taken {steps} steps, and this Ponder knows {known}: a newer one wrote it.")
        migrations.apply(db)

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
        """What one statement reads."""
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
    """Question marks for a list of values."""
    return ",".join("?" * len(values))
