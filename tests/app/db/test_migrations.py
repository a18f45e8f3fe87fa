"""Databases of earlier versions: what was said in them stays, as one branch, and is found."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from app.config import LOCAL_USER
from app.db.chat_store import Tree
from app.db.migrations import STEPS, migrate
from app.db.run_store import Place
from app.db.store import Store

BEFORE_BRANCHES = 3


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A data directory from before messages were a tree, with a chat of four messages and an empty one."""
    db = sqlite3.connect(tmp_path / "ponder.db")
    for statements in STEPS[:BEFORE_BRANCHES]:
        for statement in statements:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {BEFORE_BRANCHES}")
    db.executemany("INSERT INTO chats VALUES (?, ?, ?, ?)", [("chat_1", "Dams", 1.0, 2.0), ("chat_2", "", 3.0, 3.0)])
    db.execute("INSERT INTO runs VALUES ('run_1', 'chat_1', 'm2', 'completed', '{}', 1.0, 1.5)")
    said = [
        ("m1", 1, "user", "granite?"),
        ("m2", 2, "assistant", "yes"),
        ("m4", 5, "user", "u"),
        ("m3", 7, "assistant", "a"),
    ]
    db.executemany(
        "INSERT INTO messages (id, chat_id, position, role, content, status, created_at) "
        "VALUES (?, 'chat_1', ?, ?, ?, 'completed', 1.0)", said,
    )  # fmt: skip
    db.execute("INSERT INTO events VALUES ('run_1', 1, 'run.queued', '{}')")
    db.commit()
    db.close()
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


def test_an_old_database_ends_with_the_shape_of_a_new_one(old: Path) -> None:
    def shape(db: sqlite3.Connection) -> set[tuple[str, ...]]:
        migrate(db)
        return set(db.execute("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master"))

    aged, new = sqlite3.connect(old / "ponder.db"), sqlite3.connect(":memory:")
    assert shape(aged) == shape(new)
    assert aged.execute("PRAGMA foreign_key_check").fetchall() == []
    assert aged.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    aged.close()
    new.close()


async def test_a_chat_of_many_messages_is_deleted_whole(tmp_path: Path) -> None:
    """SQLite nests a thousand triggers at most, and a long conversation has more links than that."""
    store = await Store.open(tmp_path)
    chat = (await store.chats.create(LOCAL_USER))["id"]

    def fill(db: sqlite3.Connection) -> None:
        rows = [
            (f"m{n}", chat, n, f"m{n - 1}" if n else None, "user" if n % 2 == 0 else "assistant") for n in range(3000)
        ]
        db.executemany(
            "INSERT INTO messages (id, chat_id, position, parent_id, role, content, status, created_at) "
            "VALUES (?, ?, ?, ?, ?, 'x', 'completed', 1.0)", rows,
        )  # fmt: skip
        db.execute("UPDATE chats SET leaf_id = 'm2999' WHERE id = ?", [chat])

    store.database.write(fill)
    _, messages = await store.chats.whole(LOCAL_USER, chat)
    assert len(Tree(messages).branch("m2999")) == 3000 and Tree(messages).newest_leaf("m0") == "m2999"
    await store.deleted.delete("chat", LOCAL_USER, chat)
    assert await store.deleted.purge(0) is None
    for table in ("chats", "messages", "texts", "text_index"):
        assert await store.database.rows(f"SELECT count(*) AS n FROM {table}") == [{"n": 0}]
    await store.close()
