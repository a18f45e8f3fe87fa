"""Databases of earlier versions: what was said in them stays, as one branch, and is found; and their shape."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, MetaData, text, update

from app.config import LOCAL_USER
from app.db.chat_store import Tree
from app.db.connection import connect, transaction
from app.db.migrations import Chain, NewerDatabase, _scripts, migrate, newest_revision, open_database
from app.db.run_store import Place
from app.db.store import Store
from app.db.tables import CHATS, USERS, chats, messages
from tests.app.db import before_alembic

BEFORE_BRANCHES = 3
STEPS: dict[Chain, before_alembic.Steps] = {"chats": before_alembic.CHATS, "users": before_alembic.USERS}
TABLES: dict[Chain, MetaData] = {"chats": CHATS, "users": USERS}
ROOT = Path(__file__).resolve().parents[3]
NEWEST = newest_revision("chats")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A data directory from before messages were a tree, with a chat of four messages and an empty one."""
    said = [
        ("m1", 1, "user", "granite?"),
        ("m2", 2, "assistant", "yes"),
        ("m4", 5, "user", "u"),
        ("m3", 7, "assistant", "a"),
    ]
    held = (
        "INSERT INTO chats VALUES ('chat_1', 'Dams', 1.0, 2.0), ('chat_2', '', 3.0, 3.0)",
        "INSERT INTO runs VALUES ('run_1', 'chat_1', 'm2', 'completed', '{}', 1.0, 1.5)",
        *(
            "INSERT INTO messages (id, chat_id, position, role, content, status, created_at) "
            f"VALUES ('{id}', 'chat_1', {position}, '{role}', '{content}', 'completed', 1.0)"
            for id, position, role, content in said
        ),
        "INSERT INTO events VALUES ('run_1', 1, 'run.queued', '{}')",
    )
    before_alembic.make(tmp_path / "ponder.db", before_alembic.CHATS[:BEFORE_BRANCHES], held)
    return tmp_path


async def test_old_messages_become_one_branch_of_the_local_user(old: Path) -> None:
    store = await Store.open(old)
    chat, messages = await store.chats.whole(LOCAL_USER, "chat_1")
    assert [(each["id"], each["parent_id"]) for each in messages] == [
        ("m1", None), ("m2", "m1"), ("m4", "m2"), ("m3", "m4")
    ]  # fmt: skip
    assert Tree(messages).branch(chat["leaf_id"]) == messages and all(each["steps"] == [] for each in messages)
    assert (chat["title"], chat["pinned"], chat["folder_id"]) == ("Dams", False, None)
    assert [each["id"] for each in (await store.chats.of(LOCAL_USER, limit=9))[0]] == ["chat_2", "chat_1"]
    assert (await store.chats.of("another", limit=9))[0] == []
    assert [event.type for event in await store.runs.events("run_1")] == ["run.queued"]
    await store.close()


async def test_old_chats_are_found_and_go_on(old: Path) -> None:
    store = await Store.open(old)
    assert [each.message_id for each in await store.search.find(LOCAL_USER, "granite", 9)] == ["m1"]
    assert [each.message_id for each in await store.search.find(LOCAL_USER, "dams", 9)] == [None]
    for chat_id in ("chat_1", "chat_2"):
        begun = await store.runs.begin(LOCAL_USER, chat_id, f"of_{chat_id}", Place("more", at_leaf=True), {})
        assert begun.branch[-1]["content"] == "more" and not begun.imported
    assert [each["id"] for each in begun.branch][:-1] == []
    await store.deleted.delete("chat", LOCAL_USER, "chat_1")
    assert await store.search.find(LOCAL_USER, "granite", 9) == []
    await store.close()


