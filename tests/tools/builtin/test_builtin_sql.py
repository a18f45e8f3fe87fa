"""Questions to a database: what is read, what is hidden, and that nothing can be changed, guessed or run away with."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tools.sql import Forbidden, Mistaken, QueryError, QueryLimits, SqlDatabase, Stopped, described

MADE = """
CREATE TABLE users(id INTEGER PRIMARY KEY, name TEXT, password TEXT, loud TEXT AS (upper(name)),
                   shout TEXT AS (password || '!'));
INSERT INTO users(name, password) VALUES ('Ana', 'hunter2'), ('Ben', 'swordfish');
CREATE TABLE orders(id INTEGER PRIMARY KEY, user_id INT, total REAL);
INSERT INTO orders(user_id, total) VALUES (1, 10.5), (1, 2.5), (2, 7);
CREATE TABLE secrets(word TEXT);
INSERT INTO secrets VALUES ('xyzzy');
CREATE VIEW totals AS SELECT name, sum(total) AS total FROM users JOIN orders ON users.id = user_id GROUP BY name;
CREATE VIEW leak AS SELECT * FROM secrets;
CREATE VIEW words AS SELECT name, password FROM users;
CREATE VIEW guess AS SELECT * FROM users NATURAL JOIN (SELECT 'hunter2' AS password);
CREATE INDEX by_word ON users(password);
CREATE VIRTUAL TABLE texts USING fts5(body);
INSERT INTO texts VALUES ('the dam of Orsk');
CREATE VIRTUAL TABLE old USING fts4(body);
INSERT INTO old VALUES ('an older text');
CREATE VIRTUAL TABLE found USING fts5(word, content='secrets');
INSERT INTO found(found) VALUES ('rebuild');
CREATE VIRTUAL TABLE terms USING fts5vocab('found', 'row');
CREATE TABLE bytes(b BLOB);
INSERT INTO bytes VALUES (x'00ff');
ANALYZE;
"""
WORDS = ("hunter2", "HUNTER2", "swordfish", "xyzzy")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sql") / "made.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(f"BEGIN; {MADE} COMMIT")
    connection.close()
    return path


@pytest.fixture
def path(tmp_path: Path, made: Path) -> Path:
    return Path(shutil.copy(made, tmp_path / "a ?#%20.db"))


@pytest.fixture
def database(path: Path) -> SqlDatabase:
    return SqlDatabase(path, hidden_tables=["Secrets"], hidden_columns=["users.Password"])


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT name, total FROM totals ORDER BY total DESC", [("Ana", 13.0), ("Ben", 7.0)]),
        ("-- a comment\nWITH t AS (SELECT 1 AS a) SELECT count(*) FROM t;", [(1,)]),
        ("VALUES (1, 'a;b'), (2, '--')", [(1, "a;b"), (2, "--")]),
        ("SELECT count(*) FROM users /* how many? */ ; -- so", [(2,)]),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 4) SELECT sum(i) FROM n", [(10,)]),
        ("SELECT body, rank < 0 FROM texts WHERE texts MATCH 'dam'", [("the dam of Orsk", 1)]),
        ("SELECT snippet(texts, 0, '<', '>', '', 3) FROM texts WHERE texts MATCH 'orsk'", [("dam of <Orsk>",)]),
        ("SELECT body FROM old WHERE old MATCH 'older'", [("an older text",)]),
        ("SELECT value FROM json_each('[1, 2]')", [(1,), (2,)]),
        ("SELECT count(*) FROM json_each('[1, 2]')", [(2,)]),
        ("SELECT b FROM bytes", [("<blob of 2 bytes>",)]),
        ("SELECT row_number() OVER (ORDER BY total) FROM orders", [(1,), (2,), (3,)]),
        ("SELECT round(sqrt(2), 3), upper('a'), date('2026-01-31', '+1 month')", [(1.414, "A", "2026-03-03")]),
    ],
)
async def test_a_question_is_answered(database: SqlDatabase, sql: str, rows: list[tuple[object, ...]]) -> None:
    assert list((await database.query(sql)).rows) == rows


async def test_parameters_are_values(database: SqlDatabase) -> None:
    assert (await database.query("SELECT name FROM users WHERE id = ?", [2])).rows == (("Ben",),)


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO orders VALUES (9, 9, 9)",
        "UPDATE orders SET total = 0",
        "DELETE FROM orders",
        "REPLACE INTO orders VALUES (1, 1, 1)",
        "DROP TABLE orders",
        "CREATE TABLE a(b)",
        "CREATE TEMP TABLE a(b)",
        "CREATE TEMP VIEW a AS SELECT 1",
        "CREATE VIRTUAL TABLE temp.a USING fts5(b)",
        "ALTER TABLE orders ADD COLUMN a",
        "WITH a AS (SELECT 1) INSERT INTO orders SELECT 1, 1, 1",
        "WITH a AS (SELECT 1) DELETE FROM orders RETURNING *",
        "ATTACH 'other.db' AS other",
        "ATTACH ':memory:' AS other",
        "DETACH main",
        "PRAGMA query_only = OFF",
        "PRAGMA writable_schema = ON",
        "PRAGMA table_list",
        "PRAGMA data_version",
        "VACUUM INTO 'copy.db'",
        "VACUUM",
        "REINDEX",
        "ANALYZE",
        "BEGIN",
        "BEGIN EXCLUSIVE",
        "SAVEPOINT a",
        "EXPLAIN SELECT * FROM secrets",
        "EXPLAIN QUERY PLAN SELECT 1",
        "SELECT 1; DROP TABLE orders",
        "SELECT 1; SELECT 2",
        "SELECT 1 /* ; */ ; -- \n DELETE FROM orders",
        "",
        " ; ",
        "-- nothing",
        "SELECT load_extension('/tmp/x.so')",
        "SELECT readfile('/etc/passwd')",
        "SELECT writefile('/tmp/x', 'y')",
        "SELECT edit('a')",
        "SELECT fts3_tokenizer('simple')",
        "SELECT fts3_tokenizer('simple', x'00')",
        "SELECT randomblob(10)",
        "SELECT zeroblob(1000000000)",
        "SELECT sqlite_compileoption_get(1)",
        "SELECT last_insert_rowid()",
        "SELECT sqlite_log(1, 'x')",
        "SELECT optimize(old) FROM old",
        "SELECT * FROM secrets",
        "SELECT * FROM main.secrets",
        'SELECT * FROM "SECRETS"',
        "SELECT * FROM [secrets]",
        "SELECT 1 FROM secrets",
        "SELECT count(*) FROM secrets",
        "SELECT count(*) FROM Secrets AS orders",
        "SELECT rowid FROM secrets",
        "SELECT 'xyzzy' IN secrets",
        "SELECT EXISTS (SELECT 1 FROM secrets WHERE word LIKE 'x%')",
        "SELECT (SELECT word FROM secrets)",
        "WITH orders AS (SELECT * FROM secrets) SELECT * FROM orders",
        "WITH leak AS (SELECT * FROM secrets) SELECT * FROM leak",
        "SELECT 1 UNION SELECT word FROM secrets",
        "SELECT * FROM leak",
        "SELECT * FROM found",
        "SELECT * FROM found WHERE found MATCH 'xyzzy'",
        "SELECT * FROM found_data",
        "SELECT term FROM terms",
        "SELECT * FROM found_idx",
        "SELECT * FROM guess",
        "SELECT * FROM sqlite_master",
        "SELECT * FROM sqlite_schema",
        "SELECT name FROM main.sqlite_master",
        "SELECT count(*) FROM sqlite_master",
        "SELECT * FROM sqlite_temp_master",
        "SELECT * FROM sqlite_stat1",
        "SELECT * FROM sqlite_stmt",
        "SELECT * FROM dbstat",
        "SELECT count(*) FROM dbstat",
        "SELECT * FROM pragma_table_list",
        "SELECT * FROM pragma_table_info('secrets')",
        "SELECT count(*) FROM pragma_table_info('secrets')",
        "SELECT * FROM pragma_database_list",
        "SELECT * FROM pragma_query_only(0)",
        "SELECT * FROM users NATURAL JOIN (SELECT 'hunter2' AS password)",
        "SELECT * FROM users JOIN (SELECT 'hunter2' AS password) USING (password)",
        "SELECT * FROM users join(SELECT 'hunter2' AS password)using(password)",
        "SELECT * FROM users NATURAL/**/LEFT JOIN (SELECT 'hunter2' AS password)",
        "SELECT 1\0",
        "SELECT '" + "a" * 20_000 + "'",
    ],
)
async def test_what_is_not_allowed_is_refused_and_changes_nothing(database: SqlDatabase, path: Path, sql: str) -> None:
    before = hashlib.sha256(path.read_bytes()).digest()
    with pytest.raises(QueryError) as caught:
        await database.query(sql)
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert isinstance(caught.value, Forbidden) or "no such function" in str(caught.value)
    assert not any(word in str(caught.value) for word in WORDS if word not in sql)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM users",
        "SELECT password FROM users",
        'SELECT "password", [PASSWORD], `password` FROM main.users AS u',
        "SELECT u.password FROM users AS u",
        "SELECT shout FROM users",
        "SELECT password || '' FROM users",
        "SELECT hex(password) FROM users",
        "SELECT group_concat(password) FROM users",
        "SELECT json_group_array(password) FROM users",
        "SELECT max(password), min(password) FROM users",
        "SELECT * FROM words",
        "WITH words AS (SELECT * FROM users) SELECT password FROM words",
        "SELECT p FROM (SELECT password AS p FROM users)",
        "SELECT (SELECT password FROM users WHERE id = 1)",
        "SELECT last_value(password) OVER () FROM users",
    ],
)
async def test_a_hidden_column_reads_as_null(database: SqlDatabase, sql: str) -> None:
    rows = (await database.query(sql)).rows
    said = " ".join(str(value) for row in rows for value in row)
    assert rows and not any(word in said for word in (*WORDS, "68756E746572"))


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM users WHERE password = '{}'",
        "SELECT id FROM users WHERE password LIKE '{}%'",
        "SELECT id FROM users WHERE password IN ('{}')",
        "SELECT id FROM users WHERE password >= '{}'",
        "SELECT id FROM users WHERE shout = '{}!'",
        "SELECT id FROM users ORDER BY password = '{}', id",
        "SELECT id, count(*) FROM users GROUP BY password = '{}', id",
        "SELECT users.id FROM users JOIN (SELECT '{}' AS p) ON p = password",
        "SELECT count(*) FILTER (WHERE password = '{}') FROM users",
        "SELECT '{}' IN (SELECT password FROM users)",
        "SELECT 'a' FROM users WHERE (id, password) = (1, '{}')",
        "SELECT password IS '{}' FROM users",
        "SELECT name FROM words WHERE password = '{}'",
        "SELECT password FROM users INTERSECT SELECT '{}'",
    ],
)
async def test_a_hidden_column_cannot_be_guessed(database: SqlDatabase, sql: str) -> None:
    right, wrong = (await database.query(sql.format("hunter2")), await database.query(sql.format("wrong")))
    assert right.rows == wrong.rows


async def test_a_hidden_key_is_hidden_under_its_other_names_too(path: Path) -> None:
    database = SqlDatabase(path, hidden_columns=["users.id"])
    names = "id, rowid, oid, _rowid_, u.rowid"
    assert (await database.query(f"SELECT {names} FROM users AS u LIMIT 1")).rows == ((None,) * 5,)
    right, wrong = [await database.query(f"SELECT name FROM users WHERE rowid = {n}") for n in (1, 9)]
    assert right.rows == wrong.rows


async def test_a_hidden_table_sounds_like_one_that_is_not_there(database: SqlDatabase) -> None:
    with pytest.raises(Forbidden) as hidden:
        await database.query("SELECT * FROM secrets")
    with pytest.raises(Forbidden) as absent:
        await database.query("SELECT * FROM sekrets")
    assert str(hidden.value).replace("secrets", "sekrets") == str(absent.value)
    assert "there are: bytes, old, orders, texts, totals, users, words" in str(absent.value)


async def test_the_schema_shows_what_can_be_read_alone(database: SqlDatabase) -> None:
    said = described(await database.schema())
    assert "users(id INTEGER key, name TEXT)" in said.splitlines()
    assert "view totals(name TEXT, total)" in said
    assert not any(
        word in said for word in ("secrets", "shout", "leak", "found", "terms", "guess", "sqlite_", "texts_")
    )


async def test_without_anything_hidden_all_is_read(path: Path) -> None:
    database = SqlDatabase(path)
    assert (await database.query("SELECT * FROM users NATURAL JOIN (SELECT 'hunter2' AS password)")).rows
    assert (await database.query("SELECT shout FROM users WHERE id = 1")).rows == (("hunter2!",),)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


@pytest.mark.parametrize(
    "sql",
    [
        ENDLESS + "SELECT count(*) FROM n",
        ENDLESS + "SELECT i FROM n WHERE i < 0",
        ENDLESS + "SELECT max(a.i + b.i) FROM n AS a, n AS b",
        ENDLESS + "SELECT i FROM n ORDER BY i",
        "SELECT count(*) FROM " + ", ".join(f"orders AS o{n}" for n in range(40)),
    ],
)
async def test_a_query_without_an_end_is_stopped(path: Path, sql: str) -> None:
    with pytest.raises(Stopped, match="limit of 0.2 s"):
        await SqlDatabase(path, limits=QueryLimits(seconds=0.2)).query(sql)


async def test_a_query_that_fills_the_disk_is_stopped(path: Path) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("the size of temporary files is only known on Linux")
    limits = QueryLimits(seconds=60, temporary_bytes=20_000_000)
    with pytest.raises(Stopped, match="more than 20,000,000 bytes"):
        await SqlDatabase(path, limits=limits).query(ENDLESS + "SELECT printf('%0900d', 1) || i AS x FROM n ORDER BY x")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT replace(printf('%0900d', 0), '0', printf('%0900d', 0))",
        ENDLESS + "SELECT group_concat(x) FROM (SELECT printf('%01000d', 1) AS x FROM n LIMIT 1000)",
        ENDLESS + "SELECT json_group_array(x) FROM (SELECT printf('%01000d', 1) AS x FROM n LIMIT 1000)",
        "WITH RECURSIVE n(i) AS (SELECT 'x' UNION ALL SELECT i || i FROM n) SELECT max(length(i)) FROM n",
        "SELECT 'a' LIKE printf('%0900d', 0)",
    ],
)
async def test_a_value_that_grows_too_large_is_stopped(path: Path, sql: str) -> None:
    with pytest.raises(QueryError, match="250,000 bytes, which is the limit|pattern too complex"):
        await SqlDatabase(path).query(sql)


@pytest.mark.parametrize("template", ["%1000000000d", "%.1000000000f", "%.*c", "%*d", "%n", "%"])
async def test_a_format_that_is_too_wide_or_unknown_is_refused(path: Path, template: str) -> None:
    with pytest.raises(Mistaken, match="widths up to 1000"):
        await SqlDatabase(path).query("SELECT printf(?, 1000000000, 'x')", [template])


FORMATS = "%d;%5d|%-5d|%05d;%.2f;%8.3f%%;%e;%g;%s and %s;%10s|%-10s|;%x %X %o;%,d;%i %u".split(";")  # noqa: SIM905


@pytest.mark.parametrize("template", FORMATS)
@pytest.mark.parametrize("values", [(42, 7, 3), (1234567, 1.5, 2), ("12", "a", "b"), (None, None, None), (-3.7, 10, 0)])
async def test_formats_write_what_sqlite_writes(
    path: Path, template: str, values: tuple[str | float | None, ...]
) -> None:
    if any(kind in template for kind in "xXou"):
        values = tuple(abs(value) if isinstance(value, float) else value for value in values)  # unsigned to SQLite
    (expected,) = sqlite3.connect(":memory:").execute("SELECT printf(?, ?, ?, ?)", (template, *values)).fetchone()
    assert (await SqlDatabase(path).query("SELECT printf(?, ?, ?, ?)", [template, *values])).rows == ((expected,),)


@pytest.mark.parametrize("sql", ["SELECT " + "(" * 500 + "1" + ")" * 500, "SELECT 1" + " UNION SELECT 1" * 100])
async def test_a_statement_that_is_too_deep_is_refused(path: Path, sql: str) -> None:
    with pytest.raises(QueryError):
        await SqlDatabase(path).query(sql)


async def test_many_rows_and_many_bytes_are_cut(path: Path) -> None:
    database = SqlDatabase(path, limits=QueryLimits(rows=10))
    rows = await database.query(ENDLESS + "SELECT i FROM n")
    assert len(rows.rows) == 10 and rows.truncated
    large = await SqlDatabase(path, limits=QueryLimits(bytes=10_000)).query(
        ENDLESS + "SELECT printf('%0900d', 1) FROM n"
    )
    assert len(large.rows) == 11 and large.truncated
    exact = await database.query(ENDLESS + "SELECT i FROM n LIMIT 10")
    assert len(exact.rows) == 10 and not exact.truncated


async def test_a_query_whose_asker_is_gone_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    within = SqlDatabase._within

    def observed(*arguments: object) -> object:
        loop.call_soon_threadsafe(begun.set)
        try:
            return within(*arguments)  # type: ignore[arg-type]  # passed on as they came
        finally:
            loop.call_soon_threadsafe(ended.set)

    monkeypatch.setattr(SqlDatabase, "_within", observed)
    database = SqlDatabase(path, limits=QueryLimits(seconds=1000))
    task = asyncio.create_task(database.query(ENDLESS + "SELECT count(*) FROM n"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 30)


def test_the_file_itself_is_opened_for_reading_alone(database: SqlDatabase) -> None:
    connection = database._open()
    connection.execute("PRAGMA query_only = OFF")
    with pytest.raises(sqlite3.OperationalError, match="readonly database"):
        connection.execute("DELETE FROM orders")
    connection.close()


async def test_a_mistake_is_told_in_the_words_of_sqlite(database: SqlDatabase) -> None:
    with pytest.raises(Mistaken, match="no such column: nmae"):
        await database.query("SELECT nmae FROM users")
    with pytest.raises(Mistaken, match="incomplete input"):
        await database.query("SELECT name FROM users WHERE")


async def test_a_database_in_wal_mode_is_read_while_it_is_written(path: Path) -> None:
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("INSERT INTO orders VALUES (4, 1, 1)")
    writer.commit()
    assert (await SqlDatabase(path).query("SELECT count(*) FROM orders")).rows == ((4,),)
    writer.close()


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        ({"hidden_tables": ["secret"]}, "nothing to hide by these names: secret"),
        ({"hidden_columns": ["users.pass"]}, "nothing to hide by these names: users.pass"),
        ({"hidden_columns": ["password"]}, "nothing to hide"),
        ({"hidden_columns": ["texts.body"]}, "hide the whole of it"),
    ],
)
def test_what_cannot_be_hidden_is_said_at_once(path: Path, hidden: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SqlDatabase(path, **hidden)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        SqlDatabase(tmp_path / "none.db")
    (tmp_path / "text.db").write_text("not a database at all, but a text of some length")
    with pytest.raises(ValueError, match="cannot be read as SQLite"):
        SqlDatabase(tmp_path / "text.db")
