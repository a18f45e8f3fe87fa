"""Memory: notes about each user, kept across chats.

A note tells one attribute (a name, a home) or none in particular. A later note of the same attribute takes its place
and its number, and the earlier text stays as a version. Numbers count for each user from 1 and are not given twice. A
note outlives the chat that it came from, unless the user has it erased with the chat. A private chat neither reads nor
writes notes. Knows nothing of how facts are found in a message.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import Connection, Update, and_, bindparam, delete, func, insert, not_, select, update

from app.db.chat_store import chat_of
from app.db.connection import row, rows, secure_delete
from app.db.database import Database
from app.db.sqlite import NotThere, Row, open_for_reading
from app.db.tables import chats, memory_notes, memory_users, memory_versions, messages

MAX_NOTES = 500  # of one user
MAX_NOTE = 2_000  # characters
Source = Literal["stated", "tool", "user"]  # read from a message, kept by the model, written by the user


class MemoryOff(Exception):
    """Notes are neither read nor written here; the message says why."""


class MemoryFull(Exception):
    """The user has as many notes as may be."""


class NoteTaken(Exception):
    """Another note tells the attribute, or the note was changed meanwhile; the message says which."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The place a note comes from. `message_id` None with a chat: the question that is being answered there."""

    source: Source
    chat_id: str | None = None
    message_id: str | None = None


@dataclass(frozen=True, slots=True)
class KeptNote:
    """`replaced`: the text that it took the place of. `new`: whether anything was written."""

    number: int
    text: str
    replaced: str | None = None
    new: bool = True


@dataclass(frozen=True, slots=True)
class NoteInPrompt:
    number: int
    text: str


_KEPT_CHAT = and_(chats.c.id == memory_notes.c.chat_id, chats.c.deleted_at.is_(None))
_VISIBLE = not_(and_(memory_notes.c.with_chat, chats.c.id.is_(None), memory_notes.c.chat_id.is_not(None)))
_NOTES = (
    select(
        memory_notes.c.number, memory_notes.c.text, memory_notes.c.attribute, memory_notes.c.source,
        memory_notes.c.created_at, memory_notes.c.changed_at, chats.c.id.label("chat_id"),
        chats.c.title.label("chat_title"), memory_notes.c.message_id,
    )
    .outerjoin(chats, _KEPT_CHAT)
    .where(memory_notes.c.user == bindparam("user"), _VISIBLE)
    .order_by(memory_notes.c.number)
)  # fmt: skip
_VERSIONS = (
    select(
        memory_versions.c.number, memory_versions.c.text, memory_versions.c.source, memory_versions.c.changed_at,
        chats.c.id.label("chat_id"), memory_versions.c.message_id,
    )
    .outerjoin(chats, and_(chats.c.id == memory_versions.c.chat_id, chats.c.deleted_at.is_(None)))
    .where(memory_versions.c.user == bindparam("user"))
    .order_by(memory_versions.c.number, memory_versions.c.version.desc())
)  # fmt: skip
_ASKED = (
    select(messages.c.parent_id)
    .where(messages.c.chat_id == bindparam("chat"), messages.c.status == "running")
    .order_by(messages.c.position.desc())
    .limit(1)
)


@dataclass(frozen=True, slots=True)
class ImportedNote:
    """A note out of a file. `earlier`: its texts before, the newest first, each with `text`, `source`, `changed_at`."""

    text: str
    attribute: str | None
    source: Source
    created_at: float
    changed_at: float
    earlier: Sequence[Row] = ()


