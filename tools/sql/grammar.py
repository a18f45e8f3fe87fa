"""A regular expression of the queries of a database that SQLite can run: its own tables and columns, in their places.

One SELECT over a table or two joined ones, with expressions, aggregates, WHERE, GROUP BY, HAVING, ORDER BY and LIMIT:
what a small model can write. Functions, subqueries, CASE and set operations are left out. Knows nothing of who writes
the query.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools.sql.reach import Column, SqlRelation

MAX_LENGTH = 30_000  # characters of the expression; joins are left out where it is longer
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = """
abort action add after all alter always analyze and as asc attach autoincrement before begin between by cascade case
cast check collate column commit conflict constraint create cross current current_date current_time current_timestamp
database default deferrable deferred delete desc detach distinct do drop each else end escape except exclude exclusive
exists explain fail filter first following for foreign from full generated glob group groups having if ignore immediate
in index indexed initially inner insert instead intersect into is isnull join key last left like limit match
materialized natural no not nothing notnull null nulls of offset on or order others outer over partition plan pragma
preceding primary query raise range recursive references regexp reindex release rename replace restrict returning right
rollback row rows savepoint select set table temp temporary then ties to transaction trigger unbounded union unique
update using vacuum values view virtual when where window with within without
"""
_KEYWORDS = frozenset(_RESERVED.split())
_STRING = r"'([^'\\\x00-\x1f]|''){0,200}'"
_UNSIGNED = r"[0-9]{1,12}(\.[0-9]{1,6})?"
_NUMBER = f"-?{_UNSIGNED}"
_AGGREGATES = "(count|sum|avg|min|max|total)"
_COMPARED = "(=|!=|<>|<|<=|>|>=)"


def identifier(name: str) -> str:
    """Returns a name as SQL has it, in double quotes where it must be."""
    if _PLAIN.fullmatch(name) and name.lower() not in _KEYWORDS:
        return name
    return '"' + name.replace('"', '""') + '"'


def _word(text: str) -> str:
    """Returns keywords in upper or in lower case."""
    return f"({text}|{text.lower()})"


def _one_of(names: Sequence[str]) -> str:
    return "(" + "|".join(re.escape(each) for each in names) + ")"


def _listed(item: str, most: int) -> str:
    return f"{item}(, ?{item}){{0,{most - 1}}}"


def _query(columns: str, tables: str) -> str:
    """Returns the expression of a query over `tables`, the text after FROM, that sees `columns`."""
    literal = f"({_STRING}|{_NUMBER})"
    # An operand has no sign: two of them begin a comment.
    expression = f"{columns}( ?[-+*/] ?({columns}|{_UNSIGNED}))?"
    aggregate = rf"(count\(\*\)|{_AGGREGATES}\(({_word('DISTINCT')} )?{expression}\))"
    some = f"({expression}|{aggregate})"
    negated = f"({_word('NOT')} )?"
    condition = (
        f"{columns}( ?{_COMPARED} ?({literal}|{columns})| {negated}{_word('LIKE')} {_STRING}"
        rf"| {negated}{_word('IN')} \({_listed(literal, 20)}\)"
        f"| {negated}{_word('BETWEEN')} {literal} {_word('AND')} {literal}| {_word('IS')} {negated}{_word('NULL')})"
    )
    where = f"( {_word('WHERE')} {condition}( ({_word('AND')}|{_word('OR')}) {condition}){{0,3}})?"
    direction = f"( ({_word('ASC')}|{_word('DESC')}))?"
    plain = f" {_word('ORDER BY')} {_listed(expression + direction, 3)}"
    # An aggregate orders groups alone.
    having = f"( {_word('HAVING')} {aggregate} ?{_COMPARED} ?{_NUMBER})?"
    ordered = f"( {_word('ORDER BY')} {_listed(some + direction, 3)})?"
    group = f" {_word('GROUP BY')} {_listed(columns, 3)}{having}{ordered}"
    limit = f"( {_word('LIMIT')} [1-9][0-9]{{0,3}})?"
    return rf"({_word('DISTINCT')} )?(\*|{_listed(some, 10)}) {_word('FROM')} {tables}{where}({group}|{plain})?{limit}"


def _joined(first: SqlRelation, second: SqlRelation) -> list[tuple[str, str]]:
    """Returns the pairs of columns by which two tables may be joined: of one name, or a key and a name with it."""

    def linked(key: Column, of: SqlRelation, other: Column) -> bool:
        singular = of.name.lower().removesuffix("s")
        return other.name.lower() in (f"{singular}_{key.name.lower()}", f"{of.name.lower()}_{key.name.lower()}")

    return [
        (f"{identifier(first.name)}.{identifier(a.name)}", f"{identifier(second.name)}.{identifier(b.name)}")
        for a in first.columns
        for b in second.columns
        if (a.name.lower() == b.name.lower() != "id") or linked(a, first, b) or linked(b, second, a)
    ]


def query_pattern(relations: Sequence[SqlRelation]) -> str | None:
    """Returns the expression that a whole query matches, without joins where those are too many; None where there is no
    table, or too many tables.
    """
    read = [each for each in relations if each.columns]
    single = [_single(each) for each in read]
    pairs = [_pair(a, b, links) for a in read for b in read if a is not b and (links := _joined(a, b))]
    for found in (single + pairs, single):
        pattern = f"^{_word('SELECT')} ({'|'.join(found)})$"
        if found and len(pattern) <= MAX_LENGTH:
            return pattern
    return None


def _single(relation: SqlRelation) -> str:
    name = re.escape(identifier(relation.name))
    columns = rf"(({name}\.)?{_one_of([identifier(each.name) for each in relation.columns])})"
    return _query(columns, name)


def _pair(first: SqlRelation, second: SqlRelation, links: Sequence[tuple[str, str]]) -> str:
    names = [re.escape(identifier(of.name)) for of in (first, second)]
    columns = [
        rf"{name}\.{_one_of([identifier(each.name) for each in of.columns])}"
        for name, of in zip(names, (first, second), strict=True)
    ]
    on = "|".join(f"{re.escape(a)} = {re.escape(b)}|{re.escape(b)} = {re.escape(a)}" for a, b in links)
    join = f"{names[0]} ({_word('LEFT')} )?{_word('JOIN')} {names[1]} {_word('ON')} ({on})"
    return _query(f"({'|'.join(columns)})", join)
