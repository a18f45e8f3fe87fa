"""The store of everything that the database keeps, with search, deletion and statistics.

Documents and tools have files of their own. Search covers the titles and all messages of a user's chats, in every
branch. It takes plain words, never the index's query language. Triggers (app/db/migrations.py) keep its index, so
deleted text is not found.

A deleted chat or folder is hidden at once, can be restored for `KEPT_S`, and is then erased. Every read elsewhere
leaves out rows with `deleted_at`. A deleted folder still holds its chats, which are shown without a folder meanwhile.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import secrets
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import Connection, Integer, Table, bindparam, case, delete, func, literal_column, select, text, update
from sqlalchemy.exc import IntegrityError

from app.db.artifact_store import ArtifactStore
from app.db.chat_exchange import ChatExchange
from app.db.chat_store import Chats, Folders, chat_of, folder_of
from app.db.connection import row
from app.db.database import Database
from app.db.file_store import Files
from app.db.memory_store import Memory, purge_notes
from app.db.preset_store import Presets, Prompts
from app.db.run_store import LoggedEvent, RunKeys, RunRows
from app.db.share_store import Shares
from app.db.sqlite import NameTaken, NotThere, Row, steady
from app.db.tables import (
    chats,
    events,
    files,
    folders,
    memory_notes,
    memory_users,
    messages,
    preset_members,
    presets,
    prompts,
    responses,
    run_keys,
    runs,
)

_BY_STATUS = select(runs.c.status, func.count().label("runs")).group_by(runs.c.status)
# Runs are never taken out of their order: the newest rows, by SQLite's number, are the newest runs.
_RUNS = (
    select(runs)
    .order_by(literal_column("runs.rowid", Integer).desc())
    .limit(bindparam("limit", type_=Integer))
    .subquery("run")
)
_LAST_EVENT = (
    select(events.c.data).where(events.c.run_id == _RUNS.c.id).order_by(events.c.seq.desc()).limit(1).scalar_subquery()
)
_NEWEST = (
    select(
        _RUNS.c.id, chats.c.user, _RUNS.c.status, _RUNS.c.params, _RUNS.c.created_at, _RUNS.c.ended_at,
        messages.c.ttft_s, messages.c.tokens_per_s, messages.c.usage,
        case((_RUNS.c.status == "failed", _LAST_EVENT)).label("last"),
    )
    .join(chats, chats.c.id == _RUNS.c.chat_id)
    .outerjoin(messages, messages.c.id == _RUNS.c.message_id)
    .order_by(_RUNS.c.created_at.desc())
)  # fmt: skip


class Overview:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def runs_by_status(self) -> dict[str, int]:
        counted = await self._database.rows(_BY_STATUS)
        return {each["status"]: each["runs"] for each in counted}

    async def newest_runs(self, limit: int) -> list[Row]:
        """The newest first; `model` is None for the default one."""
        found = await self._database.rows(_NEWEST, limit=limit)
        for each in found:
            last, usage = each.pop("last"), each.pop("usage")
            each["model"] = json.loads(each.pop("params")).get("model")
            each["error_code"] = json.loads(last).get("code") if last else None
            each["completion_tokens"] = json.loads(usage).get("completion_tokens") if usage else None
        return found


_WORDS = 24  # of a snippet
_MISSPELLED = 4  # letters of a word that may be misspelled
_NEAREST, _NEAR = 5, 0.75  # words that are tried in its place, and how like they are to it at least (0 to 1)
_VOCABULARY = text("CREATE VIRTUAL TABLE IF NOT EXISTS temp.text_words USING fts5vocab(main, text_index, row)")
_ALIKE = text("""SELECT term FROM temp.text_words
    WHERE length(term) BETWEEN :low AND :high AND (substr(term, 1, 2) = :begin OR substr(term, -2) = :end)""")

# SQLite's full-text search; its index is in app/db/migrations/chats.
_SEARCH = text("""
    WITH hits AS MATERIALIZED (SELECT rowid AS id, rank AS score FROM text_index WHERE text_index MATCH :query),
    placed AS (
        SELECT texts.id, chat_id, title, message_id, min(score) OVER (PARTITION BY chat_id) AS best,
            row_number() OVER (PARTITION BY chat_id ORDER BY message_id IS NULL, score, texts.id) AS place
        FROM hits JOIN texts ON texts.id = hits.id JOIN chats ON chats.id = texts.chat_id
        WHERE chats.user = :user AND chats.deleted_at IS NULL),
    shown AS MATERIALIZED (SELECT * FROM placed WHERE place = 1 ORDER BY best, id LIMIT :limit)
    SELECT chat_id, title, message_id, snippet(text_index, 0, :opens, :closes, '…', :words) AS snippet
    FROM shown JOIN text_index ON text_index.rowid = shown.id
    WHERE text_index MATCH :query ORDER BY best, id""")


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
        """The best first. A text fits that has all the words; the last may be the beginning of one. Where none has, one
        fits that has words near to them."""
        words = [_quoted(word) for word in _words(text)]
        if not words:
            return []
        return await self._found(user, f"{' '.join(words)}*", limit) or await self._near(user, text, limit)

    async def _near(self, user: str, text: str, limit: int) -> list[FoundChat]:
        """Finds texts with words that are spelled nearly so. The index has the words of all users; what is found is
        the user's."""
        words = [word.casefold() for word in _words(text) if any(map(str.isalnum, word))]

        def known(db: Connection) -> list[list[str]]:
            db.execute(_VOCABULARY)
            return [_spelled_alike(db, word) if len(word) >= _MISSPELLED else [] for word in words]

        nearest = await asyncio.to_thread(_nearest, words, await self._database.read(known))
        if not any(nearest):
            return []
        wanted = ([word, *others] for word, others in zip(words, nearest, strict=True))
        return await self._found(user, " AND ".join(f"({' OR '.join(map(_quoted, each))})" for each in wanted), limit)

    async def _found(self, user: str, query: str, limit: int) -> list[FoundChat]:
        # Marks that no text can have, as nobody knew them before.
        opens, closes = f"<{secrets.token_hex(8)}>", f"<{secrets.token_hex(8)}>"
        found = await self._database.rows(
            _SEARCH, query=query, user=user, limit=limit, opens=opens, closes=closes, words=_WORDS
        )
        return [
            FoundChat(each["chat_id"], each["title"], each["message_id"], *_marked(each["snippet"], opens, closes))
            for each in found
        ]


