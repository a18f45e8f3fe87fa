"""Links to chats that anybody may read who has one: each a page as the chat was when it was made or updated.

A link's token is kept as its hash alone. Deleting a chat revokes its links at once.
"""

from __future__ import annotations

import hashlib
import secrets
import time

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from app.db.chat_store import chat_of
from app.db.connection import row, rows
from app.db.database import Database
from app.db.sqlite import NotThere, Row, new_id
from app.db.tables import chats, shares

MAX_LINKS = 50  # of one chat
TOKEN_BYTES = 32
_SHOWN = (shares.c.id, shares.c.chat_id, shares.c.title, shares.c.created_at, shares.c.updated_at)
_KEPT = chats.c.deleted_at.is_(None)
_OF_USER = (
    select(*_SHOWN)
    .join(chats, chats.c.id == shares.c.chat_id)
    .where(chats.c.user == bindparam("user"), _KEPT)
    .order_by(shares.c.created_at.desc(), shares.c.id)
)
_PAGE = (
    select(shares.c.page).join(chats, chats.c.id == shares.c.chat_id).where(shares.c.hash == bindparam("hash"), _KEPT)
)


class TooManyLinks(Exception):
    """The chat has `MAX_LINKS` links."""


class Shares:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, user: str, chat_id: str, title: str, page: str) -> tuple[str, Row]:
        """Returns the token, which is not kept, and the link.

        Raises:
            NotThere: the user has no such chat.
            TooManyLinks: it has `MAX_LINKS` links.
        """
        token = secrets.token_urlsafe(TOKEN_BYTES)

        def add(db: Connection) -> Row:
            chat_of(db, user, chat_id)
            if len(rows(db, _OF_USER.where(shares.c.chat_id == chat_id), user=user)) >= MAX_LINKS:
                raise TooManyLinks(f"This chat has {MAX_LINKS} links, which is the limit; revoke one first.")
            now, id = time.time(), new_id("share")
            made = {"id": id, "chat_id": chat_id, "title": title, "created_at": now, "updated_at": now}
            db.execute(insert(shares).values(**made, hash=_hash(token), page=page))
            return made

        return token, await self._database.read(add)

    async def of(self, user: str) -> list[Row]:
        """The newest first."""
        return await self._database.rows(_OF_USER, user=user)

    async def get(self, user: str, id: str) -> Row:
        """
        Raises:
            NotThere: the user has no such link.
        """
        return await self._database.read(lambda db: _share(db, user, id))

    async def replace(self, user: str, id: str, title: str, page: str) -> Row:
        """Makes a link lead to another page.

        Raises:
            NotThere: the user has no such link.
        """

        def replace(db: Connection) -> Row:
            _share(db, user, id)
            changed = {"title": title, "page": page, "updated_at": time.time()}
            db.execute(update(shares).where(shares.c.id == id).values(changed))
            return _share(db, user, id)

        return await self._database.read(replace)

    async def revoke(self, user: str, id: str) -> None:
        """
        Raises:
            NotThere: the user has no such link.
        """

        def revoke(db: Connection) -> None:
            _share(db, user, id)
            db.execute(delete(shares).where(shares.c.id == id))

        await self._database.read(revoke)

    async def revoke_all(self, chat_id: str) -> None:
        """Revokes the links to a chat."""
        await self._database.read(lambda db: db.execute(delete(shares).where(shares.c.chat_id == chat_id)))

    async def page(self, token: str) -> str | None:
        """Returns the page that a token leads to; None where there is none."""
        found = await self._database.rows(_PAGE, hash=_hash(token))
        return str(found[0]["page"]) if found else None


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _share(db: Connection, user: str, id: str) -> Row:
    found = row(db, _OF_USER.where(shares.c.id == id), user=user)
    if found is None:
        raise NotThere("link", id)
    return found
