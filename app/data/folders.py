"""A user's folders, each a name that chats may be put under. A chat outlives its folder."""

from __future__ import annotations

import sqlite3
import time

from app.data.database import Database, Row, insert, new_id, row
from app.data.errors import NameTaken, NotThere

_CHATS = "SELECT count(*) FROM chats WHERE chats.folder_id = folders.id AND chats.deleted_at IS NULL"
_SHOWN = f"id, name, created_at, ({_CHATS}) AS chats"


class Folders:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, user: str) -> list[Row]:
        return await self._database.rows(
            f"SELECT {_SHOWN} FROM folders WHERE user = ? AND deleted_at IS NULL ORDER BY name, id", user
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
    read = f"SELECT {_SHOWN} FROM folders WHERE user = ? AND id = ? AND deleted_at IS NULL"
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
