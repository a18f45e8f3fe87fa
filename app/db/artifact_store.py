"""Artifacts: files that tools made in a chat, in versions, with the media type that their content bears out.

They belong to a chat's run and go with the chat. The document of an MCP app is one too, a version for each call that it
shows. Names and types come from models and strangers: a name is one plain
component, and a type is the one that the name's end claims where the bytes agree, else that of bytes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import Connection, bindparam, cast, func, insert, select

from app.db.chat_store import chat_of
from app.db.connection import row, rows
from app.db.database import Database
from app.db.sqlite import NotThere, Row, new_id
from app.db.tables import BIG, artifacts, chats
from tools.context import APP_TYPE, FileContent
from tools.result import Artifact, Artifacts

MAX_NAME = 120  # characters
MAX_CHAT_FILES = 500  # versions of all names
MAX_CHAT_BYTES = 64 << 20
MAX_USER_BYTES = 1 << 30

BYTES_TYPE = "application/octet-stream"
_TEXT_TYPES = {
    "csv": "text/csv", "tsv": "text/tab-separated-values", "svg": "image/svg+xml", "html": "text/html",
    "htm": "text/html", "json": "application/json", "md": "text/markdown",
    **dict.fromkeys(("txt", "log", "py", "sql", "xml", "yaml", "yml", "toml", "css", "js"), "text/plain"),
}  # fmt: skip
_MAGIC = {  # by the name's end: the type, and how such a file begins
    "png": ("image/png", (b"\x89PNG\r\n\x1a\n",)),
    "jpg": ("image/jpeg", (b"\xff\xd8\xff",)),
    "jpeg": ("image/jpeg", (b"\xff\xd8\xff",)),
    "gif": ("image/gif", (b"GIF87a", b"GIF89a")),
    "webp": ("image/webp", (b"RIFF",)),
    "pdf": ("application/pdf", (b"%PDF-",)),
}

_SHOWN = tuple(column for column in artifacts.c if column.name not in ("content", "digest", "app"))
_OF_USER = (
    select(*_SHOWN)
    .join(chats, chats.c.id == artifacts.c.chat_id)
    .where(chats.c.user == bindparam("user"), chats.c.deleted_at.is_(None))
    .order_by(artifacts.c.created_at, artifacts.c.name, artifacts.c.version)
)
_LATEST = (
    select(*_SHOWN, artifacts.c.digest)
    .where(artifacts.c.chat_id == bindparam("chat"), artifacts.c.name == bindparam("name"))
    .order_by(artifacts.c.version.desc())
    .limit(1)
)
_SIZES = select(func.count(), cast(func.coalesce(func.sum(artifacts.c.size), 0), BIG))
_OF_CHAT = _SIZES.where(artifacts.c.chat_id == bindparam("chat"))
_ALL = _SIZES.join(chats, chats.c.id == artifacts.c.chat_id).where(chats.c.user == bindparam("user"))


def clean_name(name: str) -> str:
    """One component of a path with printable characters: no separator, no beginning with dots, `MAX_NAME` at most."""
    plain = "".join("_" if each in '/\\:*?"<>|' else each for each in name if each.isprintable())
    stem, dot, end = (plain := plain.strip("._ ")).rpartition(".")
    if len(plain) > MAX_NAME:
        plain = f"{stem[: MAX_NAME - len(end) - 1]}.{end}" if dot and len(end) < 10 else plain[:MAX_NAME]
    return plain.strip("._ ") or "file"


def media_type_of(name: str, content: bytes) -> str:
    """The type that the name claims, where the content bears it out: pictures by how they begin, texts as UTF-8."""
    end = name.rpartition(".")[2].lower()
    if end in _MAGIC:
        media_type, beginnings = _MAGIC[end]
        return media_type if content.startswith(beginnings) else BYTES_TYPE
    if (claimed := _TEXT_TYPES.get(end)) is None or b"\0" in content:
        return BYTES_TYPE
    try:
        content.decode()
    except UnicodeDecodeError:
        return BYTES_TYPE
    return claimed


class ArtifactStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def keep(self, chat_id: str, run_id: str, call_id: str, files: Sequence[FileContent]) -> Artifacts:
        """Keeps the files of a call. One with the bytes of its name's newest version is that version.

        A file beyond a limit is refused with a sentence, and so is every file of a chat that is gone.
        """
        return await self._database.read(lambda db: _keep(db, chat_id, run_id, call_id, files))

    async def of(self, user: str, chat_id: str) -> list[Row]:
        """All versions of a chat's artifacts, the oldest first, without their content.

        Raises:
            NotThere: the user has no such chat.
        """

        def found(db: Connection) -> list[Row]:
            chat_of(db, user, chat_id)
            return rows(db, _OF_USER.where(artifacts.c.chat_id == chat_id), user=user)

        return await self._database.read(found)

    async def get(self, user: str, id: str) -> Row:
        """One version, with its `content`, and with `app`, the `AppView` as JSON, where it is an app's document.

        Raises:
            NotThere: the user has no such artifact.
        """
        wanted = _OF_USER.add_columns(artifacts.c.content, artifacts.c.app).where(artifacts.c.id == id)
        found = await self._database.read(lambda db: row(db, wanted, user=user))
        if found is None:
            raise NotThere("artifact", id)
        return found


def _keep(db: Connection, chat_id: str, run_id: str, call_id: str, files: Sequence[FileContent]) -> Artifacts:
    kept, refused = list[Artifact](), list[str]()
    chat = row(db, select(chats).where(chats.c.id == chat_id))
    for file in files:
        name = clean_name(file.name)
        if chat is None:
            refused.append(f"{name} is not kept: its chat is gone.")
            continue
        digest = hashlib.sha256(file.content).hexdigest()
        media_type = media_type_of(name, file.content) if file.app is None else APP_TYPE
        app = None if file.app is None else json.dumps(asdict(file.app), ensure_ascii=False)
        size = len(file.content) + len((app or "").encode())
        latest = row(db, _LATEST, chat=chat_id, name=name)
        if app is None and latest is not None and (latest["digest"], latest["media_type"]) == (digest, media_type):
            kept.append(_artifact(latest))
        elif (why := _full(db, chat, size)) is not None:
            refused.append(f"{name} is not kept: {why}")
        else:
            made = {
                "id": new_id("art"), "name": name, "version": 1 if latest is None else latest["version"] + 1,
                "media_type": media_type, "size": size,
            }  # fmt: skip
            place = {"chat_id": chat_id, "run_id": run_id, "call_id": call_id, "created_at": time.time()}
            db.execute(insert(artifacts).values(**made, **place, digest=digest, content=file.content, app=app))
            kept.append(_artifact(made))
    return Artifacts(tuple(kept), tuple(refused))


def _full(db: Connection, chat: Row, size: int) -> str | None:
    """Returns the limit that a file of `size` bytes would pass, as a sentence; None where there is room."""
    count, used = db.execute(_OF_CHAT, {"chat": chat["id"]}).one()
    if count >= MAX_CHAT_FILES:
        return f"the chat has {MAX_CHAT_FILES} files, the limit; a new chat has room."
    if used + size > MAX_CHAT_BYTES:
        return f"it has {size} bytes, and the chat's files {used} of {MAX_CHAT_BYTES}; a new chat has room."
    _, used = db.execute(_ALL, {"user": chat["user"]}).one()
    if used + size > MAX_USER_BYTES:
        return f"the files of all chats have {used} bytes of {MAX_USER_BYTES}; deleting chats makes room."
    return None


def _artifact(made: Row) -> Artifact:
    return Artifact(made["id"], made["name"], made["version"], made["media_type"], made["size"])
