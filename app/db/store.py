"""The store of everything that the database keeps, with search, deletion and statistics.

Documents and tools have files of their own. Search covers the titles and all messages of a user's chats, in every
branch. It takes plain words, never the index's query language. Triggers (app/db/migrations.py) keep its index, so
deleted text is not found.

A deleted chat or folder is hidden at once, can be restored for `KEPT_S`, and is then erased. Every read elsewhere
leaves out rows with `deleted_at`. A deleted folder still holds its chats, which are shown without a folder meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.db.chat_exchange import ChatExchange
from app.db.chat_store import Chats, Folders, chat_of, folder_of
from app.db.run_store import LoggedEvent, RunKeys, RunRows
from app.db.sqlite import Database, NameTaken, NotThere, Row, row, steady

# Runs are never taken out of their order: the newest rows are the newest runs.
_NEWEST = """
SELECT runs.id, chats.user, runs.status, runs.params, runs.created_at, runs.ended_at, messages.ttft_s,
    messages.tokens_per_s, messages.usage,
    CASE runs.status WHEN 'failed' THEN (
        SELECT data FROM events WHERE events.run_id = runs.id ORDER BY seq DESC LIMIT 1) END AS last
FROM (SELECT * FROM runs ORDER BY rowid DESC LIMIT ?) AS runs
JOIN chats ON chats.id = runs.chat_id LEFT JOIN messages ON messages.id = runs.message_id
ORDER BY runs.created_at DESC
"""


class Overview:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def runs_by_status(self) -> dict[str, int]:
        counted = await self._database.rows("SELECT status, count(*) AS runs FROM runs GROUP BY status")
        return {each["status"]: each["runs"] for each in counted}

    async def newest_runs(self, limit: int) -> list[Row]:
        """The newest first; `model` is None for the default one."""
        found = await self._database.rows(_NEWEST, limit)
        for each in found:
            last, usage = each.pop("last"), each.pop("usage")
            each["model"] = json.loads(each.pop("params")).get("model")
            each["error_code"] = json.loads(last).get("code") if last else None
            each["completion_tokens"] = json.loads(usage).get("completion_tokens") if usage else None
        return found


_WORDS = 24  # of a snippet

_SEARCH = """
    WITH hits AS MATERIALIZED (SELECT rowid AS id, rank AS score FROM text_index WHERE text_index MATCH ?1),
    placed AS (
        SELECT texts.id, chat_id, title, message_id, min(score) OVER (PARTITION BY chat_id) AS best,
            row_number() OVER (PARTITION BY chat_id ORDER BY message_id IS NULL, score, texts.id) AS place
        FROM hits JOIN texts ON texts.id = hits.id JOIN chats ON chats.id = texts.chat_id
        WHERE chats.user = ?2 AND chats.deleted_at IS NULL),
    shown AS MATERIALIZED (SELECT * FROM placed WHERE place = 1 ORDER BY best, id LIMIT ?3)
    SELECT chat_id, title, message_id, snippet(text_index, 0, ?4, ?5, '…', ?6) AS snippet
    FROM shown JOIN text_index ON text_index.rowid = shown.id
    WHERE text_index MATCH ?1 ORDER BY best, id"""


@dataclass(frozen=True, slots=True)
class FoundChat:
    """A chat and the message of it that fits best; its title, with `message_id` None, where no message fits.

    `marks`: the places in the snippet, as characters `start` to `end`, that were searched for.
    """

    chat_id: str
    title: str
    message_id: str | None
    snippet: str
    marks: list[tuple[int, int]]


class ChatSearch:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, user: str, text: str, limit: int) -> list[FoundChat]:
        """The best first. A text fits that has all the words; the last may be the beginning of one."""
        query = _query(text)
        if not query:
            return []
        # Marks that no text can have, as nobody knew them before.
        opens, closes = f"<{secrets.token_hex(8)}>", f"<{secrets.token_hex(8)}>"
        found = await self._database.rows(_SEARCH, query, user, limit, opens, closes, _WORDS)
        return [
            FoundChat(each["chat_id"], each["title"], each["message_id"], *_marked(each["snippet"], opens, closes))
            for each in found
        ]


def _query(text: str) -> str:
    """Words as the index's language quotes them. A control character, which would end a quotation, is a space."""
    words = "".join(letter if letter.isprintable() else " " for letter in text).split()
    quoted = ['"{}"'.format(word.replace('"', '""')) for word in words]
    return f"{' '.join(quoted)}*" if quoted else ""


