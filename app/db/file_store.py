"""Files of questions: an upload is its user's until a question is sent with it, and its chat's from then on.

What is in them is retrieval's, as attached collections under the same ids. A file goes with its chat; one that was
never sent goes after `UNSENT_S`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection, bindparam, delete, func, select, update

from app.db.connection import insert, row
from app.db.database import Database
from app.db.sqlite import NotThere, Row, new_id, steady
from app.db.tables import files

MAX_FILES = 10  # of a question
MAX_UNSENT = 50  # of a user
UNSENT_S = 24 * 3600.0

_OF_USER = select(files).where(files.c.user == bindparam("user"))
_FILE = _OF_USER.where(files.c.id == bindparam("id"))
_IN_CHAT = select(files.c.id).where(files.c.user == bindparam("user"), files.c.chat_id == bindparam("chat"))
_UNSENT = select(func.count()).select_from(files).where(files.c.user == bindparam("user"), files.c.chat_id.is_(None))


class TooManyFiles(Exception):
    """The user has `MAX_UNSENT` files that were not sent."""


class SentFile(BaseModel):
    """A file as its message keeps it. `id` is None of one that came in a file of chats, which has none of its text."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    id: str | None = None
    name: str
    bytes: int


class Files:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, user: str, name: str, size: int) -> Row:
        """
        Raises:
            TooManyFiles: the user has as many unsent ones as one may have.
        """

        def add(db: Connection) -> Row:
            if db.execute(_UNSENT, {"user": user}).scalar_one() >= MAX_UNSENT:
                raise TooManyFiles(
                    f"{MAX_UNSENT} files of yours were uploaded and not sent with a question; accepted: at most that "
                    "many. Send or delete some first; each goes by itself after a day."
                )
            made = {"id": new_id("file"), "user": user, "name": name, "bytes": size, "chat_id": None}
            insert(db, files, {**made, "created_at": steady()})
            return made

        return await self._database.read(add)

    async def get(self, user: str, id: str) -> Row:
        """
        Raises:
            NotThere: the user has no such file.
        """
        return await self._database.read(lambda db: _file(db, user, id))

    async def in_chat(self, user: str, chat_id: str) -> list[str]:
        """Returns the ids of a chat's files, of every branch."""
        return [each["id"] for each in await self._database.rows(_IN_CHAT, user=user, chat=chat_id)]

    async def for_chat(self, user: str, chat_id: str, ids: Sequence[str]) -> list[SentFile]:
        """Returns files that a question of a chat may be sent with, as its message is to keep them.

        Raises:
            NotThere: the user has no such file, or it is another chat's.
        """

        def read(db: Connection) -> list[SentFile]:
            found = [_file(db, user, id) for id in ids]
            for each in found:
                if each["chat_id"] not in (None, chat_id):
                    raise NotThere("file", each["id"])
            return [SentFile(id=each["id"], name=each["name"], bytes=each["bytes"]) for each in found]

        return await self._database.read(read)

    async def delete(self, user: str, ids: Sequence[str]) -> None:
        gone = delete(files).where(files.c.user == user, files.c.id.in_(ids))
        await self._database.read(lambda db: db.execute(gone))

    async def kept(self) -> set[str]:
        """Forgets those that were never sent and are old; returns the ids of all others."""

        def sweep(db: Connection) -> set[str]:
            old = files.c.created_at <= steady() - UNSENT_S
            db.execute(delete(files).where(files.c.chat_id.is_(None), old))
            return set(db.scalars(select(files.c.id)))

        return await self._database.read(sweep)


def _file(db: Connection, user: str, id: str) -> Row:
    found = row(db, _FILE, user=user, id=id)
    if found is None:
        raise NotThere("file", id)
    return found


def send_files(db: Connection, user: str, chat_id: str, sent: Sequence[SentFile]) -> None:
    """Gives files to a chat, in the database's thread.

    Raises:
        NotThere: one went meanwhile, or is another chat's by now.
    """
    for each in sent:
        free = files.c.chat_id.is_(None) | (files.c.chat_id == chat_id)
        mine = update(files).where(files.c.id == each.id, files.c.user == user, free).values(chat_id=chat_id)
        if db.execute(mine).rowcount != 1:
            raise NotThere("file", str(each.id))
