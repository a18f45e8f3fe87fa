"""Chats as a file: all that is kept of them but runs' events, and back again, to the same but for new ids.

A file may come from anywhere, so all of it is checked before anything is kept, and an imported chat is remembered as
such: its words, and the results in it, may be by others. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue
from sqlalchemy import Connection, and_, bindparam, select

from app.db.answer_steps import AnswerStep, check_steps, dump_steps
from app.db.chat_store import CHAT_NUMBER, FOLDER_NAMED, add_folder, chat_of, load_settings, messages_of
from app.db.connection import insert, row, rows
from app.db.database import Database
from app.db.file_store import MAX_FILES, SentFile
from app.db.memory_store import MAX_NOTE, MAX_NOTES, ImportedNote, MemoryFull, all_notes, import_note
from app.db.sqlite import Row, new_id
from app.db.tables import chats, folders, messages

FORMAT, VERSION = "ponder.chats", 1
MAX_TITLE = 200
MAX_FOLDER = 100
MAX_MODEL_NAME = 500

Moment = Annotated[float, Field(ge=0, le=1e11)]  # seconds since the epoch
Measure = Annotated[float, Field(ge=0)]
MAX_IMAGES = 16  # of a question, and of a request
Picture = Annotated[str, Field(pattern=r"^data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]


class BadChats(ValueError):
    """A file of chats is not sound; `path` names the place."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path} {message}")
        self.path = path


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class ExportedUsage(_Part):
    prompt_tokens: Count
    completion_tokens: Count
    reasoning_tokens: Count
    cached_tokens: Count
    forgotten_tokens: Count = 0
    seen_from: str | None = Field(None, max_length=200)  # the id of a message


class ExportedFile(_Part):
    """A file that a question was sent with: its name and size, and none of what is in it."""

    name: str = Field(min_length=1, max_length=255)
    bytes: Count


class ExportedMessage(_Part):
    """`id` and `parent_id` count in their chat alone; a parent stands before its children.

    `grounded`: an answer was made from documents. Where a file does not say, it may be.
    """

    id: str = Field(min_length=1, max_length=200)
    parent_id: str | None
    role: Literal["user", "assistant"]
    content: str
    thinking: str = ""
    thinking_s: Measure | None = None
    ttft_s: Measure | None = None
    tokens_per_s: Measure | None = None
    usage: ExportedUsage | None = None
    model: str | None = Field(None, min_length=1, max_length=MAX_MODEL_NAME)
    steps: Annotated[list[AnswerStep], Field(max_length=1000)] = []
    status: Literal["completed", "failed", "cancelled"] = "completed"
    error: str | None = None
    grounded: bool = True
    images: Annotated[list[Picture], Field(max_length=MAX_IMAGES)] = []  # of a question
    files: Annotated[list[ExportedFile], Field(max_length=MAX_FILES)] = []  # of a question
    created_at: Moment


class ExportedChat(_Part):
    """`settings`: checked as those of a chat are, by who knows their fields."""

    title: str = Field(max_length=MAX_TITLE)
    created_at: Moment
    updated_at: Moment
    pinned: bool = False
    private: bool = False
    settings: dict[str, JsonValue] | None = None
    folder: str | None = Field(None, min_length=1, max_length=MAX_FOLDER)
    leaf_id: str | None
    messages: Annotated[list[ExportedMessage], FailFast()]


class ExportedText(_Part):
    """A note's earlier text, as it was until it was changed."""

    text: str = Field(min_length=1, max_length=MAX_NOTE)
    source: Literal["stated", "tool", "user"] = "user"
    changed_at: Moment


class ExportedNote(ExportedText):
    """A note of memory, without the chat that it came from; the newest of its earlier texts first."""

    attribute: str | None = Field(None, max_length=200)
    created_at: Moment
    earlier: Annotated[list[ExportedText], Field(max_length=1000)] = []


class Export(_Part):
    """The file. `notes`: of memory, in a file of all chats, where there are some."""

    format: Literal["ponder.chats"] = Field(description='"ponder.chats"')
    version: Literal[1] = Field(description="1")
    chats: Annotated[list[ExportedChat], FailFast()] = Field(
        description="a list of chats as GET /api/chats/export gives them"
    )
    notes: Annotated[list[ExportedNote], Field(max_length=MAX_NOTES), FailFast()] = []


