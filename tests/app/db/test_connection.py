"""Transactions of a database's connection: kept whole or not at all, with errors that tell nobody's words."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from app.config import LOCAL_USER
from app.db.connection import insert, rows
from app.db.store import Store
from app.db.tables import folders

ROOT = Path(__file__).resolve().parents[3]


def folder(db: Connection, name: str) -> None:
    insert(db, folders, {"id": f"id of {name}", "user": LOCAL_USER, "name": name, "created_at": 1.0})


async def test_a_write_that_fails_leaves_nothing_and_the_next_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await Store.open(tmp_path)

    def fail(db: Connection) -> None:
        folder(db, "first")
        folder(db, "secret")
        folder(db, "secret")

    with caplog.at_level(logging.ERROR):
        store.database.write(fail)
        store.database.write(lambda db: folder(db, "second"))
        assert [each["name"] for each in await store.folders.of(LOCAL_USER)] == ["second"]
    assert caplog.messages == ["a write to the database failed: UNIQUE constraint failed: folders.user, folders.name"]
    await store.close()


async def test_a_commit_that_fails_leaves_nothing_and_the_next_stands(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)

    def fail(db: Connection) -> None:
        db.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
        folder(db, "first")
        db.execute(text("INSERT INTO traces (run_id, data) VALUES ('no run', '')"))

    with pytest.raises(sqlite3.IntegrityError, match="^FOREIGN KEY constraint failed$"):
        await store.database.read(fail)
    store.database.write(lambda db: folder(db, "second"))
    assert [each["name"] for each in await store.folders.of(LOCAL_USER)] == ["second"]
    await store.close()


async def test_a_database_keeps_what_it_acknowledged_and_holds_references(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    settings = {
        name: (await store.database.rows(text(f"PRAGMA {name}")))[0].popitem()[1]
        for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
    }
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}
    await store.close()


async def test_a_read_is_of_one_moment(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)

    def read(db: Connection) -> tuple[int, int]:
        before = len(rows(db, folders.select()))
        with sqlite3.connect(tmp_path / "ponder.db") as other:
            other.execute("INSERT INTO folders (id, user, name, created_at) VALUES ('x', 'local', 'x', 1.0)")
        other.close()
        return before, len(rows(db, folders.select()))

    assert await store.database.read(read) == (0, 0)
    assert len(await store.folders.of(LOCAL_USER)) == 1
    await store.close()


def test_api_workers_import_no_sqlalchemy() -> None:
    told = "import sys, app.workers.api_worker; print([name for name in sys.modules if name == 'sqlalchemy'])"
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
