"""Presets, which a new chat can begin with, and prompts, which a person writes once and asks again.

A preset is its owner's, who may share it with users or with everybody: they see it and begin chats with it, and nothing
more. A chat has a copy of a preset's settings, so later changes do not reach it. A preset that was read from a file is
`imported`: its words may be anybody's. Prompts are each user's own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, delete, func, or_, select, update
from sqlalchemy.exc import IntegrityError

from app.db.chat_store import load_settings
from app.db.connection import insert, rows
from app.db.database import Database
from app.db.sqlite import NameTaken, NotThere, Row, new_id
from app.db.tables import preset_members, presets, prompts
from retrieval.records import NotAllowed

MAX_PRESETS, MAX_PROMPTS = 200, 500  # of a user
MAX_MEMBERS = 100  # of a preset
MAX_NAME = 60  # characters, of either


class TooManyKept(ValueError):
    """The user has as many as one may have; the message says how many. `what`: presets, prompts or members."""

    def __init__(self, what: str, most: int) -> None:
        super().__init__(f"There are {most} {what} already, which is the limit; delete some first.")
        self.what = what


class Presets:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, user: str) -> list[Row]:
        """Those of the user and those that others share with them, by name."""
        return await self._database.read(lambda db: _presets_of(db, user))

    async def get(self, user: str, id: str) -> Row:
        """
        Raises:
            NotThere: the user has no such preset, and nobody shares it with them.
        """
        return await self._database.read(lambda db: _preset(db, user, id))

    async def create(self, user: str, fields: Mapping[str, Any]) -> Row:
        """`fields`: name, icon, description and settings. Any: columns.

        Raises:
            NameTaken: the user has one of this name.
            TooManyKept: they have `MAX_PRESETS`.
        """
        return await self._database.read(lambda db: _preset(db, user, _add(db, presets, user, fields)))

    async def change(self, user: str, id: str, changes: Mapping[str, Any]) -> Row:
        """Set some of the fields, or `everybody`: whether all users see it. Any: each has its own type.

        Raises:
            NotThere, NotAllowed: the user has no such preset; it is another's.
            NameTaken: another of the user's has this name.
        """

        def change(db: Connection) -> Row:
            _own(db, user, id)
            _change(db, presets, id, changes)
            return _preset(db, user, id)

        return await self._database.read(change)

    async def delete(self, user: str, id: str) -> None:
        """
        Raises:
            NotThere, NotAllowed: as `change`.
        """

        def remove(db: Connection) -> None:
            _own(db, user, id)
            db.execute(delete(presets).where(presets.c.id == id))

        await self._database.read(remove)

    async def share(self, user: str, id: str, member: str) -> Row:
        """Let another user see it. Nobody is looked up, so it is not told whether there is such a user.

        Raises:
            NotThere, NotAllowed: as `change`.
            TooManyKept: it has `MAX_MEMBERS`.
        """

        def share(db: Connection) -> Row:
            members = _own(db, user, id)["members"]
            if member not in members and member != user:
                if len(members) >= MAX_MEMBERS:
                    raise TooManyKept("members", MAX_MEMBERS)
                insert(db, preset_members, {"preset_id": id, "user": member})
            return _preset(db, user, id)

        return await self._database.read(share)

    async def unshare(self, user: str, id: str, member: str) -> None:
        """Take it back from a user; a member leaves by their own id.

        Raises:
            NotThere, NotAllowed: as `change`; or it is not shared with that user.
        """

        def unshare(db: Connection) -> None:
            _preset(db, user, id) if member == user else _own(db, user, id)
            found = preset_members.c.preset_id == id, preset_members.c.user == member
            if db.execute(delete(preset_members).where(*found)).rowcount == 0:
                raise NotThere("member", member)

        await self._database.read(unshare)

    async def export(self, user: str) -> dict[str, list[Row]]:
        """The user's own presets and prompts, without ids. Any: JSON."""

        def read(db: Connection) -> dict[str, list[Row]]:
            own = [each for each in _presets_of(db, user) if each["role"] == "owner"]
            return {
                "presets": [{name: each[name] for name in ("name", "icon", "description", "settings")} for each in own],
                "prompts": [{name: each[name] for name in ("name", "text")} for each in _prompts_of(db, user)],
            }

        return await self._database.read(read)

    async def add(
        self, user: str, given: Sequence[Mapping[str, Any]], texts: Sequence[Mapping[str, Any]]
    ) -> tuple[list[str], list[str]]:
        """Adds presets and prompts, all or none, each under a name of its own; returns their ids. Any: columns.

        Raises:
            TooManyKept: the user has too many then.
        """

        def add(db: Connection) -> tuple[list[str], list[str]]:
            foreign = [{**each, "imported": True} for each in given]
            made = [_add(db, presets, user, {**each, "name": _free(db, presets, user, each)}) for each in foreign]
            return made, [_add(db, prompts, user, {**each, "name": _free(db, prompts, user, each)}) for each in texts]

        return await self._database.read(add)


