"""Documents in PostgreSQL: connections, transactions, and the stores' statements in psycopg's form.

The tables stand in a schema of their own, beside that of chats: its name with `_documents`. A write takes turns with
all others by an advisory lock and is READ COMMITTED, as a snapshot would be older than the wait; reads see one moment.
Values are put into statements by psycopg (its `ClientCursor`), so PostgreSQL infers their types as those of literals.
Errors leave without the statement and its values.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import sql
from sqlalchemy import Engine, PoolProxiedConnection
from sqlalchemy.exc import DBAPIError

from retrieval.document_database import NewerFile, StoreConnection, StoreError
from retrieval.postgres.postgres_schema import MIN_PGVECTOR, STEPS
from retrieval.postgres.words import index_words

_LOCKS = 0x706F6E64  # "pond", as for chats; the second number is the schema's
_WRITER = "hashtext('writer of ' || current_schema())"
_IDLE = 8  # connections that are kept
_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED"
_PLACE = re.compile(r"\?(\d*)|(?<!:):([a-z_]\w*)|%")


class PostgresDatabase:
    """The documents of a PostgreSQL database. Several processes may use it at once."""

    backend: Literal["postgresql"] = "postgresql"

    def __init__(self, engine: Engine) -> None:
        """
        Args:
            engine: of psycopg; its connections are kept here, not by its pool.

        Raises:
            StoreError: the database cannot be used, or has no pgvector that is new enough.
            NewerFile: it has taken steps that `STEPS` does not have.
        """
        self._engine = engine
        self._idle = list[PoolProxiedConnection]()
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._migrate()
        except BaseException:
            self.close()
            raise

    def _migrate(self) -> None:
        """Takes the steps that the database has not taken, all or none."""
        with self.writing() as db:
            db.execute(
                """CREATE TABLE IF NOT EXISTS document_migrations (
                    name text COLLATE "C" PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"""
            )
            taken = {row[0] for row in db.execute("SELECT name FROM document_migrations")}
            if newer := taken - STEPS.keys():
                raise NewerFile(f"it has taken the step {min(newer)!r}, unknown here: a newer Ponder wrote it")
            for name, statements in STEPS.items():
                if name not in taken:
                    for statement in statements:
                        db.execute(statement)
                    db.execute("INSERT INTO document_migrations (name) VALUES (?)", (name,))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for held in idle:
            held.close()

    def rows(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        with self.reading() as db:
            return db.execute(sql, values).fetchall()

    @contextmanager
    def writing(self) -> Iterator[StoreConnection]:
        with self.transaction() as db:
            db.execute(f"SELECT pg_advisory_xact_lock({_LOCKS}, {_WRITER})")
            yield db

    @contextmanager
    def reading(self) -> Iterator[StoreConnection]:
        with self.transaction(_READ) as db:
            yield db

    @contextmanager
    def transaction(self, begin: str = _WRITE) -> Iterator[StoreConnection]:
        """A transaction that takes no turns: its rows are locked one by one.

        Raises:
            StoreError: PostgreSQL's error.
        """
        held = None
        try:
            held, db = self._begun(begin)
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if not db.driver.closed:
                    with suppress(psycopg.Error):
                        db.execute("ROLLBACK")
                raise
        except psycopg.Error as error:
            raise _store_error(error) from None
        finally:
            if held is not None:
                self._put_back(held)

    def _begun(self, begin: str) -> tuple[PoolProxiedConnection, PostgresConnection]:
        """A connection in a transaction: an idle one that still answers, else a new one."""
        while True:
            with self._lock:
                held = self._idle.pop() if self._idle else None
            if held is None:
                held = self._connect()
                db = PostgresConnection(_driver(held))
                db.execute(begin)
                return held, db
            try:
                db = PostgresConnection(_driver(held))
                db.execute(begin)
            except psycopg.Error:  # the server was restarted meanwhile, say
                held.invalidate()
            else:
                return held, db

    def _connect(self) -> PoolProxiedConnection:
        try:
            held = self._engine.raw_connection()
        except OSError as error:  # it is no database for us
            raise StoreError(str(error), "0A000") from None
        except DBAPIError as error:
            if isinstance(error.orig, psycopg.Error):
                raise _store_error(error.orig) from None
            raise
        try:
            _set_up(_driver(held))
        except BaseException:
            held.close()
            raise
        return held

    def _put_back(self, held: PoolProxiedConnection) -> None:
        driver = _driver(held)
        with self._lock:
            if not driver.closed and not self._closed and len(self._idle) < _IDLE:
                self._idle.append(held)
                return
        with suppress(psycopg.Error):
            held.close()

    def index_words(self, db: StoreConnection, generation: int) -> None:
        index_words(db, generation)

    def encode_vector(self, vector: NDArray[np.float16]) -> str:
        return f"[{','.join(map(str, vector.tolist()))}]"

    def decode_vector(self, value: str) -> NDArray[np.float32]:
        return np.array(value[1:-1].split(","), np.float32)


class PostgresConnection:
    """psycopg's connection, as `retrieval.document_database.StoreConnection`."""

    def __init__(self, driver: psycopg.Connection[Any]) -> None:
        self.driver = driver

    def execute(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = (), /) -> psycopg.Cursor[Any]:
        statement, numbered = _translated(sql)
        cursor = psycopg.ClientCursor(self.driver, row_factory=_row_factory)
        return cursor.execute(statement, _given(values, numbered))

    def executemany(self, sql: str, values: Iterable[Sequence[Any]], /) -> None:
        statement, numbered = _translated(sql)
        with psycopg.ClientCursor(self.driver) as cursor:
            cursor.executemany(statement, [_given(each, numbered) for each in values])


class PostgresRow(tuple[Any, ...]):
    """A row by place, by name, or as a mapping by `dict`, as `sqlite3.Row` is."""

    places: Mapping[str, int]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.places[key] if isinstance(key, str) else key)

    def keys(self) -> list[str]:
        return list(self.places)


