"""A connection to one database, SQLite's file or PostgreSQL's server, its transactions, and what every store does with
rows.

Python's `sqlite3` opens transactions late and by guessing; here each begins where it is said, so reads and changes of
the shape belong to it too. Errors leave a transaction without the statement and its values, which may hold users'
words: SQLite's as the driver's own, by which `app/errors.py` knows a full disk, PostgreSQL's as `PostgresError`. Knows
nothing of what is kept.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    ClauseElement,
    Connection,
    Dialect,
    Executable,
    Insert,
    NullPool,
    Table,
    create_engine,
    event,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler

from app.db.sqlite import PostgresError, Row


def connect(place: Path | str, busy_timeout_s: float, *, sole: bool = False, member: str | None = None) -> Connection:
    """Opens a database: a file, which is made where there is none, or the address of a PostgreSQL database.

    The connection is of any thread, by one at a time. `sole`: no other process may open PostgreSQL's so meanwhile; a
    file's directory has a lock of its own. `member`: only others with a name of their own may, see
    `app/db/postgres.py`.

    Raises:
        OSError: another process has it.
        sqlite3.Error, PostgresError: it cannot be opened.
        BadSetting: the driver of PostgreSQL is not installed.
    """
    if isinstance(place, str):
        from app.db.postgres import postgres_engine

        engine = postgres_engine(place, busy_timeout_s, sole=sole, member=member)
    else:
        url = URL.create("sqlite", database=str(place))
        given = {"check_same_thread": False, "timeout": busy_timeout_s}
        engine = create_engine(url, poolclass=NullPool, connect_args=given, hide_parameters=True)
        event.listen(engine, "connect", _set_up)
        event.listen(engine, "begin", _begin)
    with _driver_errors():
        return engine.connect()


@contextmanager
def transaction(db: Connection, *, immediate: bool = False) -> Iterator[None]:
    """All of the block is kept, or nothing. `immediate`: no other process writes from its beginning on.

    Raises:
        sqlite3.Error: as the driver raised it.
        PostgresError: PostgreSQL's.
    """
    try:
        with _driver_errors(), db.execution_options(immediate=immediate).begin():
            yield
    except BaseException:
        if not db.closed and not db.invalidated:
            _driver(db).rollback()  # SQLAlchemy does not where a commit failed
        raise


def rows(db: Connection, statement: Executable, /, **values: object) -> list[Row]:
    """In a transaction, as are those below."""
    result = db.execute(statement, values)
    names = tuple(result.keys())
    return [dict(zip(names, each, strict=True)) for each in result]


def row(db: Connection, statement: Executable, /, **values: object) -> Row | None:
    """The first of the rows."""
    found = rows(db, statement, **values)
    return found[0] if found else None


def insert(db: Connection, table: Table, values: Row) -> None:
    db.execute(_insert(table), values)


def execute_many(db: Connection, statement: ClauseElement, values: Sequence[Mapping[str, object]]) -> None:
    """Executes a statement for each of the values by its compiled text: for those that run with every token.

    This takes half the time of `db.execute`; the values are given to the driver as they are.
    """
    compiled = _compiled(statement, db.dialect)
    names = compiled.positiontup
    given = values if names is None else [tuple(each[name] for name in names) for each in values]
    db.exec_driver_sql(compiled.string, given)


@contextmanager
def secure_delete(db: Connection) -> Iterator[None]:
    """Leaves nothing of what the block deletes in a file's free pages; PostgreSQL's rows go with its next vacuum."""
    if not is_sqlite(db):
        yield
        return
    db.exec_driver_sql("PRAGMA secure_delete = ON")
    yield
    db.exec_driver_sql("PRAGMA secure_delete = OFF")


def is_sqlite(db: Connection) -> bool:
    return db.dialect.name == "sqlite"


@cache
def _compiled(statement: ClauseElement, dialect: Dialect) -> SQLCompiler:
    compiled = statement.compile(dialect=dialect)
    assert isinstance(compiled, SQLCompiler)
    return compiled


@cache
def _insert(table: Table) -> Insert:
    return table.insert()


@contextmanager
def _driver_errors() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        if error.orig is None:
            raise
        raise _without_values(error.orig) from None


def _without_values(error: BaseException) -> BaseException:
    if isinstance(error, sqlite3.Error):
        return error
    told = getattr(getattr(error, "diag", None), "message_primary", None) or str(error).strip().partition("\n")[0]
    return PostgresError(told, getattr(error, "sqlstate", None))


def _set_up(db: sqlite3.Connection, _: Any) -> None:  # Any: of SQLAlchemy's pool
    db.isolation_level = None  # transactions begin in `_begin`, and nowhere else
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")  # with WAL, NORMAL loses commits that were acknowledged before a power cut


def pragma(db: Connection, setting: str) -> None:
    """Sets or calls one of SQLite's pragmas, outside of any transaction."""
    _driver(db).execute(f"PRAGMA {setting}").fetchall()


def _begin(db: Connection) -> None:
    _driver(db).execute("BEGIN IMMEDIATE" if db.get_execution_options().get("immediate") else "BEGIN")


def _driver(db: Connection) -> Any:  # Any: SQLAlchemy has no type for a driver's
    return db.connection.driver_connection
