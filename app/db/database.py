"""The database of chats and runs, in a thread of its own.

One thread has the file, or the connection to PostgreSQL, open. Calls reach it in the order they were made, so a read
sees every write before it and `write` need not be awaited: tokens never wait for the disk. Where several servers share
the database, a transaction that another came before is tried again: what it does is in the database alone.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

from sqlalchemy import Connection, Executable, select

from app.config import BadSetting
from app.db.connection import is_sqlite, pragma, rows, transaction
from app.db.migrations import NewerDatabase, open_database
from app.db.sqlite import STORAGE_ERRORS, PostgresError, Row, lock_data_dir, new_id
from app.db.tables import chats

log = logging.getLogger("ponder")
_ANY_CHAT = select(chats.c.id).limit(1)
_TRIES, _RETRY_S = 12, 0.002  # the first wait, at most; it doubles
T = TypeVar("T")


class Database:
    """The database of one server, or its share of one: no other process has the data directory open meanwhile.

    `member` is the name that this server has among those that share the database, a new one with each start; None: no
    other process has the database open.
    """

    def __init__(self, db: Connection, lock: IO[str], thread: ThreadPoolExecutor, member: str | None = None) -> None:
        self.member = member
        self._db = db
        self._lock = lock
        self._thread = thread

    @classmethod
    async def open(cls, data_dir: Path, address: str | None = None, *, shared: bool = False) -> Database:
        """
        Args:
            address: of a PostgreSQL database; None: ponder.db in the directory.
            shared: with other servers.

        Raises:
            BadSetting: the directory or the database cannot be used; the message says why.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        loop = asyncio.get_running_loop()
        try:
            lock = await loop.run_in_executor(thread, lock_data_dir, data_dir)
        except OSError as error:
            thread.shutdown(wait=False)
            raise BadSetting(f"The data directory {data_dir} cannot be used: {error}.") from None
        member = new_id("server") if shared else None
        try:
            db = await loop.run_in_executor(thread, _open, address or data_dir / "ponder.db", member)
        except BaseException as error:
            thread.shutdown(wait=False)
            _unlock(lock)
            if not isinstance(error, (OSError, *STORAGE_ERRORS, NewerDatabase)):
                raise
            place = f"data directory {data_dir}" if address is None else "PostgreSQL database of --database"
            raise BadSetting(f"The {place} cannot be used: {error}.") from None
        database = cls(db, lock, thread, member)
        if address is not None and (data_dir / "ponder.db").exists() and not await database.rows(_ANY_CHAT):
            log.warning("the chats of %s are not in the PostgreSQL database: `ponder migrate` copies them", data_dir)
        return database

    @property
    def is_sqlite(self) -> bool:
        return is_sqlite(self._db)

    async def close(self) -> None:
        """Finish every write, then let go of the directory. Idempotent."""
        if self._lock.closed:
            return
        await asyncio.wrap_future(self._thread.submit(self._db.close))
        self._thread.shutdown()
        _unlock(self._lock)

    async def read(self, work: Callable[[Connection], T], *, immediate: bool = False) -> T:
        """Returns the result of `work`, run in the database's thread, in one transaction: all is kept, or nothing.

        `immediate`: no other immediate one meanwhile, and each statement sees what was committed before it.
        """
        return await asyncio.wrap_future(self._thread.submit(self._transaction, work, immediate))

    def call(self, work: Callable[[Connection], T]) -> T:
        """Returns the same from a thread, which waits for it."""
        return self._thread.submit(self._transaction, work).result()

    async def rows(self, statement: Executable, /, **values: object) -> list[Row]:
        return await self.read(lambda db: rows(db, statement, **values))

    async def erase(self, work: Callable[[Connection], T]) -> T:
        """Does as `read`, and leaves nothing of what `work` deletes in SQLite's file, its index of words, or its log.

        PostgreSQL's files lose it with the next vacuum.
        """

        def erase() -> T:
            if not is_sqlite(self._db):
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

    def _transaction(self, work: Callable[[Connection], T], immediate: bool = False) -> T:
        for tried in range(_TRIES):
            try:
                with transaction(self._db, immediate=immediate):
                    return work(self._db)
            except PostgresError as error:
                if not error.is_conflict or self.member is None or tried == _TRIES - 1:
                    raise
                time.sleep(random.uniform(0, _RETRY_S * 2**tried))
        raise AssertionError("not reached")


def _open(place: Path | str, member: str | None) -> Connection:
    return open_database(place, "chats", busy_timeout_s=5, sole=member is None, member=member)


def _unlock(lock: IO[str]) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a starting child may have a copy
    lock.close()


def _report(done: Future[None]) -> None:
    if error := done.exception():
        log.error("a write to the database failed: %s", error)
