"""The database of chats and runs, in a thread of its own.

One thread has the file open. Calls reach it in the order they were made, so a read sees every write before it and
`write` need not be awaited: tokens never wait for the disk.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

from sqlalchemy import Connection, Executable

from app.config import BadSetting
from app.db.connection import pragma, rows, transaction
from app.db.migrations import NewerDatabase, open_database
from app.db.sqlite import Row, lock_data_dir

log = logging.getLogger("ponder")
T = TypeVar("T")


class Database:
    """The database of one data directory, which one process at a time may have open."""

    def __init__(self, db: Connection, lock: IO[str], thread: ThreadPoolExecutor) -> None:
        self._db = db
        self._lock = lock
        self._thread = thread

    @classmethod
    async def open(cls, data_dir: Path) -> Database:
        """
        Raises:
            BadSetting: the directory cannot be used; the message says why.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        loop = asyncio.get_running_loop()
        try:
            lock = await loop.run_in_executor(thread, lock_data_dir, data_dir)
            db = await loop.run_in_executor(thread, _open, data_dir)
        except (OSError, sqlite3.Error, NewerDatabase) as error:
            thread.shutdown(wait=False)
            raise BadSetting(f"The data directory {data_dir} cannot be used: {error}.") from None
        return cls(db, lock, thread)

    async def close(self) -> None:
        """Finish every write, then let go of the directory. Idempotent."""
        if self._lock.closed:
            return
        await asyncio.wrap_future(self._thread.submit(self._db.close))
        self._thread.shutdown()
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing is not enough: a starting child may have a copy
        self._lock.close()

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Returns the result of `work`, run in the database's thread, in one transaction: all is kept, or nothing."""
        return await asyncio.wrap_future(self._thread.submit(self._transaction, work))

    def call(self, work: Callable[[Connection], T]) -> T:
        """Returns the same from a thread, which waits for it."""
        return self._thread.submit(self._transaction, work).result()

    async def rows(self, statement: Executable, /, **values: object) -> list[Row]:
        return await self.read(lambda db: rows(db, statement, **values))

    async def erase(self, work: Callable[[Connection], T]) -> T:
        """Does as `read`, and leaves nothing of what `work` deletes in the file, its index of words, or its log."""

        def erase() -> T:
            if self._db.dialect.name != "sqlite":
                return self._transaction(work)
            pragma(self._db, "secure_delete = ON")
            try:
                with transaction(self._db):
                    done = work(self._db)
                    # The index only marks words as deleted until its parts are merged.
                    self._db.exec_driver_sql("INSERT INTO text_index (text_index) VALUES ('optimize')")
            finally:
                pragma(self._db, "secure_delete = OFF")
            pragma(self._db, "wal_checkpoint(TRUNCATE)")
            return done

        return await asyncio.wrap_future(self._thread.submit(erase))

    def write(self, work: Callable[[Connection], None]) -> Future[None]:
        """Do `work` some time soon, in one transaction; an error goes to the log. Done when it stands or has failed."""
        try:
            done = self._thread.submit(self._transaction, work)
        except RuntimeError:  # closed already: the next start ends what this leaves open
            log.warning("a write to the database came after it was closed")
            done = Future()
            done.set_result(None)
        else:
            done.add_done_callback(_report)
        return done

    def _transaction(self, work: Callable[[Connection], T]) -> T:
        with transaction(self._db):
            return work(self._db)


def _open(data_dir: Path) -> Connection:
    return open_database(data_dir / "ponder.db", "chats", busy_timeout_s=5)


def _report(done: Future[None]) -> None:
    if error := done.exception():
        log.error("a write to the database failed: %s", error)