class Memory:
    """`available`: whether this server keeps notes at all."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.available = True

    async def enabled(self, user: str) -> bool:
        """Returns the user's own choice; on, where they made none."""
        return await self._database.read(lambda db: _enabled(db, user))

    async def enable(self, user: str, enabled: bool) -> None:
        def enable(db: Connection) -> None:
            _last_number(db, user)
            db.execute(update(memory_users).where(memory_users.c.user == user).values(enabled=enabled))

        await self._database.read(enable)

    async def of(self, user: str) -> list[Row]:
        """All notes with their earlier versions, the newest first."""
        return (await self._database.read(lambda db: _with_versions(db, user)))[::-1]

    async def get(self, user: str, number: int) -> Row:
        """
        Raises:
            NotThere: the user has no such note.
        """
        return await self._database.read(lambda db: _whole(db, user, number))

    async def keep(self, user: str, text: str, attribute: str | None, origin: Origin) -> KeptNote:
        """
        Raises:
            MemoryOff: memory is off here.
            MemoryFull: there are `MAX_NOTES` notes.
        """
        return await self._database.read(lambda db: self._keep(db, user, text, attribute, origin))

    def keep_now(self, user: str, text: str, attribute: str | None, origin: Origin) -> KeptNote:
        """The same, outside of the event loop."""
        return self._database.call(lambda db: self._keep(db, user, text, attribute, origin))

    def all_now(self, user: str, chat_id: str | None) -> list[Row]:
        """All notes, the oldest first, outside of the event loop.

        Raises:
            MemoryOff: memory is off here.
        """

        def read(db: Connection) -> list[Row]:
            self._check(db, user, chat_id)
            return rows(db, _NOTES, user=user)

        return self._database.call(read)

    def erase_now(self, user: str, number: int, chat_id: str | None) -> Row:
        """Erases a note and returns it, outside of the event loop.

        Raises:
            MemoryOff: memory is off here.
            NotThere: the user has no such note.
        """

        def erase(db: Connection) -> Row:
            self._check(db, user, chat_id)
            note = _note(db, user, number)
            _erase(db, user, [number])
            return note

        return self._database.call(erase)

    async def for_prompt(self, user: str, chat_id: str, branch: Collection[str]) -> list[NoteInPrompt]:
        """Returns the notes that a chat's prompt may have, the oldest first; none where memory is off.

        `branch`: ids of the messages that the prompt has anyway, whose own notes would say it twice.
        """

        def read(db: Connection) -> list[NoteInPrompt]:
            try:
                self._check(db, user, chat_id)
            except MemoryOff:
                return []
            found = rows(db, _NOTES, user=user)
            return [NoteInPrompt(each["number"], each["text"]) for each in found if each["message_id"] not in branch]

        return await self._database.read(read)

    async def change(self, user: str, number: int, text: str, attribute: str | None) -> Row:
        """
        Raises:
            NotThere: the user has no such note.
            NoteTaken: another note tells this attribute, or has this text.
        """

        def change(db: Connection) -> Row:
            note = _note(db, user, number)
            for other in rows(db, _NOTES, user=user):
                same = other["text"] == text or (attribute is not None and other["attribute"] == attribute)
                if same and other["number"] != number:
                    raise NoteTaken(f"Note {other['number']} tells that already: change that one, or erase it first.")
            if note["text"] != text:
                _replace(db, user, note, text, attribute, Origin("user"))
            return _whole(db, user, number)

        return await self._database.read(change)

    async def undo(self, user: str, number: int, text: str) -> Row | None:
        """Takes back the writing of `text`: the version before is the note again; without one the note is erased.

        Returns:
            The note, None where it is erased.

        Raises:
            NotThere: the user has no such note.
            NoteTaken: the note has another text by now.
        """

        def undo(db: Connection) -> Row | None:
            note = _note(db, user, number)
            if note["text"] != text:
                raise NoteTaken(f"Note {number} was changed since; it says {note['text']!r:.80}.")
            before = row(
                db,
                select(memory_versions)
                .where(memory_versions.c.user == user, memory_versions.c.number == number)
                .order_by(memory_versions.c.version.desc())
                .limit(1),
            )
            if before is None:
                _erase(db, user, [number])
                return None
            db.execute(
                delete(memory_versions).where(
                    memory_versions.c.user == user, memory_versions.c.number == number,
                    memory_versions.c.version == before["version"],
                )
            )  # fmt: skip
            names = ("text", "source", "chat_id", "message_id", "changed_at")
            db.execute(_is(user, number).values({name: before[name] for name in names}))
            return _whole(db, user, number)

        return await self._database.read(undo)

    async def erase(self, user: str, number: int) -> None:
        """
        Raises:
            NotThere: the user has no such note.
        """

        def erase(db: Connection) -> None:
            _note(db, user, number)
            _erase(db, user, [number])

        await self._database.read(erase)

    async def erase_all(self, user: str) -> int:
        """Returns how many notes there were."""

        def erase(db: Connection) -> int:
            numbers = list(db.scalars(select(memory_notes.c.number).where(memory_notes.c.user == user)))
            _erase(db, user, numbers)
            return len(numbers)

        return await self._database.read(erase)

    async def let_go_with_chat(self, user: str, chat_id: str, erase: bool) -> None:
        """Says whether the notes of a deleted chat are erased with it. Until then they are hidden, and may come back.

        `purge_notes` erases them.
        """
        mine = (memory_notes.c.user == user) & (memory_notes.c.chat_id == chat_id)
        await self._database.read(lambda db: db.execute(update(memory_notes).where(mine).values(with_chat=erase)))

    async def adopt(self, notebook: Path) -> int:
        """Takes over the notes of the file of earlier versions, and removes it; how many there were."""
        found = await asyncio.to_thread(_notes_of, notebook)

        def adopt(db: Connection) -> int:
            return sum(_adopt(db, *each) for each in found)

        adopted = await self._database.read(adopt)
        for name in (notebook, Path(f"{notebook}-wal"), Path(f"{notebook}-shm")):
            name.unlink(missing_ok=True)
        return adopted

    def _check(self, db: Connection, user: str, chat_id: str | None) -> None:
        if not self.available:
            raise MemoryOff("This server keeps no notes: its operator has switched memory off.")
        if not _enabled(db, user):
            raise MemoryOff("Memory is off: you have switched it off.")
        if chat_id is not None and chat_of(db, user, chat_id)["private"]:
            raise MemoryOff("Memory is off in this chat, which is private.")

    def _keep(self, db: Connection, user: str, text: str, attribute: str | None, origin: Origin) -> KeptNote:
        self._check(db, user, origin.chat_id)
        if origin.chat_id is not None and origin.message_id is None:
            asked = row(db, _ASKED, chat=origin.chat_id)
            origin = Origin(origin.source, origin.chat_id, None if asked is None else asked["parent_id"])
        known = rows(db, _NOTES, user=user)
        for each in known:
            if each["text"] == text:
                return KeptNote(each["number"], text, new=False)
        for each in known:
            if attribute is not None and each["attribute"] == attribute:
                _replace(db, user, each, text, attribute, origin)
                return KeptNote(each["number"], text, each["text"])
        if len(known) >= MAX_NOTES:
            raise MemoryFull(f"There are {len(known)} notes already, which is the limit; erase one first.")
        number = _last_number(db, user) + 1
        _insert(db, user, number, text, attribute, origin, time.time())
        return KeptNote(number, text)


