"""Chats, messages, runs and their events in SQLite, off the event loop.

One thread owns the one connection, and calls reach it in the order they were made: so a read sees every write asked
for before it, and `write` need not be awaited. Tokens never wait for the disk. Knows nothing of HTTP or the engine.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from sqlite_utils import Database

from app.config import BadSetting
from app.migrations import NewerDatabase, migrate
from app.runs.events import Usage

log = logging.getLogger("ponder")
T = TypeVar("T")

Row = dict[str, Any]  # a row of SQLite: its columns are in app/migrations.py
RESTART_GAP = 1000  # more events than a crash can take from the disk: numbers a reader may have seen are not reused


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One line of a run's log; `data` is the event as JSON."""

    seq: int
    type: str
    data: str


@dataclass(frozen=True, slots=True)
class Answer:
    """How an assistant's message ends up."""

    status: str
    content: str
    thinking: str
    thinking_s: float | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    usage: Usage | None = None
    error: str | None = None


class Store:
    """The database of one data directory, which one process at a time may have open."""

    def __init__(self, db: Database, lock: IO[str], thread: ThreadPoolExecutor) -> None:
        self._db = db
        self._lock = lock
        self._thread = thread

    @classmethod
    async def open(cls, data_dir: Path) -> Store:
        """
        Raises:
            BadSetting: the directory cannot be used; the message says why.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        loop = asyncio.get_running_loop()
        try:
            lock = await loop.run_in_executor(thread, _lock, data_dir)
            db = await loop.run_in_executor(thread, _connect, data_dir / "ponder.db")
        except (OSError, sqlite3.Error, NewerDatabase) as error:
            thread.shutdown(wait=False)
            raise BadSetting(f"The data directory {data_dir} cannot be used: {error}.") from None
        return cls(db, lock, thread)

    async def close(self) -> None:
        """Finish every write, then let go of the directory. Idempotent."""
        if self._lock.closed:
            return
        await asyncio.wrap_future(self._thread.submit(self._db.conn.close))
        self._thread.shutdown()
        self._lock.close()

    # -- chats

    async def create_chat(self) -> Row:
        now = time.time()
        chat = {"id": _id("chat"), "title": "", "created_at": now, "updated_at": now}
        await self._read(lambda db: self._insert(db, "chats", chat))
        return chat

    async def chats(self) -> list[Row]:
        return await self._rows(
            "SELECT id, title, created_at, updated_at FROM chats ORDER BY updated_at DESC, rowid DESC"
        )

    async def chat(self, chat_id: str) -> Row | None:
        rows = await self._rows("SELECT id, title, created_at, updated_at FROM chats WHERE id = ?", chat_id)
        return rows[0] if rows else None

    async def delete_chat(self, chat_id: str) -> None:
        def delete(db: Database) -> None:
            with db.conn:
                db.conn.execute("DELETE FROM chats WHERE id = ?", [chat_id])

        await self._read(delete)

    async def messages(self, chat_id: str) -> list[Row]:
        rows = await self._rows("SELECT * FROM messages WHERE chat_id = ? ORDER BY position", chat_id)
        for row in rows:
            row["usage"] = json.loads(row["usage"]) if row["usage"] else None
        return rows

    # -- runs

    async def begin_run(
        self, chat_id: str, run_id: str, content: str, title: str, params: Mapping[str, Any]
    ) -> str | None:
        """Add a question and its answer-to-be; the answer's message id, or None when the chat is gone."""
        question, answer, now = _id("msg"), _id("msg"), time.time()

        def begin(db: Database) -> str | None:
            with db.conn:
                updated = db.conn.execute(
                    "UPDATE chats SET updated_at = ?, title = CASE title WHEN '' THEN ? ELSE title END WHERE id = ?",
                    [now, title, chat_id],
                )
                if not updated.rowcount:
                    return None
                (last,) = db.conn.execute(
                    "SELECT coalesce(max(position), 0) FROM messages WHERE chat_id = ?", [chat_id]
                ).fetchone()
                add = (
                    "INSERT INTO messages (id, chat_id, position, role, content, run_id, status, created_at) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
                )
                db.conn.execute(add, [question, chat_id, last + 1, "user", content, None, "completed", now])
                db.conn.execute(add, [answer, chat_id, last + 2, "assistant", "", run_id, "running", now])
                db.conn.execute(
                    "INSERT INTO runs (id, chat_id, message_id, status, params, created_at) VALUES (?, ?, ?, ?, ?, ?)",
                    [run_id, chat_id, answer, "running", json.dumps(params), now],
                )
            return answer

        return await self._read(begin)

    async def run(self, run_id: str) -> Row | None:
        rows = await self._rows("SELECT * FROM runs WHERE id = ?", run_id)
        return rows[0] if rows else None

    async def events(self, run_id: str) -> list[LoggedEvent]:
        rows = await self._rows("SELECT seq, type, data FROM events WHERE run_id = ? ORDER BY seq", run_id)
        return [LoggedEvent(**row) for row in rows]

    def write_events(self, run_id: str, events: Sequence[LoggedEvent]) -> None:
        """Append to a run's log, in one transaction, some time soon."""
        rows = [(run_id, e.seq, e.type, e.data) for e in events]
        self._write(lambda db: _append(db, rows))

    def end_run(self, run_id: str, answer: Answer) -> None:
        """Record how a run ended, some time soon."""
        self._write(lambda db: _end(db, run_id, answer))

    def write_trace(self, run_id: str, trace: str) -> None:
        """Keep how a run can be made again, some time soon."""

        def write(db: Database) -> None:
            with db.conn:
                db.conn.execute(
                    "INSERT INTO traces (run_id, data) SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM runs WHERE id = ?1)",
                    [run_id, trace],
                )

        self._write(write)

    async def trace(self, run_id: str) -> str | None:
        rows = await self._rows("SELECT data FROM traces WHERE run_id = ?", run_id)
        return str(rows[0]["data"]) if rows else None

    async def fail_unfinished(self, terminal: LoggedEvent, error: str) -> int:
        """End the runs that a stopped or crashed server left running: what was logged of their answers is kept.

        `terminal.seq` is ignored: the event goes after each log's end.
        """

        def fail(db: Database) -> int:
            unfinished = [run_id for (run_id,) in db.conn.execute("SELECT id FROM runs WHERE status = 'running'")]
            for run_id in unfinished:
                parts: dict[str, list[str]] = {"answer.delta": [], "thinking.delta": []}
                last = 0
                log_of_run = "SELECT seq, type, data FROM events WHERE run_id = ? ORDER BY seq"
                for seq, kind, data in db.conn.execute(log_of_run, [run_id]):
                    last = seq
                    if kind in parts:
                        parts[kind].append(json.loads(data)["text"])
                _append(db, [(run_id, last + RESTART_GAP, terminal.type, terminal.data)])
                content, thinking = "".join(parts["answer.delta"]), "".join(parts["thinking.delta"])
                _end(db, run_id, Answer("failed", content, thinking, error=error))
            return len(unfinished)

        return await self._read(fail)

    # -- the thread

    async def _read(self, work: Callable[[Database], T]) -> T:
        return await asyncio.wrap_future(self._thread.submit(work, self._db))

    async def _rows(self, sql: str, *parameters: object) -> list[Row]:
        return await self._read(lambda db: list(db.query(sql, list(parameters))))

    def _write(self, work: Callable[[Database], None]) -> None:
        try:
            self._thread.submit(work, self._db).add_done_callback(_report)
        except RuntimeError:  # closed already: the next start ends what this leaves open
            log.warning("a write to the database came after it was closed")

    @staticmethod
    def _insert(db: Database, table: str, row: Row) -> None:
        with db.conn:
            db.conn.execute(
                f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", list(row.values())
            )


