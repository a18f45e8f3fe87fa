"""The reach of a query in one database: the tables it reads, the columns that are NULL to it, the functions it calls.

An allow-list, handed to SQLite as its authorizer: anything not named here is refused. Tables can contain hidden data of
others (generated columns, full-text indexes and their shadow tables, statistics), so those are hidden with their
source.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tools.sql.statement import joins_by_name, mentions

_FUNCTIONS = """
-> ->> abs acos acosh asin asinh atan atan2 atanh avg bm25 ceil ceiling char coalesce concat concat_ws cos cosh count
cume_dist current_date current_time current_timestamp date datetime degrees dense_rank exp first_value floor format
glob group_concat hex highlight ifnull iif instr json json_array json_array_length json_each json_extract
json_group_array json_group_object json_insert json_object json_patch json_quote json_remove json_replace json_set
json_tree json_type json_valid julianday lag last_value lead length like likelihood likely ln log log10 log2 lower
ltrim match max min mod nth_value ntile nullif octet_length percent_rank pi pow power printf quote radians random rank
replace round row_number rtrim sign sin sinh snippet soundex sqlite_version sqrt strftime string_agg substr substring
sum tan tanh time timediff total trim trunc typeof unhex unicode unixepoch unlikely upper
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
_TABLE_FUNCTIONS = frozenset({"json_each", "json_tree"})
_GENERATED = (2, 3)  # table_xinfo's marks of a virtual and of a stored generated column


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    key: bool = False


@dataclass(frozen=True, slots=True)
class SqlRelation:
    """A table or a view as a query may see it."""

    name: str
    kind: str  # "table" or "view"
    columns: tuple[Column, ...]


@dataclass(slots=True)
class Reach:
    """An authorizer, and the reason of its last refusal."""

    relations: list[SqlRelation]
    tables: frozenset[str]  # in lower case, shadow tables included
    hidden: frozenset[tuple[str, str]]  # (table, column), in lower case
    names: frozenset[str]  # of all there is, in lower case
    refused: str = field(default="", init=False)

    def authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        match action:
            case sqlite3.SQLITE_SELECT | sqlite3.SQLITE_RECURSIVE:
                return sqlite3.SQLITE_OK
            case sqlite3.SQLITE_FUNCTION:
                if (second or "").lower() in FUNCTIONS:
                    return sqlite3.SQLITE_OK
                self.refused = f"The function {second} is not available here."
            case sqlite3.SQLITE_READ:
                return self._read((first or "").lower(), (second or "").lower())
            case sqlite3.SQLITE_PRAGMA if first == "data_version" and second is None:
                return sqlite3.SQLITE_OK  # a full-text index asks whether it has changed
            case _:
                self.refused = "Nothing but reading is allowed here; accepted: SELECT over the tables listed."
        return sqlite3.SQLITE_DENY

    def _read(self, table: str, column: str) -> int:
        if (table, column) in self.hidden:
            return sqlite3.SQLITE_IGNORE  # reads as NULL
        # SQLite asks with an empty column for a table of which none is read, and calls a CTE a table there.
        system = table.startswith(("sqlite_", "pragma_", "fts5vocab", "fts3tokenize")) or table == "dbstat"
        if (
            table in self.tables
            or table in _TABLE_FUNCTIONS
            or (column == "" and not system and table not in self.names)
        ):
            return sqlite3.SQLITE_OK
        self.refused = self.unknown(table)
        return sqlite3.SQLITE_DENY

    def unknown(self, table: str) -> str:
        """Returns the one message for a missing table and for a hidden one."""
        names = ", ".join(relation.name for relation in self.relations[:50]) or "none"
        return f"There is no table {table!r} to read; there are: {names}."


def survey(connection: sqlite3.Connection, hidden_tables: Collection[str], hidden_columns: Collection[str]) -> Reach:
    """Limits `connection` to the reach of a query; names are in lower case, columns `table.column`.

    Opens its virtual tables first, which a query under an authorizer could not.
    """
    kinds = dict(connection.execute("SELECT name, type FROM pragma_table_list WHERE schema = 'main'"))
    sources = {name: sql or "" for name, sql in connection.execute("SELECT name, sql FROM sqlite_master")}
    hidden = {(t, c) for t, _, c in (name.rpartition(".") for name in hidden_columns)}
    closed = set(hidden_tables) | _copies(kinds, sources, hidden_tables, {table for table, _ in hidden})
    connection.execute("SELECT 1 FROM json_each('[]')").fetchall()
    relations, tables = list[SqlRelation](), set[str]()
    for name, kind in sorted(kinds.items()):
        key = name.lower()
        if key in closed or key.startswith("sqlite_") or (kind == "view" and hidden and joins_by_name(sources[name])):
            continue
        if kind == "shadow":
            tables.add(key)
            continue
        try:
            columns, generated = _columns(connection, name)
            if kind == "virtual":
                connection.execute(f"SELECT * FROM {quoted(name)} LIMIT 0").fetchall()
        except sqlite3.Error:  # a view of a dropped table, or a module that this SQLite lacks
            continue
        if any(table == key for table, _ in hidden):
            hidden |= {(key, column.lower()) for column in generated}
        seen = tuple(column for column in columns if (key, column.name.lower()) not in hidden)
        relations.append(SqlRelation(name, "view" if kind == "view" else "table", seen))
        tables.add(key)
    reach = Reach(relations, frozenset(tables), frozenset(hidden), frozenset(name.lower() for name in kinds))
    connection.set_authorizer(reach.authorize)
    reach.relations = [each for each in relations if each.kind == "table" or _answers(connection, each.name)]
    reach.refused = ""
    return reach


def _answers(connection: sqlite3.Connection, view: str) -> bool:
    """Returns whether a view reads only readable tables."""
    try:
        connection.execute(f"SELECT * FROM {quoted(view)} LIMIT 0").fetchall()
    except sqlite3.Error:
        return False
    return True


def _copies(
    kinds: dict[str, str], sources: dict[str, str], hidden_tables: Collection[str], partly: Collection[str]
) -> set[str]:
    """Tables that can contain hidden data: virtual tables over it, those over these, and their shadow tables."""
    virtual = {name.lower(): sources.get(name, "") for name, kind in kinds.items() if kind == "virtual"}
    names, over = frozenset(hidden_tables) | frozenset(partly), set[str]()
    while found := {name for name, source in virtual.items() if name not in over and mentions(source, names)}:
        over |= found
        names |= found
    shadows = (name.lower() for name, kind in kinds.items() if kind == "shadow")
    return over | {name for name in shadows if any(name.startswith(f"{owner}_") for owner in over)}


def _columns(connection: sqlite3.Connection, table: str) -> tuple[list[Column], list[str]]:
    rows = connection.execute("SELECT name, type, pk, hidden FROM pragma_table_xinfo(?)", (table,)).fetchall()
    shown = [Column(name, type_, bool(key)) for name, type_, key, mark in rows if mark != 1]
    return shown, [name for name, _, _, mark in rows if mark in _GENERATED]


def quoted(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def described(relations: Iterable[SqlRelation]) -> str:
    """The relations as lines a model reads: `users(id INTEGER key, name TEXT)`."""
    lines = list[str]()
    for each in relations:
        columns = ", ".join(f"{c.name}{' ' + c.type if c.type else ''}{' key' if c.key else ''}" for c in each.columns)
        lines.append(f"{'view ' if each.kind == 'view' else ''}{each.name}({columns})")
    return "\n".join(lines)