class Prompts:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, user: str) -> list[Row]:
        """The user's, by name."""
        return await self._database.read(lambda db: _prompts_of(db, user))

    async def create(self, user: str, fields: Mapping[str, Any]) -> Row:
        """`fields`: name and text. Any: columns.

        Raises:
            NameTaken: the user has one of this name.
            TooManyKept: they have `MAX_PROMPTS`.
        """
        return await self._database.read(lambda db: _prompt(db, user, _add(db, prompts, user, fields)))

    async def change(self, user: str, id: str, changes: Mapping[str, Any]) -> Row:
        """
        Raises:
            NotThere: the user has no such prompt.
            NameTaken: another has this name.
        """

        def change(db: Connection) -> Row:
            _prompt(db, user, id)
            _change(db, prompts, id, changes)
            return _prompt(db, user, id)

        return await self._database.read(change)

    async def delete(self, user: str, id: str) -> None:
        """
        Raises:
            NotThere: the user has no such prompt.
        """

        def remove(db: Connection) -> None:
            _prompt(db, user, id)
            db.execute(delete(prompts).where(prompts.c.id == id))

        await self._database.read(remove)


def _presets_of(db: Connection, user: str, id: str | None = None) -> list[Row]:
    """All that the user may see, or the one of this id. Members are told to the owner alone."""
    shared = select(preset_members.c.preset_id).where(preset_members.c.user == user)
    seen = select(presets).where(or_(presets.c.user == user, presets.c.everybody, presets.c.id.in_(shared)))
    if id is not None:
        seen = seen.where(presets.c.id == id)
    found = rows(db, seen.order_by(func.lower(presets.c.name), presets.c.created_at, presets.c.id))
    members: dict[str, list[str]] = {}
    named = select(preset_members).join(presets).where(presets.c.user == user).order_by(preset_members.c.user)
    for each in rows(db, named):
        members.setdefault(each["preset_id"], []).append(each["user"])
    made = []
    for preset in found:
        owner = preset.pop("user")
        shown = {
            "everybody": bool(preset["everybody"]), "imported": bool(preset["imported"]),
            "settings": load_settings(preset["settings"]),
            "members": members.get(preset["id"], []), "owner": owner, "role": "owner" if owner == user else "reader",
        }  # fmt: skip
        made.append({**preset, **shown})
    return made


def _preset(db: Connection, user: str, id: str) -> Row:
    found = _presets_of(db, user, id)
    if not found:
        raise NotThere("preset", id)
    return found[0]


def _own(db: Connection, user: str, id: str) -> Row:
    preset = _preset(db, user, id)
    if preset["role"] != "owner":
        raise NotAllowed(f"The preset {id!r:.60} is of {preset['owner']!r:.60}, who alone may change it; copy it.")
    return preset


def _prompts_of(db: Connection, user: str) -> list[Row]:
    shown = select(prompts.c.id, prompts.c.name, prompts.c.text, prompts.c.created_at, prompts.c.updated_at)
    return rows(db, shown.where(prompts.c.user == user).order_by(func.lower(prompts.c.name), prompts.c.id))


def _prompt(db: Connection, user: str, id: str) -> Row:
    found = next((each for each in _prompts_of(db, user) if each["id"] == id), None)
    if found is None:
        raise NotThere("prompt", id)
    return found


_LIMITS = {presets.name: MAX_PRESETS, prompts.name: MAX_PROMPTS}


def _add(db: Connection, table: Table, user: str, fields: Mapping[str, Any]) -> str:
    kept: int = db.scalar(select(func.count()).select_from(table).where(table.c.user == user)) or 0
    if kept >= _LIMITS[table.name]:
        raise TooManyKept(table.name, _LIMITS[table.name])
    now, id = time.time(), new_id(table.name.removesuffix("s"))
    columns = {**_columns(fields), "id": id, "user": user, "created_at": now, "updated_at": now}
    try:
        insert(db, table, columns)
    except IntegrityError:
        raise _taken(table, fields) from None
    return id


def _change(db: Connection, table: Table, id: str, changes: Mapping[str, Any]) -> None:
    try:
        db.execute(update(table).where(table.c.id == id).values({**_columns(changes), "updated_at": time.time()}))
    except IntegrityError:
        raise _taken(table, changes) from None


def _taken(table: Table, fields: Mapping[str, Any]) -> NameTaken:
    what = table.name.removesuffix("s")
    return NameTaken(f"There is a {what} {fields.get('name')!r:.60} already; choose another name.")


def _columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The values as columns have them. Any: each has its own type."""
    made = dict(fields)
    if "settings" in made:
        made["settings"] = json.dumps(made["settings"])
    return made


def _free(db: Connection, table: Table, user: str, fields: Mapping[str, Any]) -> str:
    """The name of something that was read from a file, with a number behind it where the user has one of that name."""
    taken = set(db.scalars(select(table.c.name).where(table.c.user == user)))
    name, number = str(fields["name"]), 1
    while name in taken:
        number += 1
        end = f"-{number}"
        name = str(fields["name"])[: MAX_NAME - len(end)] + end
    return name