async def test_answers_from_documents_are_marked_by_their_events_or_as_unknown(tmp_path: Path) -> None:
    """An imported answer has no events, and the file that it came in did not say from what it was made."""
    db = connect(tmp_path / "ponder.db", 5)
    migrate(db, "chats", 7)
    answers = [
        ("plain", 0, "run_1", "run.started"),
        ("quoting", 0, "run_2", "citation.sources"),
        ("taken", 1, None, ""),
    ]
    with transaction(db):
        for id, foreign, run, kind in answers:
            db.execute(chats.insert().values(id=id, title="", created_at=1, updated_at=1, imported=foreign))
            columns = "(id, chat_id, position, role, content, status, created_at, run_id)"
            values = [("q", 1, "user", None), ("a", 2, "assistant", run)]
            for name, position, role, made_by in values:
                row = (f"{id}-{name}", id, position, role, "x", "completed", 1.0, made_by)
                db.exec_driver_sql(f"INSERT INTO messages {columns} VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            if run is not None:
                db.exec_driver_sql(f"INSERT INTO runs VALUES ('{run}', '{id}', '{id}-a', 'completed', '{{}}', 1, 1)")
                db.exec_driver_sql(f"INSERT INTO events VALUES ('{run}', 1, '{kind}', '{{}}')")
    db.close()
    store = await Store.open(tmp_path)
    for id, *_ in answers:
        _, said = await store.chats.whole(LOCAL_USER, id)
        assert [bool(each["grounded"]) for each in said] == [False, id != "plain"]
    await store.close()


async def test_old_answers_are_of_the_model_that_their_events_name(tmp_path: Path) -> None:
    db = connect(tmp_path / "ponder.db", 5)
    migrate(db, "chats", 9)
    told = {
        "plain": [("run.started", '{"model": "pebble"}')],
        "routed": [("run.started", '{"model": "auto"}'), ("route.answering", '{"model": "big"}')],
        "undecided": [("run.started", '{"model": "auto"}')],
        "quoted": [("citation.sources", "{}")],
    }
    with transaction(db):
        for id, log in told.items():
            chat = "INSERT INTO chats (id, title, created_at, updated_at) VALUES (?, '', 1, 1)"
            db.exec_driver_sql(chat, (id,))
            columns = "(id, chat_id, position, role, content, status, created_at, run_id)"
            answer = (f"a-{id}", id, 1, "assistant", "x", "completed", 1.0, f"run-{id}")
            db.exec_driver_sql(f"INSERT INTO messages {columns} VALUES (?, ?, ?, ?, ?, ?, ?, ?)", answer)
            db.exec_driver_sql(f"INSERT INTO runs VALUES ('run-{id}', '{id}', 'a-{id}', 'completed', '{{}}', 1, 1)")
            for seq, (kind, data) in enumerate(log, 1):
                db.exec_driver_sql("INSERT INTO events VALUES (?, ?, ?, ?)", (f"run-{id}", seq, kind, data))
    db.close()
    store = await Store.open(tmp_path)
    found = {id: (await store.chats.whole(LOCAL_USER, id)) for id in told}
    assert {id: said[0]["model"] for id, (_, said) in found.items()} == {
        "plain": "pebble", "routed": "big", "undecided": None, "quoted": None,
    }  # fmt: skip
    assert all(chat["settings"] is None for chat, _ in found.values())
    await store.close()


def shape(path: Path) -> dict[str, object]:
    """Returns tables by their columns and references, and the statements of everything else."""
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        found: dict[str, object] = {}
        for kind, name, sql in db.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE tbl_name <> 'alembic_version'"
        ):
            if kind != "table" or "VIRTUAL" in sql:
                found[name] = " ".join((sql or "").split())
                continue
            columns = {
                (column, type_, bool(needed or key), default, key)
                for _, column, type_, needed, default, key, _ in db.execute(f"PRAGMA table_xinfo({name})")
            }
            references = {each[2:7] for each in db.execute(f"PRAGMA foreign_key_list({name})")}
            found[name] = (columns, references, "WITHOUT ROWID" in sql)
        return found


@pytest.mark.parametrize(
    ("chain", "version"), [(chain, version) for chain in STEPS for version in range(1, len(STEPS[chain]) + 1)]
)
def test_an_old_database_ends_with_the_shape_of_a_new_one(chain: Chain, version: int, tmp_path: Path) -> None:
    aged, new = tmp_path / "aged.db", tmp_path / "new.db"
    before_alembic.make(aged, STEPS[chain][:version])
    for path in (aged, new):
        for _ in range(2):
            db = open_database(path, chain, 5)
            assert taken(db) == (newest_revision(chain), f"{newest_revision(chain):04}")
            db.close()
    assert shape(aged) == shape(new)