def purge_notes(db: Connection, chat_ids: Sequence[str]) -> None:
    """Erases the notes that are to go with these chats, before the chats go. In the database's thread."""
    if chat_ids:
        gone = memory_notes.c.chat_id.in_(chat_ids) & (memory_notes.c.with_chat)
        db.execute(delete(memory_notes).where(gone))


def import_note(db: Connection, user: str, note: ImportedNote) -> None:
    """Adds a note out of a file, in the database's thread. Of two of one attribute the later one holds, and the other
    is an earlier text of it.

    Raises:
        MemoryFull: there are `MAX_NOTES` notes.
    """
    known = rows(db, _NOTES, user=user)
    if any(each["text"] == note.text for each in known):
        return
    now: Row = {"text": note.text, "source": note.source, "changed_at": note.changed_at}
    same = [each for each in known if note.attribute is not None and each["attribute"] == note.attribute]
    if not same and len(known) >= MAX_NOTES:
        raise MemoryFull(f"There are {len(known)} notes already, which is the limit; erase one first.")
    if not same:
        number, texts = _last_number(db, user) + 1, [*reversed(note.earlier)]
        _insert(db, user, number, note.text, note.attribute, Origin(note.source), note.created_at)
        db.execute(_is(user, number).values(changed_at=note.changed_at))
    else:
        number, held = same[0]["number"], same[0]
        texts = [*reversed(note.earlier), now]
        if held["changed_at"] < note.changed_at:
            texts[-1] = {name: held[name] for name in now}
            db.execute(_is(user, number).values(**now, chat_id=None, message_id=None))
    for text in texts:
        _add_version(db, user, number, {**text, "chat_id": None, "message_id": None})


