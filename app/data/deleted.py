"""Chats and folders that a user deleted: hidden at once, theirs to have back for `KEPT_S`, then gone.

Every read elsewhere leaves out what has `deleted_at`. A deleted folder still holds its chats, which are shown without
one meanwhile. Knows nothing of runs: whoever deletes a chat ends its answer.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from app.clock import steady
from app.data.chats import chat_of
from app.data.database import Database, row
from app.data.errors import NameTaken, NotThere
from app.data.folders import folder_of

log = logging.getLogger("ponder")

KEPT_S = 600.0

Kind = Literal["chat", "folder"]
_FIND: dict[Kind, Callable[[sqlite3.Connection, str, str], object]] = {"chat": chat_of, "folder": folder_of}
_TABLES: dict[Kind, str] = {"chat": "chats", "folder": "folders"}


class Deleted:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._more = asyncio.Event()  # something was deleted

    async def delete(self, kind: Kind, user: str, id: str) -> float:
        """Hide it; until when it may come back, in seconds since the epoch.

        Raises:
            NotThere: the user has no such thing, or no longer.
        """

        def delete(db: sqlite3.Connection) -> float:
            _FIND[kind](db, user, id)
            now = steady()
            db.execute(f"UPDATE {_TABLES[kind]} SET deleted_at = ? WHERE id = ?", [now, id])
            return now + KEPT_S

        until = await self._database.read(delete)
        self._more.set()
        return until

    async def restore(self, kind: Kind, user: str, id: str) -> None:
        """Take it back to where it was; what is not deleted stays as it is.

        Raises:
            NotThere: the user has no such thing, or it was deleted too long ago.
            NameTaken: another folder has its name by now.
        """
        table = _TABLES[kind]

        def restore(db: sqlite3.Connection) -> None:
            found = row(db, f"SELECT * FROM {table} WHERE user = ? AND id = ?", user, id)
            if found is None or (found["deleted_at"] is not None and found["deleted_at"] <= steady() - KEPT_S):
                raise NotThere(kind, id)
            try:
                db.execute(f"UPDATE {table} SET deleted_at = NULL WHERE id = ?", [id])
            except sqlite3.IntegrityError:
                raise NameTaken(f"There is a folder {found['name']!r:.60} by now; rename or delete that one.") from None

        await self._database.read(restore)

    async def purge(self, kept_s: float = KEPT_S) -> float | None:
        """Erase what was deleted that long ago, with all that belongs to it; in how many seconds more will be due."""

        def purge(db: sqlite3.Connection) -> float | None:
            now, left = steady(), list[float]()
            for table in _TABLES.values():
                db.execute(f"DELETE FROM {table} WHERE deleted_at <= ?", [now - kept_s])
                (oldest,) = db.execute(f"SELECT min(deleted_at) FROM {table}").fetchone()
                left += [] if oldest is None else [max(0.0, oldest + kept_s - now)]
            return min(left, default=None)

        return await self._database.read(purge)

    async def purge_when_due(self, kept_s: float = KEPT_S) -> None:
        """Erase, for ever, what may not come back any more. It sleeps meanwhile."""
        while True:
            self._more.clear()
            try:
                due_s = await self.purge(kept_s)
            except sqlite3.Error as error:  # a full disk, say
                log.error("what was deleted cannot be erased yet: %s", error)
                due_s = kept_s
            with suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), due_s)