def taken(db: Connection) -> tuple[int, str]:
    with transaction(db):
        stamped = db.scalars(text("SELECT version_num FROM alembic_version")).one()
        return db.exec_driver_sql("PRAGMA user_version").scalar_one(), stamped


@pytest.mark.parametrize("chain", STEPS)
def test_the_tables_are_those_that_the_migrations_make(chain: Chain, tmp_path: Path) -> None:
    open_database(tmp_path / "migrated.db", chain, 5).close()
    declared = connect(tmp_path / "declared.db", 5)
    with transaction(declared):
        TABLES[chain].create_all(declared)
    declared.close()
    migrated = shape(tmp_path / "migrated.db").items()
    assert {name: made for name, made in migrated if not re.match("text_index|(chat|message)_", name)} == shape(
        tmp_path / "declared.db"
    )


def test_a_migration_goes_on_where_it_was_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ponder.db"

    def cut_short() -> None:
        from alembic import op

        op.execute("CREATE TABLE texts (id INTEGER PRIMARY KEY)")
        raise OSError("the power is gone")

    with monkeypatch.context() as patched:
        patched.setattr(_scripts("chats").get_revision("0005").module, "upgrade", cut_short)
        with pytest.raises(OSError, match="power"):
            open_database(path, "chats", 5)
    db = connect(path, 5)
    assert taken(db) == (4, "0004")
    migrate(db, "chats")
    assert taken(db) == (NEWEST, f"{NEWEST:04}")
    db.close()
    open_database(tmp_path / "new.db", "chats", 5).close()
    assert shape(path) == shape(tmp_path / "new.db")


@pytest.mark.parametrize(
    "newer", [f"PRAGMA user_version = {NEWEST + 1}", f"UPDATE alembic_version SET version_num = '{NEWEST + 1:04}'"]
)
def test_a_newer_database_is_refused(newer: str, tmp_path: Path) -> None:
    db = open_database(tmp_path / "ponder.db", "chats", 5)
    with transaction(db):
        db.exec_driver_sql(newer)
    db.close()
    with pytest.raises(NewerDatabase, match=f"has format {NEWEST + 1} and this Ponder knows formats up to {NEWEST}"):
        open_database(tmp_path / "ponder.db", "chats", 5)


@pytest.mark.slow
def test_processes_that_open_a_new_file_together_each_find_it_migrated(tmp_path: Path) -> None:
    """They also import nothing of Alembic's where the file is migrated already."""
    opens = (
        "import sys; from app.db.account_store import Accounts; from pathlib import Path; "
        "print([user.id for user in Accounts.open(Path(sys.argv[1])).users()], 'alembic' in sys.modules)"
    )
    command = [sys.executable, "-c", opens, str(tmp_path)]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {each.communicate(timeout=60)[0].partition(" ")[0] for each in started} == {"['local']"}
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == "['local'] False\n"


async def test_a_chat_of_many_messages_is_deleted_whole(tmp_path: Path) -> None:
    """SQLite nests a thousand triggers at most, and a long conversation has more links than that."""
    store = await Store.open(tmp_path)
    chat = (await store.chats.create(LOCAL_USER))["id"]

    def fill(db: Connection) -> None:
        made = [
            {"id": f"m{n}", "position": n, "parent_id": f"m{n - 1}" if n else None, "role": role}
            for n, role in enumerate(("user", "assistant") * 1500)
        ]
        same = {"chat_id": chat, "content": "x", "status": "completed", "created_at": 1.0}
        db.execute(messages.insert(), [{**each, **same} for each in made])
        db.execute(update(chats).where(chats.c.id == chat).values(leaf_id="m2999"))

    store.database.write(fill)
    _, said = await store.chats.whole(LOCAL_USER, chat)
    assert len(Tree(said).branch("m2999")) == 3000 and Tree(said).newest_leaf("m0") == "m2999"
    await store.deleted.delete("chat", LOCAL_USER, chat)
    assert await store.deleted.purge(0) is None
    for table in ("chats", "messages", "texts", "text_index"):
        assert await store.database.rows(text(f"SELECT count(*) AS n FROM {table}")) == [{"n": 0}]
    await store.close()