def _marked(snippet: str, opens: str, closes: str) -> tuple[str, list[tuple[int, int]]]:
    plain, marks = "", list[tuple[int, int]]()
    before, *parts = snippet.split(opens)
    plain = before
    for part in parts:
        inside, _, after = part.partition(closes)
        marks.append((len(plain), len(plain) + len(inside)))
        plain += inside + after
    return plain, marks


log = logging.getLogger("ponder")

KEPT_S = 600.0

Kind = Literal["chat", "folder"]
_FIND: dict[Kind, Callable[[sqlite3.Connection, str, str], object]] = {"chat": chat_of, "folder": folder_of}
_TABLES: dict[Kind, str] = {"chat": "chats", "folder": "folders"}


class Deleted:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._more = asyncio.Event()  # something was deleted

    async def delete(self, kind: Kind, user: str, id: str) -> float:
        """Hide it; until when it may come back, in seconds since the epoch.

        Raises:
            NotThere: the user has no such thing, or no longer.
        """

        def delete(db: sqlite3.Connection) -> float:
            _FIND[kind](db, user, id)
            now = steady()
            db.execute(f"UPDATE {_TABLES[kind]} SET deleted_at = ? WHERE id = ?", [now, id])
            return now + KEPT_S

        until = await self._database.read(delete)
        self._more.set()
        return until

    async def restore(self, kind: Kind, user: str, id: str) -> None:
        """Take it back to where it was; what is not deleted stays as it is.

        Raises:
            NotThere: the user has no such thing, or it was deleted too long ago.
            NameTaken: another folder has its name by now.
        """
        table = _TABLES[kind]

        def restore(db: sqlite3.Connection) -> None:
            found = row(db, f"SELECT * FROM {table} WHERE user = ? AND id = ?", user, id)
            if found is None or (found["deleted_at"] is not None and found["deleted_at"] <= steady() - KEPT_S):
                raise NotThere(kind, id)
            try:
                db.execute(f"UPDATE {table} SET deleted_at = NULL WHERE id = ?", [id])
            except sqlite3.IntegrityError:
                raise NameTaken(f"There is a folder {found['name']!r:.60} by now; rename or delete that one.") from None

        await self._database.read(restore)

    async def purge(self, kept_s: float = KEPT_S) -> float | None:
        """Erase what was deleted that long ago, with all that belongs to it; in how many seconds more will be due."""

        def purge(db: sqlite3.Connection) -> float | None:
            now, left = steady(), list[float]()
            for table in _TABLES.values():
                db.execute(f"DELETE FROM {table} WHERE deleted_at <= ?", [now - kept_s])
                (oldest,) = db.execute(f"SELECT min(deleted_at) FROM {table}").fetchone()
                left += [] if oldest is None else [max(0.0, oldest + kept_s - now)]
            return min(left, default=None)

        return await self._database.read(purge)

    async def purge_when_due(self, kept_s: float = KEPT_S) -> None:
        """Erase, for ever, what may not come back any more. It sleeps meanwhile."""
        while True:
            self._more.clear()
            try:
                due_s = await self.purge(kept_s)
            except sqlite3.Error as error:  # a full disk, say
                log.error("what was deleted cannot be erased yet: %s", error)
                due_s = kept_s
            with suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), due_s)


__all__ = ["LoggedEvent", "Store"]


class Store:
    """The data of one directory, which one process at a time may have open."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.chats = Chats(database)
        self.folders = Folders(database)
        self.deleted = Deleted(database)
        self.search = ChatSearch(database)
        self.exchange = ChatExchange(database)
        self.runs = RunRows(database)
        self.run_keys = RunKeys(database)
        self.overview = Overview(database)

    @classmethod
    async def open(cls, data_dir: Path) -> Store:
        """
        Raises:
            BadSetting: the directory cannot be used; the message says why.
        """
        return cls(await Database.open(data_dir))

    async def close(self) -> None:
        """Finish every write, then let go of the directory. Idempotent."""
        await self.database.close()
