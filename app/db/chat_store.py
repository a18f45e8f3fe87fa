"""Chats, their folders, and the tree of their messages.

Each message follows its parent, a branch is the path from a root to a leaf, and one branch of a chat is the current
one. An edited question is a sibling of the first one, and an answer made again is a sibling of the old one. A folder is
only a name that chats are put under: a chat outlives its folder.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any

from app.db.answer_steps import load_steps
from app.db.sqlite import Database, NameTaken, NotThere, Row, insert, new_id, row, rows

_CHATS = "SELECT count(*) FROM chats WHERE chats.folder_id = folders.id AND chats.deleted_at IS NULL"
_FOLDER_FIELDS = f"id, name, created_at, ({_CHATS}) AS chats"


class Folders:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, user: str) -> list[Row]:
        return await self._database.rows(
            f"SELECT {_FOLDER_FIELDS} FROM folders WHERE user = ? AND deleted_at IS NULL ORDER BY name, id", user
        )

    async def get(self, user: str, id: str) -> Row:
        """
        Raises:
            NotThere: there is no such folder.
        """
        return await self._database.read(lambda db: folder_of(db, user, id))

    async def create(self, user: str, name: str) -> Row:
        """
        Raises:
            NameTaken: there is one of this name.
        """

        def create(db: sqlite3.Connection) -> Row:
            _free(db, user, name)
            return add_folder(db, user, name)

        return await self._database.read(create)

    async def rename(self, user: str, id: str, name: str) -> Row:
        """
        Raises:
            NotThere: there is no such folder.
            NameTaken: another has this name.
        """

        def rename(db: sqlite3.Connection) -> Row:
            if folder_of(db, user, id)["name"] != name:
                _free(db, user, name)
                db.execute("UPDATE folders SET name = ? WHERE id = ?", [name, id])
            return folder_of(db, user, id)

        return await self._database.read(rename)


def folder_of(db: sqlite3.Connection, user: str, id: str) -> Row:
    """In the database's thread.

    Raises:
        NotThere: the user has no such folder.
    """
    read = f"SELECT {_FOLDER_FIELDS} FROM folders WHERE user = ? AND id = ? AND deleted_at IS NULL"
    found = row(db, read, user, id)
    if found is None:
        raise NotThere("folder", id)
    return found


def add_folder(db: sqlite3.Connection, user: str, name: str) -> Row:
    """In the database's thread."""
    folder = {"id": new_id("folder"), "name": name, "created_at": time.time()}
    insert(db, "folders", {**folder, "user": user})
    return {**folder, "chats": 0}


def _free(db: sqlite3.Connection, user: str, name: str) -> None:
    read = "SELECT 1 FROM folders WHERE user = ? AND name = ? AND deleted_at IS NULL"
    if row(db, read, user, name) is not None:
        raise NameTaken(f"There is a folder {name!r:.60} already; choose another name.")


class Tree:
    """Messages, the oldest first: rows with `id` and `parent_id`, which is None for a beginning."""

    def __init__(self, messages: Sequence[Row]) -> None:
        self.messages: dict[str, Row] = {message["id"]: message for message in messages}
        self._age = {id: age for age, id in enumerate(self.messages)}
        self._children: dict[str | None, list[str]] = {}
        for message in messages:
            self._children.setdefault(message["parent_id"], []).append(message["id"])

    def __contains__(self, id: str) -> bool:
        return id in self.messages

    def branch(self, leaf_id: str | None) -> list[Row]:
        """The messages from the beginning to this one."""
        path: list[Row] = []
        while leaf_id is not None:
            path.append(self.messages[leaf_id])
            leaf_id = path[-1]["parent_id"]
        return path[::-1]

    def siblings(self, id: str) -> list[str]:
        """Those with the same parent, it among them, the oldest first."""
        return self._children[self.messages[id]["parent_id"]]

    def newest_leaf(self, id: str) -> str:
        """Of the leaves below this message, or itself, the one that was added last."""
        newest, below = id, [id]
        while below:
            children = self._children.get(below.pop(), [])
            below += children
            newest = max(newest, *children, key=self._age.__getitem__) if children else newest
        return newest


def messages_of(db: sqlite3.Connection, chat_id: str) -> list[Row]:
    """All of a chat's, in every branch, the oldest first."""
    found = rows(db, "SELECT * FROM messages WHERE chat_id = ? ORDER BY position", chat_id)
    for message in found:
        message["usage"] = json.loads(message["usage"]) if message["usage"] else None
        message["steps"] = load_steps(message["steps"])
    return found


def add_message(db: sqlite3.Connection, chat_id: str, message: Row) -> None:
    """After all that the chat has."""
    (last,) = db.execute("SELECT coalesce(max(position), 0) FROM messages WHERE chat_id = ?", [chat_id]).fetchone()
    insert(db, "messages", {**message, "chat_id": chat_id, "position": last + 1})


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