_CHATS = (
    select(chats, folders.c.name.label("folder"))
    .outerjoin(folders, and_(folders.c.id == chats.c.folder_id, folders.c.deleted_at.is_(None)))
    .where(chats.c.user == bindparam("user"), chats.c.deleted_at.is_(None))
    .order_by(chats.c.created_at, CHAT_NUMBER)
)


class Imported(NamedTuple):
    """Ids of the chats that a file has brought, and of those that were there already, by their place in the file."""

    new: list[str]
    known: dict[int, str]


class ChatExchange:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def export(self, user: str, chat_id: str | None = None) -> Row:
        """One chat or all of them, as JSON values; the oldest first.

        Raises:
            NotThere: the user has no such chat.
        """

        def read(db: Connection) -> Row:
            wanted = _CHATS
            if chat_id is not None:
                chat_of(db, user, chat_id)
                wanted = _CHATS.where(chats.c.id == chat_id)
            found = [_exported(chat, messages_of(db, chat["id"])) for chat in rows(db, wanted, user=user)]
            made = {"format": FORMAT, "version": VERSION, "chats": found}
            notes = [] if chat_id is not None else [*map(_exported_note, all_notes(db, user))]
            return {**made, "notes": notes} if notes else made

        return await self._database.read(read)

    async def add(self, user: str, export: Export) -> Imported:
        """Keeps the chats that the user does not have yet: all of them, or none where the file is not sound.

        A chat is known by when it was begun and by what was said in it, whether it was made here or came in a file; its
        title, its folder and its settings do not count. One that was gone on with since is another: both are kept.

        Raises:
            BadChats: the messages of a chat are no tree, or their steps do not fit together; or memory has no room for
                the notes.
        """
        await asyncio.to_thread(_check_all, export)

        def add(db: Connection) -> Imported:
            for at, note in enumerate(export.notes):
                try:
                    import_note(db, user, ImportedNote(**note.model_dump()))
                except MemoryFull as error:
                    raise BadChats(f"notes[{at}]", f"does not fit: {error}") from None
            made, known, there = list[str](), dict[int, str](), _KnownChats(db, user)
            for at, chat in enumerate(export.chats):
                begun = there.begun_at(chat.created_at)
                digest = _digest([message.model_dump() for message in chat.messages])
                if digest in begun:
                    known[at] = begun[digest]
                else:
                    made.append(_add(db, user, chat))
                    begun[digest] = made[-1]
            return Imported(made, known)

        return await self._database.read(add)


def _exported(chat: Row, messages: list[Row]) -> Row:
    kept = {name: chat[name] for name in ExportedChat.model_fields if name != "messages"}
    kept |= {name: bool(chat[name]) for name in ("pinned", "private")}
    kept["settings"] = load_settings(chat["settings"])
    return {**kept, "messages": [_exported_message(each) for each in messages]}


def _exported_note(note: Row) -> Row:
    earlier = [{name: each[name] for name in ExportedText.model_fields} for each in note["earlier"]]
    return {**{name: note[name] for name in ExportedNote.model_fields if name != "earlier"}, "earlier": earlier}


def _exported_message(message: Row) -> Row:
    made = {name: message[name] for name in ExportedMessage.model_fields}
    made["steps"] = [step.model_dump() for step in message["steps"]]
    made["grounded"] = bool(message["grounded"])
    made["files"] = [{"name": each["name"], "bytes": each["bytes"]} for each in message["files"]]
    if message["status"] == "running":  # in a file it will never go on
        made["status"] = "cancelled"
    return made


def _check_all(export: Export) -> None:
    for at, chat in enumerate(export.chats):
        _check(chat, f"chats[{at}]")


