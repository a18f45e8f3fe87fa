"""A user's chats: their titles, where they are listed, and which branch of each is the current one."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from app.data.database import Database, Row, insert, new_id, row, rows
from app.data.errors import NotThere
from app.data.folders import folder_of
from app.data.messages import messages_of
from app.data.tree import Tree

_IN_FOLDER = "SELECT id FROM folders WHERE folders.id = chats.folder_id AND folders.deleted_at IS NULL"
_SHOWN = f"id, title, created_at, updated_at, pinned, ({_IN_FOLDER}) AS folder_id, leaf_id"
NO_FOLDER = "none"  # in place of a folder's id: the chats that are in none
_CURSOR = re.compile(r"([01])_(\d{1,15}\.\d{1,15})_(\d{1,18})", re.ASCII)


class BadCursor(ValueError):
    """A place in a list that no list gave."""


class Chats:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, user: str) -> Row:
        now = time.time()
        chat = {"id": new_id("chat"), "title": "", "created_at": now, "updated_at": now}
        await self._database.read(lambda db: insert(db, "chats", {**chat, "user": user}))
        return {**chat, "pinned": False, "folder_id": None, "leaf_id": None}

    async def of(
        self, user: str, *, limit: int, before: str | None = None, folder_id: str | None = None
    ) -> tuple[list[Row], str | None]:
        """The pinned ones first, then those that were used last; and the place where the list goes on, if it does.
        All of them, or those of a folder, or of `NO_FOLDER`.

        Raises:
            NotThere: there is no such folder.
            BadCursor: `before` is no place that a list gave.
        """
        conditions, values = ["user = ?", "deleted_at IS NULL"], list[object]([user])
        if before is not None:
            place = _CURSOR.fullmatch(before)
            if place is None:
                raise BadCursor(before)
            conditions.append("(pinned, updated_at, rowid) < (?, ?, ?)")
            values += [int(place[1]), float(place[2]), int(place[3])]
        if folder_id == NO_FOLDER:
            conditions.append(f"NOT EXISTS ({_IN_FOLDER})")
        elif folder_id is not None:
            conditions.append("folder_id = ?")
            values.append(folder_id)

        def read(db: sqlite3.Connection) -> list[Row]:
            if folder_id not in (None, NO_FOLDER):
                folder_of(db, user, folder_id)
            return rows(
                db, f"SELECT {_SHOWN}, rowid FROM chats WHERE {' AND '.join(conditions)} "
                "ORDER BY pinned DESC, updated_at DESC, rowid DESC LIMIT ?", *values, limit + 1,
            )  # fmt: skip

        found = await self._database.read(read)
        numbers = [chat.pop("rowid") for chat in found]
        more = None
        if len(found) > limit:
            last = found[limit - 1]
            more = f"{last['pinned']}_{last['updated_at']:.15f}_{numbers[limit - 1]}"
        return [_shown(chat) for chat in found[:limit]], more

    async def get(self, user: str, id: str) -> Row:
        """
        Raises:
            NotThere: the user has no such chat.
        """
        return _shown(await self._database.read(lambda db: chat_of(db, user, id)))

    async def whole(self, user: str, id: str) -> tuple[Row, list[Row]]:
        """With all its messages, in every branch, the oldest first.

        Raises:
            NotThere: the user has no such chat.
        """
        chat, messages = await self._database.read(lambda db: (chat_of(db, user, id), messages_of(db, id)))
        return _shown(chat), messages

    async def change(self, user: str, id: str, changes: Mapping[str, Any]) -> Row:
        """Set some of `title`, `pinned`, `folder_id` and `leaf_id`; a message that is no leaf stands for the newest
        leaf below it. Any: each has its own type.

        Raises:
            NotThere: there is no such chat, folder or message.
        """

        def change(db: sqlite3.Connection) -> Row:
            chat_of(db, user, id)
            values = dict(changes)
            if values.get("folder_id") is not None:
                folder_of(db, user, values["folder_id"])
            if "leaf_id" in values:
                tree = Tree(messages_of(db, id))
                if values["leaf_id"] not in tree:
                    raise NotThere("message", values["leaf_id"])
                values["leaf_id"] = tree.newest_leaf(values["leaf_id"])
            names = ", ".join(f"{name} = ?" for name in values)
            db.execute(f"UPDATE chats SET {names} WHERE id = ?", [*values.values(), id])
            return chat_of(db, user, id)

        return _shown(await self._database.read(change))


def chat_of(db: sqlite3.Connection, user: str, id: str) -> Row:
    """In the database's thread, `imported` with it.

    Raises:
        NotThere: the user has no such chat.
    """
    read = f"SELECT {_SHOWN}, imported FROM chats WHERE user = ? AND id = ? AND deleted_at IS NULL"
    found = row(db, read, user, id)
    if found is None:
        raise NotThere("chat", id)
    return found


def _shown(chat: Row) -> Row:
    return {name: value for name, value in {**chat, "pinned": bool(chat["pinned"])}.items() if name != "imported"}