def _words(text: str) -> list[str]:
    """Returns the words of a text. A control character, which would end a quotation, is a space."""
    return "".join(letter if letter.isprintable() else " " for letter in text).split()


def _quoted(word: str) -> str:
    """Returns a word as the index's language quotes it."""
    return '"{}"'.format(word.replace('"', '""'))


def _spelled_alike(db: Connection, word: str) -> list[str]:
    """Returns the index's words of about the length of `word` that begin or end as it does."""
    ends = {"begin": word[:2], "end": word[-2:], "low": len(word) - 2, "high": len(word) + 2}
    return list(db.scalars(_ALIKE, ends))


def _nearest(words: list[str], known: list[list[str]]) -> list[list[str]]:
    """Returns of each word the known ones that differ from it by a slip or two."""
    return [
        [each for each in difflib.get_close_matches(word, others, _NEAREST, _NEAR) if each != word]
        for word, others in zip(words, known, strict=True)
    ]


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
SWEEP_S = 3600.0

Kind = Literal["chat", "folder"]
_FIND: dict[Kind, Callable[[Connection, str, str], object]] = {"chat": chat_of, "folder": folder_of}
_TABLES: dict[Kind, Table] = {"chat": chats, "folder": folders}


class Deleted:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._more = asyncio.Event()  # something was deleted

    async def delete(self, kind: Kind, user: str, id: str) -> float:
        """Hide it; until when it may come back, in seconds since the epoch.

        Raises:
            NotThere: the user has no such thing, or no longer.
        """

        def delete(db: Connection) -> float:
            _FIND[kind](db, user, id)
            table, now = _TABLES[kind], steady()
            db.execute(update(table).where(table.c.id == id).values(deleted_at=now))
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

        def restore(db: Connection) -> None:
            found = row(db, select(table).where(table.c.user == user, table.c.id == id))
            if found is None or (found["deleted_at"] is not None and found["deleted_at"] <= steady() - KEPT_S):
                raise NotThere(kind, id)
            try:
                db.execute(update(table).where(table.c.id == id).values(deleted_at=None))
            except IntegrityError:
                raise NameTaken(f"There is a folder {found['name']!r:.60} by now; rename or delete that one.") from None

        await self._database.read(restore)

    async def purge(self, kept_s: float = KEPT_S) -> float | None:
        """Erase what was deleted that long ago, with all that belongs to it; in how many seconds more will be due."""

        def purge(db: Connection) -> float | None:
            now, left = steady(), list[float]()
            due = select(chats.c.id).where(chats.c.deleted_at <= now - kept_s)
            purge_notes(db, db.scalars(due).all())
            for table in _TABLES.values():
                db.execute(delete(table).where(table.c.deleted_at <= now - kept_s))
                oldest: float | None = db.scalar(select(func.min(table.c.deleted_at)))
                left += [] if oldest is None else [max(0.0, oldest + kept_s - now)]
            return min(left, default=None)

        return await self._database.read(purge)

    async def purge_when_due(self, kept_s: float = KEPT_S, swept: Callable[[], Awaitable[None]] | None = None) -> None:
        """Erase, for ever, what may not come back any more. It sleeps meanwhile. `swept` is called after each time, and
        at least every `SWEEP_S`, to erase elsewhere what belonged to it."""
        while True:
            self._more.clear()
            try:
                due_s = await self.purge(kept_s)
                if swept is not None:
                    await swept()
                    due_s = SWEEP_S if due_s is None else min(due_s, SWEEP_S)
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
        self.presets = Presets(database)
        self.prompts = Prompts(database)
        self.runs = RunRows(database)
        self.run_keys = RunKeys(database)
        self.overview = Overview(database)
        self.memory = Memory(database)
        self.shares = Shares(database)
        self.files = Files(database)
        self.artifacts = ArtifactStore(database)

    @classmethod
    async def open(cls, data_dir: Path) -> Store:
        """
        Raises:
            BadSetting: the directory cannot be used; the message says why.
        """
        return cls(await Database.open(data_dir))

    async def delete_user(self, user: str) -> tuple[int, list[str]]:
        """Erases a user's chats, folders and stored responses at once, also what could still be restored.

        Returns how many chats they were, and the ids of their runs.
        """

        def erase(db: Connection) -> tuple[int, list[str]]:
            theirs = select(chats.c.id).where(chats.c.user == user)
            erased = list(db.scalars(select(runs.c.id).where(runs.c.chat_id.in_(theirs))))
            count = db.execute(delete(chats).where(chats.c.user == user)).rowcount
            for table in (
                files,
                folders,
                responses,
                run_keys,
                presets,
                preset_members,
                prompts,
                memory_notes,
                memory_users,
            ):
                db.execute(delete(table).where(table.c.user == user))
            return count, erased

        return await self.database.erase(erase)

    async def close(self) -> None:
        """Finish every write, then let go of the directory. Idempotent."""
        await self.database.close()