def _check(chat: ExportedChat, path: str) -> None:
    known: dict[str, str] = {}  # id -> role
    parents = set[str | None]()
    for at, message in enumerate(chat.messages):
        where = f"{path}.messages[{at}]"
        if message.id in known:
            raise BadChats(f"{where}.id", f"is {message.id!r:.60}, as before; accepted: an id of its own.")
        if message.parent_id is not None and message.parent_id not in known:
            accepted = "null, or the id of a message before it"
            raise BadChats(f"{where}.parent_id", f"is {message.parent_id!r:.60}; accepted: {accepted}.")
        follows = None if message.parent_id is None else known[message.parent_id]
        if (message.role == "user") == (follows == "user"):
            after = "at a beginning" if follows is None else f"after a message of role {follows!r}"
            raise BadChats(f"{where}.role", f"is {message.role!r} {after}; accepted: questions and answers in turn.")
        for name in ("images", "files"):
            if message.role == "assistant" and getattr(message, name):
                raise BadChats(f"{where}.{name}", "are of an answer; accepted: in questions.")
        if message.role == "user" and (message.steps or not message.content.strip()):
            raise BadChats(where, "is a question with steps or without content; accepted: content alone.")
        try:
            check_steps(message.steps)
        except ValueError as error:
            raise BadChats(f"{where}.steps", f"do not fit together; accepted: {error}.") from None
        known[message.id] = message.role
        parents.add(message.parent_id)
    if chat.leaf_id is None and not known:
        return
    if chat.leaf_id not in known or chat.leaf_id in parents:
        accepted = "the id of a message that none follows" if known else "null, as there are no messages"
        raise BadChats(f"{path}.leaf_id", f"is {chat.leaf_id!r:.60}; accepted: {accepted}.")


def _add(db: Connection, user: str, chat: ExportedChat) -> str:
    chat_id = new_id("chat")
    ids: dict[str | None, str | None] = {message.id: new_id("msg") for message in chat.messages}
    ids[None] = None
    insert(
        db, chats,
        {
            "id": chat_id, "user": user, "title": chat.title, "created_at": chat.created_at,
            "updated_at": chat.updated_at, "pinned": chat.pinned, "private": chat.private, "imported": True,
            "leaf_id": ids[chat.leaf_id],
            "settings": None if chat.settings is None else json.dumps(chat.settings),
            "folder_id": None if chat.folder is None else _folder(db, user, chat.folder),
        },
    )  # fmt: skip
    for position, message in enumerate(chat.messages, 1):
        values: dict[str, Any] = message.model_dump(exclude={"steps", "usage", "images", "files"})  # Any: columns
        values["images"] = json.dumps(message.images) if message.images else None
        sent = [SentFile(name=each.name, bytes=each.bytes).model_dump() for each in message.files]
        values["files"] = json.dumps(sent) if sent else None
        values |= {"id": ids[message.id], "parent_id": ids[message.parent_id]}
        values |= {"chat_id": chat_id, "position": position, "steps": dump_steps(message.steps)}
        values["grounded"] = message.grounded and message.role == "assistant"
        if (used := message.usage) is not None:
            used = used.model_copy(update={"seen_from": ids.get(used.seen_from)})
        values["usage"] = None if used is None else used.model_dump_json()
        insert(db, messages, values)
    return chat_id


_BEGUN = select(chats.c.id).where(
    chats.c.user == bindparam("user"), chats.c.created_at == bindparam("at"), chats.c.deleted_at.is_(None)
)


class _KnownChats:
    """A user's chats by when they were begun and by what was said in them. Reads each once."""

    def __init__(self, db: Connection, user: str) -> None:
        self._db = db
        self._user = user
        self._begun: dict[float, dict[str, str]] = {}

    def begun_at(self, moment: float) -> dict[str, str]:
        """Returns the ids of those that were begun then, by the digests of their messages."""
        if moment not in self._begun:
            self._begun[moment] = found = dict[str, str]()
            for chat in rows(self._db, _BEGUN.order_by(CHAT_NUMBER), user=self._user, at=moment):
                said = [_exported_message(message) for message in messages_of(self._db, chat["id"])]
                found.setdefault(_digest(said), str(chat["id"]))
        return self._begun[moment]


def _digest(said: Sequence[Row]) -> str:
    """Returns a digest of what makes messages the same, whatever their ids are."""
    places = {message["id"]: at for at, message in enumerate(said)}
    same = ("role", "content", "thinking", "steps", "images", "files", "created_at")
    digest = hashlib.sha256()
    for each in said:  # one by one: encoding all at once keeps the interpreter from others
        values = (places.get(each["parent_id"]), *(each[name] for name in same))
        digest.update(json.dumps(values, sort_keys=True).encode())
    return digest.hexdigest()


def _folder(db: Connection, user: str, name: str) -> str:
    found = row(db, FOLDER_NAMED, user=user, name=name)
    return str((found or add_folder(db, user, name))["id"])