def _row_factory(cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], PostgresRow]:
    places = {column.name: at for at, column in enumerate(cursor.description or ())}

    def make(values: Sequence[Any]) -> PostgresRow:
        row = PostgresRow(values)
        row.places = places
        return row

    return make


@lru_cache(maxsize=1000)
def _translated(statement: str) -> tuple[bytes, bool]:
    """A statement with its places in psycopg's form; True where they are numbered."""
    numbered = re.search(r"\?\d", statement) is not None

    def place(found: re.Match[str]) -> str:
        if found[0] == "%":
            return "%%"
        if found[2]:
            return f"%({found[2]})s"
        return f"%(p{found[1]})s" if found[1] else "%s"

    return _PLACE.sub(place, statement).encode(), numbered


def _given(values: Sequence[Any] | Mapping[str, Any], numbered: bool) -> Sequence[Any] | Mapping[str, Any]:
    if numbered and not isinstance(values, Mapping):
        return {f"p{at}": value for at, value in enumerate(values, 1)}
    return values


def _driver(held: PoolProxiedConnection) -> psycopg.Connection[Any]:
    driver = held.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver


def _set_up(db: psycopg.Connection[Any]) -> None:
    """Has statements find the tables and pgvector's types; makes the schema and the extension where they are missing.

    Raises:
        StoreError: pgvector is not there, or too old.
    """
    try:
        db.autocommit = True
        (schema,) = db.execute("SELECT current_schema() || '_documents'").fetchone() or ("",)
        place = _extension(db) or _with_extension(db)
        if db.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchone() is None:
            db.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        db.execute(sql.SQL("SET search_path TO {}, {}").format(sql.Identifier(schema), sql.Identifier(place)))
    except psycopg.Error as error:
        raise _store_error(error) from None


def _extension(db: psycopg.Connection[Any]) -> str | None:
    """The schema that pgvector's types are in; None where it is not in the database yet."""
    found = db.execute(
        "SELECT nspname, extversion FROM pg_extension e JOIN pg_namespace n ON n.oid = extnamespace "
        "WHERE extname = 'vector'"
    ).fetchone()
    if found is not None:
        _check_version(found[1])
    return None if found is None else str(found[0])


def _with_extension(db: psycopg.Connection[Any]) -> str:
    available = "SELECT default_version FROM pg_available_extensions WHERE name = 'vector'"
    found = db.execute(available).fetchone()
    if found is None:
        raise StoreError(
            "it has no pgvector, which finds documents by their meaning; accepted: a server with the extension "
            "installed (Debian: `apt install postgresql-NN-pgvector`, NN being its version; otherwise "
            "github.com/pgvector/pgvector)", "0A000"
        )  # fmt: skip
    _check_version(found[0])
    try:
        db.execute("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
    except psycopg.errors.InsufficientPrivilege:
        raise StoreError(
            "its user may not make the extension pgvector; accepted: a database where an administrator has run "
            "`CREATE EXTENSION vector`", "42501"
        ) from None  # fmt: skip
    except psycopg.errors.UniqueViolation:  # another process made it at the same moment
        pass
    return _extension(db) or "public"


def _check_version(version: str) -> None:
    """
    Raises:
        StoreError: it is too old.
    """
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_PGVECTOR:
        oldest = ".".join(map(str, MIN_PGVECTOR))
        raise StoreError(
            f"its pgvector is {version}; accepted: {oldest} or newer (after installing it, `ALTER EXTENSION vector "
            "UPDATE`)", "0A000"
        )  # fmt: skip


def _store_error(error: psycopg.Error) -> StoreError:
    told = error.diag.message_primary or str(error).strip().partition("\n")[0]
    return StoreError(told, error.sqlstate)
