"""A connection to one database file, its transactions, and what every store does with rows.

Python's `sqlite3` opens transactions late and by guessing; here each begins where it is said, so reads and changes of
the shape belong to it too. Errors leave a transaction as the driver's own, without the statement and its values: both
may hold users' words, and `app/errors.py` knows a full disk by them. Knows nothing of what is kept.
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

from app.db.sqlite import Row


def connect(path: Path, busy_timeout_s: float) -> Connection:
    """Opens a database file, which is made where there is none; from any thread, by one at a time."""
    url = URL.create("sqlite", database=str(path))
    given = {"check_same_thread": False, "timeout": busy_timeout_s}
    engine = create_engine(url, poolclass=NullPool, connect_args=given, hide_parameters=True)
    event.listen(engine, "connect", _set_up)
    event.listen(engine, "begin", _begin)
    with _as_the_driver():
        return engine.connect()


@contextmanager
def transaction(db: Connection, *, immediate: bool = False) -> Iterator[None]:
    """All of the block is kept, or nothing. `immediate`: no other process writes from its beginning on.

    Raises:
        sqlite3.Error: as the driver raised it.
    """
    try:
        with _as_the_driver(), db.execution_options(immediate=immediate).begin():
            yield
    except BaseException:
        if not db.closed:
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


@cache
def _compiled(statement: ClauseElement, dialect: Dialect) -> SQLCompiler:
    compiled = statement.compile(dialect=dialect)
    assert isinstance(compiled, SQLCompiler)
    return compiled


@cache
def _insert(table: Table) -> Insert:
    return table.insert()


@contextmanager
def _as_the_driver() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        if error.orig is None:
            raise
        raise error.orig from None


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


def _driver(db: Connection) -> sqlite3.Connection:
    driver: Any = db.connection.driver_connection  # Any: SQLAlchemy has no type for a driver's
    return driver
