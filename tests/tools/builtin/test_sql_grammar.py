"""The expression of a database's queries: SQLite runs all that match it, and what people ask matches."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tools.builtin.databases import Databases
from tools.sql import Column, SqlDatabase, SqlRelation, query_pattern
from tools.sql.grammar import MAX_LENGTH, identifier

MADE = """
CREATE TABLE customers(id INTEGER PRIMARY KEY, name TEXT, "since when" TEXT);
CREATE TABLE orders(id INTEGER PRIMARY KEY, customer_id INT, "order" TEXT, total REAL, "a""b'c.(d)" BLOB);
INSERT INTO customers VALUES (1, 'Ana', '2020'), (2, 'O''Hara', NULL);
INSERT INTO orders VALUES (1, 1, 'lamp', 4.5, x'00'), (2, 1, 'desk', 10, NULL), (3, 2, 'lamp', 7, 'text');
"""


def relations(*tables: tuple[str, tuple[str, ...]]) -> list[SqlRelation]:
    return [SqlRelation(name, "table", tuple(Column(column, "") for column in columns)) for name, columns in tables]


KNOWN = relations(
    ("customers", ("id", "name", "since when")), ("orders", ("id", "customer_id", "order", "total", "a\"b'c.(d)"))
)
PATTERN = query_pattern(KNOWN) or ""


@pytest.fixture(scope="module")
def database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.executescript(MADE)
    return connection


@pytest.mark.slow
@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(query=st.from_regex(PATTERN, fullmatch=True))
def test_sqlite_runs_every_query_that_matches(database: sqlite3.Connection, query: str) -> None:
    database.execute(query).fetchall()


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM orders",
        "select name from customers where name = 'O''Hara'",
        'SELECT "order", count(*) FROM orders GROUP BY "order" HAVING count(*) > 1 ORDER BY count(*) DESC LIMIT 3',
        "SELECT max(total) FROM orders WHERE customer_id IN (1, 2) AND total BETWEEN 1 AND 9.5",
        "SELECT DISTINCT orders.total * 2 FROM orders WHERE orders.total IS NOT NULL ORDER BY orders.total ASC",
        "SELECT customers.name, sum(orders.total) FROM customers JOIN orders ON orders.customer_id = customers.id "
        "GROUP BY customers.name",
    ],
)
def test_queries_that_people_ask_match(database: sqlite3.Connection, query: str) -> None:
    assert re.fullmatch(PATTERN, query)
    assert database.execute(query).fetchall()


@pytest.mark.parametrize(
    "query",
    [
        "SELECT price FROM orders", "SELECT name FROM orders", "SELECT * FROM lamps", "SELECT order FROM orders",
        "DELETE FROM orders", "SELECT * FROM orders; DROP TABLE orders", "SELECT id FROM orders WHERE max(total) > 1",
        "SELECT id FROM customers JOIN orders ON orders.customer_id = customers.id", "SELECT total --1 FROM orders",
        "SELECT * FROM orders ORDER BY count(*)", "SELECT load_extension('x') FROM orders",
    ],
)  # fmt: skip
def test_others_do_not(query: str) -> None:
    assert not re.fullmatch(PATTERN, query)


def test_names_are_quoted_where_they_must_be(database: sqlite3.Connection) -> None:
    for name in ("plain", "order", "two words", 'a"b', "1st", "Ünder", ""):
        if name:
            database.execute(f"CREATE TEMP TABLE {identifier(name)}({identifier(name)} TEXT)")
            database.execute(f"SELECT {identifier(name)} FROM {identifier(name)}")
    assert identifier("plain") == "plain" and identifier("order") == '"order"'


def test_too_many_tables_leave_joins_out_and_then_everything() -> None:
    few = query_pattern(relations(*((f"t{at}", ("id", "name")) for at in range(2)))) or ""
    assert "(JOIN|join)" in few
    many = query_pattern(relations(*((f"t{at}", ("id", "name")) for at in range(9)))) or ""
    assert "(JOIN|join)" not in many and len(many) <= MAX_LENGTH
    assert re.fullmatch(many, "SELECT name FROM t8")
    assert query_pattern(relations(*((f"t{at}", ("id", "name")) for at in range(200)))) is None
    assert query_pattern([]) is query_pattern(relations(("empty", ()))) is None


async def test_the_tool_is_held_to_the_one_database_there_is(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.executescript(MADE)
    shop = SqlDatabase(tmp_path / "shop.db", hidden_columns=["orders.total"])
    (schema, query) = Databases({"shop": shop}).tools()
    assert schema.guided_parameters is None and query.guided_parameters is not None
    held = await query.guided_parameters()
    assert held is not None and set(held["properties"]) == {"sql"}
    pattern = held["properties"]["sql"]["pattern"]
    assert re.fullmatch(pattern, "SELECT name FROM customers") and "total" not in pattern.replace("|total)", "")
    (_, query) = Databases({"shop": shop, "other": shop}).tools()
    assert query.guided_parameters is not None and await query.guided_parameters() is None
    (_, query) = Databases({"shop": shop}).tools()
    (tmp_path / "shop.db").unlink()
    assert query.guided_parameters is not None and await query.guided_parameters() is None
