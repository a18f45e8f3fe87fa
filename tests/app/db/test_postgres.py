"""PostgreSQL in SQLite's place: its shape, its errors, its locks, and what it must not tell. The stores' own tests run
on both databases (`DATABASES` of tests/app/postgres.py)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, inspect, text
from typer.testing import CliRunner

from app.cli.main import cli
from app.config import LOCAL_USER, BadSetting, Settings, load_settings
from app.config.settings import changed_settings
from app.db.account_store import Accounts
from app.db.connection import insert, transaction
from app.db.migrations import Chain, has_table, newest_revision, open_database
from app.db.run_store import Place
from app.db.sqlite import PostgresError
from app.db.store import Store
from app.db.tables import CHATS, USERS, folders
from app.errors import from_exception
from tests.app import postgres

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed here (pip install 'ponder[postgres]')")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def address(postgres_address: str) -> Iterator[str]:
    with postgres.schema(postgres_address) as address:
        yield address


def folder(db: Connection, name: str) -> None:
    insert(db, folders, {"id": f"id of {name}", "user": LOCAL_USER, "name": name, "created_at": 1.0})


@pytest.mark.parametrize(("chain", "declared"), [("chats", CHATS), ("users", USERS)])
def test_a_new_database_has_the_declared_tables(chain: Chain, declared: Any, address: str) -> None:
    """Alembic compares them, as it does for a new revision."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    db = open_database(address, chain, 5)
    with transaction(db):
        context = MigrationContext.configure(db, opts={"compare_type": True})
        different = [each for each in compare_metadata(context, declared) if each[0] != "remove_table"]
        stamped = db.scalar(text(f"SELECT version_num FROM alembic_version_{chain}"))
    db.close()
    # Of rows' numbers and of search, which SQLite has in ways of its own.
    own = {("remove_column", "number"), ("remove_column", "words"), ("remove_constraint", "chats_number_key")}
    own |= {("remove_constraint", "runs_number_key")}
    own |= {("remove_index", name) for name in ("texts_words", "texts_chat", "texts_new")}
    assert {(each[0], each[-1].name) for each in different} == (own if chain == "chats" else set())
    assert stamped == f"{newest_revision(chain):04}"


def test_texts_are_ordered_by_their_characters_whatever_the_locale(address: str) -> None:
    for chain in ("chats", "users"):
        db = open_database(address, chain, 5)
        with transaction(db):
            found = inspect(db)
            texts = [
                (table, column["name"], getattr(column["type"], "collation", None))
                for table in found.get_table_names()
                for column in found.get_columns(table)
                if str(column["type"]).startswith("TEXT")
            ]
        db.close()
    assert len(texts) > 80 and {collation for _, _, collation in texts} == {"C"}, texts


