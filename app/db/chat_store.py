"""Chats, their folders, and the tree of their messages.

Each message follows its parent, a branch is the path from a root to a leaf, and one branch of a chat is the current
one. An edited question is a sibling of the first one, and an answer made again is a sibling of the old one. A folder is
only a name that chats are put under: a chat outlives its folder.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, tuple_, update

from app.db.answer_steps import load_steps
from app.db.connection import insert, row, rows
from app.db.database import Database
from app.db.sqlite import NameTaken, NotThere, Row, new_id
from app.db.tables import chats, folders, insertion_number, messages

_IN_IT = (
    select(func.count())
    .select_from(chats)
    .where(chats.c.folder_id == folders.c.id, chats.c.deleted_at.is_(None))
    .scalar_subquery()
)
_FOLDERS = select(folders.c.id, folders.c.name, folders.c.created_at, _IN_IT.label("chats")).where(
    folders.c.user == bindparam("user"), folders.c.deleted_at.is_(None)
)
_ALL_FOLDERS = _FOLDERS.order_by(folders.c.name, folders.c.id)
_FOLDER = _FOLDERS.where(folders.c.id == bindparam("id"))
FOLDER_NAMED = select(folders.c.id).where(
    folders.c.user == bindparam("user"), folders.c.name == bindparam("name"), folders.c.deleted_at.is_(None)
)
_MESSAGES = select(messages).where(messages.c.chat_id == bindparam("chat")).order_by(messages.c.position)
_OUTLINE = (
    select(messages.c.id, messages.c.parent_id, messages.c.run_id, messages.c.status)
    .where(messages.c.chat_id == bindparam("chat"))
    .order_by(messages.c.position)
)
_THESE = select(messages).where(messages.c.id.in_(bindparam("ids", expanding=True))).order_by(messages.c.position)
_LAST = select(func.coalesce(func.max(messages.c.position), 0)).where(messages.c.chat_id == bindparam("chat"))


class Folders:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, user: str) -> list[Row]:
        return await self._database.rows(_ALL_FOLDERS, user=user)

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

        def create(db: Connection) -> Row:
            _free(db, user, name)
            return add_folder(db, user, name)

        return await self._database.read(create)

    async def rename(self, user: str, id: str, name: str) -> Row:
        """
        Raises:
            NotThere: there is no such folder.
            NameTaken: another has this name.
        """

        def rename(db: Connection) -> Row:
            if folder_of(db, user, id)["name"] != name:
                _free(db, user, name)
                db.execute(update(folders).where(folders.c.id == id).values(name=name))
            return folder_of(db, user, id)

        return await self._database.read(rename)


def folder_of(db: Connection, user: str, id: str) -> Row:
    """In the database's thread.

    Raises:
        NotThere: the user has no such folder.
    """
    found = row(db, _FOLDER, user=user, id=id)
    if found is None:
        raise NotThere("folder", id)
    return found


def add_folder(db: Connection, user: str, name: str) -> Row:
    """In the database's thread."""
    folder = {"id": new_id("folder"), "name": name, "created_at": time.time()}
    insert(db, folders, {**folder, "user": user})
    return {**folder, "chats": 0}


def _free(db: Connection, user: str, name: str) -> None:
    if row(db, FOLDER_NAMED, user=user, name=name) is not None:
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


def messages_of(db: Connection, chat_id: str) -> list[Row]:
    """All of a chat's, in every branch, the oldest first."""
    return [_loaded(message) for message in rows(db, _MESSAGES, chat=chat_id)]


def _loaded(message: Row) -> Row:
    return {
        **message,
        "usage": json.loads(message["usage"]) if message["usage"] else None,
        "steps": load_steps(message["steps"]),
        "images": json.loads(message["images"]) if message["images"] else [],
        "files": json.loads(message["files"]) if message["files"] else [],
    }


def add_message(db: Connection, chat_id: str, message: Row) -> None:
    """After all that the chat has."""
    last: int = db.execute(_LAST, {"chat": chat_id}).scalar_one()
    insert(db, messages, {**message, "chat_id": chat_id, "position": last + 1})


_IN_FOLDER = select(folders.c.id).where(folders.c.id == chats.c.folder_id, folders.c.deleted_at.is_(None))
_SHOWN = (
    chats.c.id, chats.c.title, chats.c.created_at, chats.c.updated_at, chats.c.pinned,
    _IN_FOLDER.scalar_subquery().label("folder_id"), chats.c.leaf_id, chats.c.private,
)  # fmt: skip
CHAT_NUMBER = insertion_number(chats.c.id)
_OF_USER = (chats.c.user == bindparam("user"), chats.c.deleted_at.is_(None))
_CHAT = select(*_SHOWN, chats.c.imported, chats.c.settings).where(chats.c.id == bindparam("id"), *_OF_USER)
_LISTED = (
    select(*_SHOWN, CHAT_NUMBER.label("number"))
    .where(*_OF_USER)
    .order_by(chats.c.pinned.desc(), chats.c.updated_at.desc(), CHAT_NUMBER.desc())
)
NO_FOLDER = "none"  # in place of a folder's id: the chats that are in none
_CURSOR = re.compile(r"([01])_(\d{1,15}\.\d{1,15})_(\d{1,18})", re.ASCII)


