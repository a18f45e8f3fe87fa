"""The store of everything that the database keeps, with deletion and statistics.

Documents and tools have files of their own.

A deleted chat or folder is hidden at once, can be restored for `KEPT_S`, and is then erased. Every read elsewhere
leaves out rows with `deleted_at`. A deleted folder still holds its chats, which are shown without a folder meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from sqlalchemy import Connection, Integer, Table, bindparam, case, delete, func, select, update
from sqlalchemy.exc import IntegrityError

from app.db.artifact_store import ArtifactStore
from app.db.chat_exchange import ChatExchange
from app.db.chat_search import ChatSearch
from app.db.chat_store import Chats, Folders, chat_of, folder_of
from app.db.connection import row
from app.db.database import Database
from app.db.file_store import Files
from app.db.memory_store import Memory, purge_notes
from app.db.preset_store import Presets, Prompts
from app.db.run_store import LoggedEvent, RunKeys, RunRows
from app.db.share_store import Shares
from app.db.sqlite import STORAGE_ERRORS, NameTaken, NotThere, Row, steady
from app.db.tables import (
    chats,
    events,
    files,
    folders,
    insertion_number,
    memory_notes,
    memory_users,
    messages,
    preset_members,
    presets,
    prompts,
    responses,
    run_keys,
    runs,
)

_BY_STATUS = select(runs.c.status, func.count().label("runs")).group_by(runs.c.status)
# Runs are never taken out of their order: the newest rows are the newest runs.
_RUNS = (
    select(runs).order_by(insertion_number(runs.c.id).desc()).limit(bindparam("limit", type_=Integer)).subquery("run")
)
_LAST_EVENT = (
    select(events.c.data).where(events.c.run_id == _RUNS.c.id).order_by(events.c.seq.desc()).limit(1).scalar_subquery()
)
_NEWEST = (
    select(
        _RUNS.c.id, chats.c.user, _RUNS.c.status, _RUNS.c.params, _RUNS.c.created_at, _RUNS.c.ended_at,
        messages.c.ttft_s, messages.c.tokens_per_s, messages.c.usage,
        case((_RUNS.c.status == "failed", _LAST_EVENT)).label("last"),
    )
    .join(chats, chats.c.id == _RUNS.c.chat_id)
    .outerjoin(messages, messages.c.id == _RUNS.c.message_id)
    .order_by(_RUNS.c.created_at.desc())
)  # fmt: skip


class Overview:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def runs_by_status(self) -> dict[str, int]:
        counted = await self._database.rows(_BY_STATUS)
        return {each["status"]: each["runs"] for each in counted}

    async def newest_runs(self, limit: int) -> list[Row]:
        """The newest first; `model` is None for the default one."""
        found = await self._database.rows(_NEWEST, limit=limit)
        for each in found:
            last, usage = each.pop("last"), each.pop("usage")
            each["model"] = json.loads(each.pop("params")).get("model")
            each["error_code"] = json.loads(last).get("code") if last else None
            each["completion_tokens"] = json.loads(usage).get("completion_tokens") if usage else None
        return found


log = logging.getLogger("ponder")

KEPT_S = 600.0
SWEEP_S = 3600.0

Kind = Literal["chat", "folder"]
_FIND: dict[Kind, Callable[[Connection, str, str], object]] = {"chat": chat_of, "folder": folder_of}
_TABLES: dict[Kind, Table] = {"chat": chats, "folder": folders}


class Deleted:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._more = asyncio.Event()  # something was deleted

    async def delete(self, kind: Kind, user: str, id: str) -> float:
        """Hide it; until when it may come back, in seconds since the epoch.

        Raises:
            NotThere: the user has no such thing, or no longer.
        """

        def delete(db: Connection) -> float:
            _FIND[kind](db, user, id)
            table, now = _TABLES[kind], steady()
            db.execute(update(table).where(table.c.id == id).values(deleted_at=now))
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

        def restore(db: Connection) -> None:
            found = row(db, select(table).where(table.c.user == user, table.c.id == id))
            if found is None or (found["deleted_at"] is not None and found["deleted_at"] <= steady() - KEPT_S):
                raise NotThere(kind, id)
            try:
                db.execute(update(table).where(table.c.id == id).values(deleted_at=None))
            except IntegrityError:
                raise NameTaken(f"There is a folder {found['name']!r:.60} by now; rename or delete that one.") from None

        await self._database.read(restore)

    async def purge(self, kept_s: float = KEPT_S) -> float | None:
        """Erase what was deleted that long ago, with all that belongs to it; in how many seconds more will be due."""

        def purge(db: Connection) -> float | None:
            now, left = steady(), list[float]()
            due = select(chats.c.id).where(chats.c.deleted_at <= now - kept_s)
            purge_notes(db, db.scalars(due).all())
            for table in _TABLES.values():
                db.execute(delete(table).where(table.c.deleted_at <= now - kept_s))
                oldest: float | None = db.scalar(select(func.min(table.c.deleted_at)))
                left += [] if oldest is None else [max(0.0, oldest + kept_s - now)]
            return min(left, default=None)

        return await self._database.read(purge)

    async def purge_when_due(self, kept_s: float = KEPT_S, swept: Callable[[], Awaitable[None]] | None = None) -> None:
        """Erase, for ever, what may not come back any more. It sleeps meanwhile. `swept` is called after each time, and
        at least every `SWEEP_S`, to erase elsewhere what belonged to it."""
        while True:
            self._more.clear()
            try:
                due_s = await self.purge(kept_s)
                if swept is not None:
                    await swept()
                    due_s = SWEEP_S if due_s is None else min(due_s, SWEEP_S)
            except STORAGE_ERRORS as error:  # a full disk, say
                log.error("what was deleted cannot be erased yet: %s", error)
                due_s = kept_s
            with suppress(TimeoutError):
                async with asyncio.timeout(due_s):
                    await self._more.wait()


__all__ = ["LoggedEvent", "Store"]


class Store:
    """The data of one server, which one process at a time may have open, or of several that share a database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.chats = Chats(database)
        self.folders = Folders(database)
        self.deleted = Deleted(database)
        self.search = ChatSearch(database)
        self.exchange = ChatExchange(database)
        self.presets = Presets(database)
        self.prompts = Prompts(database)
        self.runs = RunRows(database)
        self.run_keys = RunKeys(database)
        self.overview = Overview(database)
        self.memory = Memory(database)
        self.shares = Shares(database)
        self.files = Files(database)
        self.artifacts = ArtifactStore(database)

    @classmethod
    async def open(cls, data_dir: Path, address: str | None = None, *, shared: bool = False) -> Store:
        """
        Args:
            address: of a PostgreSQL database; None: ponder.db in the directory.
            shared: with other servers.

        Raises:
            BadSetting: the directory or the database cannot be used; the message says why.
        """
        return cls(await Database.open(data_dir, address, shared=shared))

    async def delete_user(self, user: str) -> tuple[int, list[str]]:
        """Erases a user's chats, folders and stored responses at once, also what could still be restored.

        Returns how many chats they were, and the ids of their runs.
        """

        def erase(db: Connection) -> tuple[int, list[str]]:
            theirs = select(chats.c.id).where(chats.c.user == user)
            erased = list(db.scalars(select(runs.c.id).where(runs.c.chat_id.in_(theirs))))
            count = db.execute(delete(chats).where(chats.c.user == user)).rowcount
            for table in (
                files,
                folders,
                responses,
                run_keys,
                presets,
                preset_members,
                prompts,
                memory_notes,
                memory_users,
            ):
                db.execute(delete(table).where(table.c.user == user))
            return count, erased

        return await self.database.erase(erase)

    async def close(self) -> None:
        """Finish every write, then let go of the directory and the database. Idempotent."""
        await self.database.close()