def all_notes(db: Connection, user: str) -> list[Row]:
    """Returns all notes with their earlier texts, the oldest first. In the database's thread."""
    return _with_versions(db, user)


def _add_version(db: Connection, user: str, number: int, version: Row) -> None:
    mine = (memory_versions.c.user == user) & (memory_versions.c.number == number)
    last = db.scalar(select(func.max(memory_versions.c.version)).where(mine)) or 0
    db.execute(insert(memory_versions).values(user=user, number=number, version=last + 1, **version))


def _enabled(db: Connection, user: str) -> bool:
    found = row(db, select(memory_users.c.enabled).where(memory_users.c.user == user))
    return found is None or bool(found["enabled"])


def _last_number(db: Connection, user: str) -> int:
    """The highest number that the user's notes have had. Makes the user's row where there is none."""
    found = row(db, select(memory_users.c.last_number).where(memory_users.c.user == user))
    if found is None:
        db.execute(insert(memory_users).values(user=user))
        return 0
    return int(found["last_number"])


def _insert(
    db: Connection, user: str, number: int, text: str, attribute: str | None, origin: Origin, at: float
) -> None:
    db.execute(
        insert(memory_notes).values(
            user=user, number=number, text=text, attribute=attribute, source=origin.source, chat_id=origin.chat_id,
            message_id=origin.message_id, created_at=at, changed_at=at,
        )
    )  # fmt: skip
    highest = max(number, _last_number(db, user))
    db.execute(update(memory_users).where(memory_users.c.user == user).values(last_number=highest))


def _is(user: str, number: int) -> Update:
    return update(memory_notes).where(memory_notes.c.user == user, memory_notes.c.number == number)


def _replace(db: Connection, user: str, note: Row, text: str, attribute: str | None, origin: Origin) -> None:
    """Writes a new text over a note, whose old one becomes a version."""
    kept = {name: note[name] for name in ("text", "source", "chat_id", "message_id", "changed_at")}
    _add_version(db, user, note["number"], kept)
    db.execute(
        _is(user, note["number"]).values(
            text=text, attribute=attribute, source=origin.source, chat_id=origin.chat_id, message_id=origin.message_id,
            changed_at=time.time(), with_chat=False,
        )
    )  # fmt: skip


def _erase(db: Connection, user: str, numbers: Sequence[int]) -> None:
    """Erases notes and their versions; nothing of them stays in the free pages of SQLite's file."""
    gone = delete(memory_notes).where(memory_notes.c.user == user, memory_notes.c.number.in_(numbers))
    with secure_delete(db):
        db.execute(gone)


def _note(db: Connection, user: str, number: int) -> Row:
    found = row(db, _NOTES.where(memory_notes.c.number == number), user=user)
    if found is None:
        raise NotThere("note", str(number))
    return found


def _whole(db: Connection, user: str, number: int) -> Row:
    _note(db, user, number)
    return next(each for each in _with_versions(db, user) if each["number"] == number)


def _with_versions(db: Connection, user: str) -> list[Row]:
    earlier: dict[int, list[Row]] = {}
    for version in rows(db, _VERSIONS, user=user):
        earlier.setdefault(version.pop("number"), []).append(version)
    return [{**note, "earlier": earlier.get(note["number"], [])} for note in rows(db, _NOTES, user=user)]


def _notes_of(notebook: Path) -> list[tuple[str, int, str, float]]:
    """Returns the users, numbers, texts and times of the notes in a file of the notes' tools."""
    if not notebook.is_file():
        return []
    with closing(open_for_reading(notebook)) as db:
        try:
            found = db.execute("SELECT user, number, text, unixepoch(made) FROM note ORDER BY user, number").fetchall()
        except sqlite3.OperationalError:  # no note was ever kept
            return []
    return [(str(user), int(number), str(text), float(made)) for user, number, text, made in found]


def _adopt(db: Connection, user: str, number: int, text: str, made: float) -> int:
    """Adds a note under its old number, or a new one where that is taken; 1, or 0 where it is there already."""
    known = rows(db, _NOTES, user=user)
    if any(each["text"] == text for each in known):
        return 0
    taken = any(each["number"] == number for each in known)
    number = _last_number(db, user) + 1 if taken else number
    _insert(db, user, number, text, None, Origin("tool"), made)
    return 1
