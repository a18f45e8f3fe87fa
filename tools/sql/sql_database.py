"""Runs read-only queries of a SQLite database within limits.

Each query has a connection of its own, opened read-only, in a thread of its own. SQLite is limited in its reach
(`reach`) and in how long values, statements and programs may be. Its progress handler stops a query at a deadline, when
its caller is gone, or when its temporary files grow too large. `printf` is written anew: SQLite's own can be made to
write a thousand million characters, and takes its time.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tools.sql import statement
from tools.sql.reach import Reach, SqlRelation, survey
from tools.sql.statement import Forbidden, Mistaken, QueryError, Stopped

WIDEST = 1000  # characters of one field
_FIELD = re.compile(
    r"%(?P<flags>[-+ 0#,]*)(?P<width>\d{0,9})(?:\.(?P<precision>\d{0,9}))?l{0,2}(?P<kind>.|\Z)", re.DOTALL
)


def formatted(template: object = None, *values: object) -> str | None:
    """
    Raises:
        ValueError: a field is of no kind known here, or too wide.
    """
    if template is None:
        return None
    left = iter(values)

    def field(match: re.Match[str]) -> str:
        kind, flags, width = match["kind"], match["flags"], int(match["width"] or 0)
        if kind == "%":
            return "%"
        precision = match["precision"]
        if kind not in "diufFeEgGscxXo" or not kind or max(width, int(precision or 0)) > WIDEST:
            raise ValueError(match[0])
        value = next(left, None)
        mark = f"%{flags.replace(',', '')}{width or ''}" + ("" if precision is None else f".{precision or 0}")
        if kind in "sc":
            text = "" if value is None else _text(value)
            return f"{mark}s" % (text[:1] if kind == "c" else text)
        number = _number(value)
        if kind in "diuxXo":
            whole = int(number)
            return (
                f"{whole:,}".rjust(width)
                if "," in flags
                else f"{mark}{kind.replace('i', 'd').replace('u', 'd')}" % whole
            )
        return f"{number:,.{precision or 6}f}".rjust(width) if "," in flags else f"{mark}{kind}" % number

    return _FIELD.sub(field, _text(template))


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _number(value: object) -> float | int:
    if isinstance(value, (int, float)):
        return value
    found = re.match(r"\s*[-+]?(?:\d+(?:\.\d*)?|\.\d+)", _text(value) if value is not None else "")
    return (float(found[0]) if "." in found[0] else int(found[0][:30])) if found else 0


Value = str | int | float | None
T = TypeVar("T")

_OPERATIONS = 1000  # of SQLite's virtual machine between two looks at the clock
_LOOK_S = 0.05  # between two looks at the temporary files
_LIMITS = {
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4 * statement.MAX_LENGTH,  # bytes
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 50_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 100,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


@dataclass(frozen=True, slots=True)
class QueryLimits:
    seconds: float = 5.0
    rows: int = 500
    bytes: int = 200_000  # of all values together
    value_bytes: int = 250_000  # of one value; functions that search one in another take their product in steps
    temporary_bytes: int = 256_000_000  # of this process's SQLite files for sorting and the like (Linux)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a query. `truncated`: there were more, or values were cut. A blob is shown by its size."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    truncated: bool


class SqlDatabase:
    """A SQLite file, with tables that are not there for a query and columns that are NULL to it."""

    def __init__(
        self,
        path: Path | str,
        *,
        hidden_tables: Collection[str] = (),
        hidden_columns: Collection[str] = (),
        limits: QueryLimits | None = None,
    ) -> None:
        """`hidden_columns` are written `table.column`.

        Raises:
            ValueError: there is no such file, table or column, or the column is one of a virtual table.
        """
        self.path = Path(path)
        self.limits = limits or QueryLimits()
        self._tables = frozenset(name.lower() for name in hidden_tables)
        self._columns = frozenset(name.lower() for name in hidden_columns)
        self._check()

    async def query(self, sql: str, parameters: Sequence[Value] = ()) -> Table:
        """
        Raises:
            Forbidden: the query is no single SELECT, or reads hidden data.
            Stopped: it went beyond a limit.
            Mistaken: SQLite does not understand it.
        """
        statement.check(sql)
        if self._columns and statement.joins_by_name(sql):
            raise Forbidden("Joins by NATURAL and USING are not accepted here; write JOIN … ON a.x = b.x.")
        return await self._apart(lambda connection, reach: self._rows(connection, reach, sql, parameters))

    async def schema(self) -> list[SqlRelation]:
        """The tables and views that a query may read, without hidden ones.

        Raises:
            QueryError: the file cannot be read.
        """
        return await self._apart(lambda _, reach: reach.relations)

    async def _apart(self, work: Callable[[sqlite3.Connection, Reach], T]) -> T:
        """`work` in a thread with a connection, interrupted when the waiting task is cancelled."""
        gone = threading.Event()
        try:
            return await asyncio.to_thread(self._within, work, gone)
        finally:
            gone.set()

    def _within(self, work: Callable[[sqlite3.Connection, Reach], T], gone: threading.Event) -> T:
        deadline = _Deadline(self.limits, gone)
        reach: Reach | None = None
        try:
            with closing(self._open()) as connection:
                connection.set_progress_handler(deadline, _OPERATIONS)
                reach = survey(connection, self._tables, self._columns)
                return work(connection, reach)
        except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
            raise self._reason(error, reach, deadline) from None

    def _open(self) -> sqlite3.Connection:
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=1.0)
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        # A schema may call functions and keep large numbers of its own: neither is trusted.
        for pragma in ("query_only = ON", "trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
            connection.execute(f"PRAGMA {pragma}")
        for limit, most in {**_LIMITS, sqlite3.SQLITE_LIMIT_LENGTH: self.limits.value_bytes}.items():
            connection.setlimit(limit, most)
        for name in ("printf", "format"):
            connection.create_function(name, -1, formatted, deterministic=True)
        return connection

    def _rows(self, connection: sqlite3.Connection, reach: Reach, sql: str, parameters: Sequence[Value]) -> Table:
        cursor = connection.execute(sql, tuple(parameters))
        columns = tuple(each[0] for each in cursor.description)
        rows, left, truncated = list[tuple[Value, ...]](), self.limits.bytes, False
        for row in cursor:
            shown = tuple(_shown(value) for value in row)
            left -= sum(len(str(value).encode()) for value in shown)
            if len(rows) == self.limits.rows or left < 0:
                truncated = True
                break
            rows.append(shown)
        return Table(columns, tuple(rows), truncated)

    def _reason(self, error: Exception, reach: Reach | None, deadline: _Deadline) -> QueryError:
        text = str(error)
        if deadline.reason:
            return Stopped(deadline.reason)
        if reach is not None and text.startswith("no such table: "):
            return Forbidden(reach.unknown(text.removeprefix("no such table: ").removeprefix("main.").lower()))
        if reach is not None and reach.refused:
            return Forbidden(reach.refused)
        if "user-defined function" in text:
            return Mistaken(f"printf and format take %d %i %u %f %e %g %s %c %x %X %o %% with widths up to {WIDEST}.")
        if "too big" in text or "too large" in text:
            return Stopped(f"A value grew beyond {self.limits.value_bytes:,} bytes, which is the limit.")
        return Mistaken(f"SQLite says: {text}.")

    def _check(self) -> None:
        if not self.path.is_file():
            raise ValueError(f"There is no file {str(self.path)!r}.")
        try:
            with closing(self._open()) as connection:
                kinds = {name.lower(): kind for _, name, kind, *_ in connection.execute("PRAGMA main.table_list")}
                missing = self._tables - set(kinds)
                for table, _, column in (name.rpartition(".") for name in self._columns):
                    named = connection.execute("SELECT lower(name) FROM pragma_table_xinfo(?)", (table,)).fetchall()
                    if kinds.get(table) == "virtual":
                        raise ValueError(f"{table!r} is a virtual table; hide the whole of it, not a column.")
                    missing |= {f"{table}.{column}"} if (column,) not in named else set()
        except sqlite3.Error as error:
            raise ValueError(f"{str(self.path)!r} cannot be read as SQLite: {error}.") from None
        if missing:
            raise ValueError(f"{str(self.path)!r} has nothing to hide by these names: {', '.join(sorted(missing))}.")


class _Deadline:
    """SQLite's progress handler: true ends the query, for the reason it keeps."""

    def __init__(self, limits: QueryLimits, gone: threading.Event) -> None:
        self._limits, self._gone = limits, gone
        self._end = time.monotonic() + limits.seconds
        self._look = 0.0
        self.reason = ""

    def __call__(self) -> bool:
        now = time.monotonic()
        if self._gone.is_set():
            self.reason = "The query was given up."
        elif now > self._end:
            self.reason = f"The query took longer than the limit of {self._limits.seconds:g} s."
        elif now > self._look:
            self._look = now + _LOOK_S
            if _temporary_bytes() > self._limits.temporary_bytes:
                most = self._limits.temporary_bytes
                self.reason = f"The query sorts or keeps more than {most:,} bytes, which is the limit."
        return bool(self.reason)


def _temporary_bytes() -> int:
    """The size of SQLite's temporary files, which have no name but in this process's open files; 0 where none says."""
    total = 0
    try:
        for number in os.listdir("/proc/self/fd"):
            link = f"/proc/self/fd/{number}"
            try:
                total += os.stat(link).st_size if "etilqs_" in os.readlink(link) else 0
            except OSError:  # closed meanwhile
                continue
    except OSError:
        return 0
    return total


def _shown(value: object) -> Value:
    if isinstance(value, bytes):
        return f"<blob of {len(value):,} bytes>"
    if isinstance(value, (str, int, float)) or value is None:
        return value
    raise TypeError(type(value))