def _append(db: Database, rows: Iterable[tuple[str, int, str, str]]) -> None:
    with db.conn:
        # A chat may have been deleted under its run: then there is nothing to append to.
        db.conn.executemany(
            "INSERT INTO events (run_id, seq, type, data) SELECT ?1, ?2, ?3, ?4 WHERE EXISTS "
            "(SELECT 1 FROM runs WHERE id = ?1)",
            rows,
        )


def _end(db: Database, run_id: str, answer: Answer) -> None:
    usage = answer.usage.model_dump_json() if answer.usage else None
    with db.conn:
        db.conn.execute("UPDATE runs SET status = ?, ended_at = ? WHERE id = ?", [answer.status, time.time(), run_id])
        db.conn.execute(
            "UPDATE messages SET status = ?, content = ?, thinking = ?, thinking_s = ?, ttft_s = ?, tokens_per_s = ?, "
            "usage = ?, error = ? WHERE run_id = ?",
            [
                answer.status, answer.content, answer.thinking, answer.thinking_s, answer.ttft_s, answer.tokens_per_s,
                usage, answer.error, run_id,
            ],
        )  # fmt: skip


def _connect(path: Path) -> Database:
    db = Database(sqlite3.connect(path, check_same_thread=False))
    db.conn.execute("PRAGMA busy_timeout = 5000")
    db.conn.execute("PRAGMA foreign_keys = ON")
    db.enable_wal()
    db.conn.execute("PRAGMA synchronous = NORMAL")  # with WAL: a power cut may lose the newest writes, never the file
    migrate(db)
    return db


def _lock(data_dir: Path) -> IO[str]:
    """Hold the directory for this process: two servers would each take the other's running answers for dead."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = (data_dir / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise OSError(
            f"another Ponder (process {holder}) is using it; stop that one, or give another --data-dir"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _report(done: Future[None]) -> None:
    if error := done.exception():
        log.error("a write to the database failed: %s", error)