class BadCursor(ValueError):
    """A place in a list that no list gave."""


class Chats:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self, user: str, *, private: bool = False, settings: Mapping[str, Any] | None = None, imported: bool = False
    ) -> Row:
        """`settings`: how answers are made, as JSON. `imported`: they may be somebody else's words."""
        now = time.time()
        chat = {"id": new_id("chat"), "title": "", "created_at": now, "updated_at": now, "private": private}
        kept = {"user": user, "settings": None if settings is None else json.dumps(settings), "imported": imported}
        await self._database.read(lambda db: insert(db, chats, {**chat, **kept}))
        return {**chat, "pinned": False, "folder_id": None, "leaf_id": None, "settings": settings}

    async def of(
        self, user: str, *, limit: int, before: str | None = None, folder_id: str | None = None
    ) -> tuple[list[Row], str | None]:
        """The pinned ones first, then those that were used last; and the place where the list goes on, if it does.
        All of them, or those of a folder, or of `NO_FOLDER`.

        Raises:
            NotThere: there is no such folder.
            BadCursor: `before` is no place that a list gave.
        """
        listed = _LISTED.limit(limit + 1)
        if before is not None:
            place = _CURSOR.fullmatch(before)
            if place is None:
                raise BadCursor(before)
            after = (place[1] == "1", float(place[2]), int(place[3]))
            listed = listed.where(tuple_(chats.c.pinned, chats.c.updated_at, CHAT_NUMBER) < after)
        if folder_id == NO_FOLDER:
            listed = listed.where(~_IN_FOLDER.exists())
        elif folder_id is not None:
            listed = listed.where(chats.c.folder_id == folder_id)

        def read(db: Connection) -> list[Row]:
            if folder_id not in (None, NO_FOLDER):
                folder_of(db, user, folder_id)
            return rows(db, listed, user=user)

        found = await self._database.read(read)
        numbers = [chat.pop("number") for chat in found]
        more = None
        if len(found) > limit:
            last = found[limit - 1]
            more = f"{int(last['pinned'])}_{last['updated_at']:.15f}_{numbers[limit - 1]}"
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

    async def end_of(self, user: str, id: str, count: int) -> tuple[Row, Tree, list[Row]]:
        """With the tree of all its messages, which have `id`, `parent_id`, `run_id` and `status` alone, and the last
        `count` of its current branch, the oldest first.

        Raises:
            NotThere: the user has no such chat.
        """

        def read(db: Connection) -> tuple[Row, Tree, list[Row]]:
            chat = chat_of(db, user, id)
            tree = Tree(rows(db, _OUTLINE, chat=id))
            ids = [each["id"] for each in tree.branch(chat["leaf_id"])[-count:]]
            return _shown(chat), tree, [_loaded(message) for message in rows(db, _THESE, ids=ids)]

        return await self._database.read(read)

    async def entitle(self, user: str, id: str, was: str, title: str) -> bool:
        """Gives a chat another title, unless its title is no longer `was`; whether it did."""
        mine = (chats.c.user == user) & (chats.c.id == id) & (chats.c.title == was)

        def entitle(db: Connection) -> bool:
            return db.execute(update(chats).where(mine).values(title=title)).rowcount == 1

        return await self._database.read(entitle)

    async def change(self, user: str, id: str, changes: Mapping[str, Any]) -> Row:
        """Set some of `title`, `pinned`, `folder_id`, `leaf_id`, `private` and `settings`; a message that is no leaf
        stands for the newest leaf below it. Any: each has its own type.

        Raises:
            NotThere: there is no such chat, folder or message.
        """

        def change(db: Connection) -> Row:
            chat_of(db, user, id)
            values = dict(changes)
            if values.get("folder_id") is not None:
                folder_of(db, user, values["folder_id"])
            if "leaf_id" in values:
                tree = Tree(messages_of(db, id))
                if values["leaf_id"] not in tree:
                    raise NotThere("message", values["leaf_id"])
                values["leaf_id"] = tree.newest_leaf(values["leaf_id"])
            if "settings" in values:
                values["settings"] = json.dumps(values["settings"])
            db.execute(update(chats).where(chats.c.id == id).values(values))
            return chat_of(db, user, id)

        return _shown(await self._database.read(change))


def chat_of(db: Connection, user: str, id: str) -> Row:
    """In the database's thread, `imported` with it.

    Raises:
        NotThere: the user has no such chat.
    """
    found = row(db, _CHAT, user=user, id=id)
    if found is None:
        raise NotThere("chat", id)
    return found


def _shown(chat: Row) -> Row:
    made = {**chat, **{name: bool(chat[name]) for name in ("pinned", "private")}}
    if "settings" in chat:  # a list has none
        made["settings"] = load_settings(chat["settings"])
    return {name: value for name, value in made.items() if name != "imported"}


def load_settings(text: str | None) -> dict[str, Any] | None:
    """Loads a chat's settings, which were checked before; None where none were kept. Any: JSON."""
    return None if text is None else dict(json.loads(text))