async def test_a_write_that_fails_leaves_nothing_and_tells_no_words(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = await Store.open(tmp_path, address)

    def fail(db: Connection) -> None:
        folder(db, "first")
        folder(db, "secret")
        folder(db, "secret")

    with caplog.at_level(logging.ERROR):
        store.database.write(fail)
        store.database.write(lambda db: folder(db, "second"))
        assert [each["name"] for each in await store.folders.of(LOCAL_USER)] == ["second"]
    assert len(caplog.messages) == 1 and "duplicate key value" in caplog.text and "secret" not in caplog.text
    await store.close()


async def test_a_text_with_nul_comes_back_the_same(tmp_path: Path, address: str) -> None:
    store = await Store.open(tmp_path, address)
    chat = (await store.chats.create(LOCAL_USER))["id"]
    said = "a\0b \ufdd0 \ufdd0\ufdd1 \0\ufdd0\ufdd0\0\ufdd1 c"
    await store.runs.begin(LOCAL_USER, chat, "run_1", Place(said, at_leaf=True), {})
    assert (await store.chats.whole(LOCAL_USER, chat))[1][0]["content"] == said
    await store.close()


async def test_a_read_is_of_one_moment(tmp_path: Path, address: str) -> None:
    store = await Store.open(tmp_path, address)

    def read(db: Connection) -> tuple[int, int]:
        before = len(db.execute(folders.select()).all())
        with psycopg.connect(address) as other:
            other.execute("""INSERT INTO folders (id, "user", name, created_at) VALUES ('x', 'local', 'x', 1.0)""")
        return before, len(db.execute(folders.select()).all())

    assert await store.database.read(read) == (0, 0)
    assert len(await store.folders.of(LOCAL_USER)) == 1
    await store.close()


async def test_one_server_has_a_database(tmp_path: Path, address: str) -> None:
    first = await Store.open(tmp_path / "first", address)
    with pytest.raises(BadSetting, match=r"another Ponder is using it; stop that one, or give another --database"):
        await Store.open(tmp_path / "second", address)
    await first.close()
    second = await Store.open(tmp_path / "second", address)
    await second.close()


async def test_a_connection_that_was_lost_is_made_anew_with_its_lock(tmp_path: Path, address: str) -> None:
    store = await Store.open(tmp_path / "first", address)
    await store.folders.create(LOCAL_USER, "kept")
    (mine,) = await store.database.rows(text("SELECT pg_backend_pid() AS id"))
    with psycopg.connect(address, autocommit=True) as operator:
        operator.execute("SELECT pg_terminate_backend(%s)", (mine["id"],))
        with pytest.raises(PostgresError) as lost:
            await store.folders.of(LOCAL_USER)
    error = from_exception(lost.value)
    assert (error.status, error.code, error.headers) == (503, "database_unreachable", {"Retry-After": "5"})
    assert [each["name"] for each in await store.folders.of(LOCAL_USER)] == ["kept"]
    with pytest.raises(BadSetting, match="another Ponder"):
        await Store.open(tmp_path / "second", address)
    await store.close()


def test_a_full_disk_is_told_as_one() -> None:
    error = from_exception(PostgresError("could not extend file", "53100"))
    assert (error.status, error.code) == (507, "disk_unusable")


async def test_writers_that_read_first_take_turns(tmp_path: Path, address: str) -> None:
    """A key's use is counted by what was there before: two processes that both read it first would lose one's."""
    first, second = (Accounts.open(tmp_path, address) for _ in range(2))
    with first._writing():
        first._db.execute(text("UPDATE users SET quota = '{\"priority\": 1}' WHERE id = 'local'"))
        changing = threading.Thread(target=lambda: second.ensure_user("local", "operator"))
        changing.start()
        changing.join(0.3)
        assert changing.is_alive()  # it waits before it reads
    changing.join(20)
    assert not changing.is_alive()
    key, _ = first.create_key(LOCAL_USER)

    def count(accounts: Accounts) -> None:
        for _ in range(40):
            accounts.add_use(key.id, 1, 5)

    await asyncio.gather(*(asyncio.to_thread(count, each) for each in (first, second)))
    assert (second.used(key.id).requests_today, second.used(key.id).tokens_today) == (80, 400)
    for each in (first, second):
        each.close()


async def test_a_writer_sees_what_was_committed_while_it_waited(tmp_path: Path, address: str) -> None:
    first, second = (Accounts.open(tmp_path, address) for _ in range(2))
    made = list[object]()

    def make() -> None:
        try:
            made.append(second.create_user("ana", "Ana", "user"))
        except Exception as error:
            made.append(error)

    with first._writing():
        first._add("ana", "Ana", "user")
        waiting = threading.Thread(target=make)
        waiting.start()
        waiting.join(0.3)
    waiting.join(20)
    assert [type(each).__name__ for each in made] == ["NameTaken"]
    for each in (first, second):
        each.close()


@pytest.mark.slow
def test_processes_that_open_a_new_database_together_each_find_it_made(tmp_path: Path, address: str) -> None:
    opens = (
        "import sys; from app.db.account_store import Accounts; from pathlib import Path; "
        "print([user.id for user in Accounts.open(Path(sys.argv[1]), sys.argv[2]).users()])"
    )
    command = [sys.executable, "-c", opens, str(tmp_path), address]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {each.communicate(timeout=60)[0] for each in started} == {"['local']\n"}


def test_a_transaction_that_makes_tables_fails_whole(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("app.db.migrations.postgres._SEARCH", ("CREATE TABLE half (id int)", "no SQL"))
        with pytest.raises(PostgresError, match="syntax error"):
            open_database(address, "chats", 5)
    db = open_database(address, "chats", 5)
    with transaction(db):
        assert has_table(db, "texts") and not has_table(db, "half")
    db.close()


async def test_chats_that_are_in_the_directory_alone_are_told(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    await (await Store.open(tmp_path)).close()
    store = await Store.open(tmp_path, address)
    assert "`ponder migrate` copies them" in caplog.text
    await store.chats.create(LOCAL_USER)
    await store.close()
    caplog.clear()
    await (await Store.open(tmp_path, address)).close()
    assert caplog.text == ""


async def test_a_database_that_is_not_there_is_told_without_the_password(tmp_path: Path, address: str) -> None:
    nobody = "postgresql://ponder:hunter2@127.0.0.1:9/ponder"
    with pytest.raises(
        BadSetting, match=r"The PostgreSQL database of --database cannot be used: .*127\.0\.0\.1"
    ) as told:
        await Store.open(tmp_path, nobody)
    with pytest.raises(BadSetting, match="The users in the PostgreSQL database cannot be read") as users_told:
        Accounts.open(tmp_path, nobody)
    assert "hunter2" not in f"{told.value}{users_told.value}"
    with pytest.raises(BadSetting, match='database "nowhere" does not exist'):
        await Store.open(tmp_path, address.replace("/postgres?", "/nowhere?"))
    assert not (tmp_path / "ponder.db").exists()
    await (await Store.open(tmp_path)).close()  # the directory's lock is free


async def test_a_database_of_another_encoding_is_refused(tmp_path: Path, postgres_address: str) -> None:
    with psycopg.connect(postgres_address, autocommit=True) as db:
        db.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(BadSetting, match="its encoding is LATIN1; accepted: UTF8"):
        await Store.open(tmp_path, postgres_address.replace("/postgres?", "/latin?"))


async def test_without_its_driver_postgresql_is_refused(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(BadSetting, match=r"pip install 'ponder\[postgres\]'"):
        await Store.open(tmp_path, address)


@pytest.mark.parametrize("given", ["mysql://u:hunter2@h/db", "ponder.db", "postgresql://u:hunter2@h", "postgresql://"])
def test_another_address_is_refused_without_being_shown(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PONDER_DATABASE", given)
    with pytest.raises(BadSetting, match=r"^PONDER_DATABASE .*accepted: the address of a PostgreSQL database") as told:
        load_settings()
    assert "hunter2" not in str(told.value) and (given not in str(told.value) or given == "postgresql://")


def test_the_password_is_in_no_settings_that_are_shown() -> None:
    given = Settings(database="postgresql://ponder:hunter2@db.example/ponder")
    assert given.database_address == "postgresql://ponder:hunter2@db.example/ponder"
    shown = f"{given!r} {changed_settings(given)} {given.model_dump_json()} {given.model_dump()}"
    assert "hunter2" not in shown and changed_settings(given)["database"] == "…"


# Letters with marks of their own and combined ones, digits, other scripts, signs inside words, and a break.
LETTERS = st.sampled_from([*"abeéuüeb--_ \n", *"A1Éи漢.'’/@", "e\u0301", "한", "ς", "Σ", "٣", "½"])
TEXTS = st.lists(LETTERS, max_size=14).map("".join)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), data=st.data())
async def test_a_search_finds_what_it_finds_in_sqlite(both: list[Store], texts: list[str], data: st.DataObject) -> None:
    user, words = secrets.token_hex(8), " ".join(texts).split()
    other = str.maketrans("éeüu-", "eéuü.")
    parts = [*words, *(word[::-1] for word in words), *(word.swapcase().translate(other) for word in words)]
    query = data.draw(st.sampled_from(parts or [""]) | TEXTS, "query")
    found = [await found_in(store, user, texts, query) for store in both]
    assert found[0] == found[1]


async def found_in(store: Store, user: str, texts: list[str], query: str) -> set[tuple[object, ...]]:
    """Returns the chats by their places, and the words marked in each."""
    made = list[str]()
    for at, said in enumerate(texts):
        made.append((await store.chats.create(user))["id"])
        await store.runs.begin(user, made[-1], f"{user}-{at}", Place(said, at_leaf=True), {})
        await store.chats.change(user, made[-1], {"title": ""})
    found = await store.search.find(user, query, 100)
    assert all(each.message_id is not None for each in found)
    return {(made.index(each.chat_id), *(each.snippet[a:b] for a, b in each.marks)) for each in found}


@pytest.fixture
async def both(tmp_path: Path, address: str) -> AsyncIterator[list[Store]]:
    stores = [await Store.open(tmp_path / "sqlite"), await Store.open(tmp_path / "postgres", address)]
    yield stores
    for store in stores:
        await store.close()


async def test_a_snippet_of_a_long_text_is_around_its_words(both: list[Store]) -> None:
    said = f"{'word ' * 100}the granite dam of Orsk {'and more ' * 100}"
    for store in both:
        chat = (await store.chats.create(LOCAL_USER))["id"]
        await store.runs.begin(LOCAL_USER, chat, "run", Place(said, at_leaf=True), {})
        (found,) = await store.search.find(LOCAL_USER, "orsk granite", 5)
        assert [found.snippet[a:b] for a, b in found.marks] == ["granite", "Orsk"]
        assert found.snippet.startswith("…") and found.snippet.endswith("…") and found.snippet.strip("…") in said
        assert len(found.snippet.split()) == 24
        assert await store.search.find(LOCAL_USER, "the-granite", 5) and not await store.search.find(
            LOCAL_USER, "granite-the", 5
        )


@pytest.mark.slow
async def test_a_text_of_megabytes_is_found_by_its_first_words(both: list[Store]) -> None:
    store = both[1]
    chat = (await store.chats.create(LOCAL_USER))["id"]
    said = f"granite {' '.join(f'{n:x}word' for n in range(200_000))} {'x' * 9_000}"
    await store.runs.begin(LOCAL_USER, chat, "run", Place(said, at_leaf=True), {})
    assert [each.chat_id for each in await store.search.find(LOCAL_USER, "granite", 5)] == [chat]
    assert [each.chat_id for each in await store.search.find(LOCAL_USER, "granite 9word", 5)] == [chat]


async def test_a_backup_says_what_it_does_not_have(tmp_path: Path, address: str) -> None:
    data = tmp_path / "data"
    await (await Store.open(data, address)).close()

    def backup(name: str, **environment: str) -> str:
        given = ["backup", "create", str(tmp_path / name), "--data-dir", str(data)]
        done = CliRunner().invoke(cli, given, env=environment)
        assert done.exit_code == 0, done.output
        return done.stderr

    assert "no chats, runs and users: those are in PostgreSQL" in backup("a.tar.gz", PONDER_DATABASE=address)
    assert backup("b.tar.gz") == ""
    (data / "documents" / "files").mkdir(parents=True)
    (data / "documents" / "files" / "0123").write_text("A lake.")
    assert "the files of documents are in it" in backup("c", PONDER_DATABASE=address)
    assert (tmp_path / "c" / "documents" / "files" / "0123").read_text() == "A lake."
