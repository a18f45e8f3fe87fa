"""Keeps notes for a user between chats, and finds them again by their words: in one SQLite file, or in a host's store.

The notes of a user are never seen by another. Numbers count for each user from 1 and are not given twice.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field

from ponder import Context, Retry, Toolset, tool

MAX_NOTES = 500  # of one user
MAX_NOTE_LENGTH = 2000  # characters
_LAYOUT = """
CREATE TABLE IF NOT EXISTS note(
    id INTEGER PRIMARY KEY, user TEXT NOT NULL, number INTEGER NOT NULL, text TEXT NOT NULL,
    made TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now')), UNIQUE (user, number), UNIQUE (user, text));
CREATE TABLE IF NOT EXISTS counter(user TEXT PRIMARY KEY, number INTEGER NOT NULL);
CREATE VIRTUAL TABLE IF NOT EXISTS note_words USING fts5(text, content='note', content_rowid='id',
    tokenize="unicode61 remove_diacritics 2");
CREATE TRIGGER IF NOT EXISTS note_kept AFTER INSERT ON note BEGIN
    INSERT INTO note_words(rowid, text) VALUES (new.id, new.text);
END;
CREATE TRIGGER IF NOT EXISTS note_forgotten AFTER DELETE ON note BEGIN
    INSERT INTO note_words(note_words, rowid, text) VALUES ('delete', old.id, old.text);
END;
"""


class NoteError(Exception):
    """A note cannot be kept or found; the message says why."""


@dataclass(frozen=True, slots=True)
class Note:
    """`made`: when, in UTC. `replaced`: the text that it has just taken the place of."""

    number: int
    text: str
    made: str
    replaced: str | None = None


class NoteStore(Protocol):
    """A host's notes. Called in threads. `chat`: the chat that a call comes from. All raise `NoteError`."""

    def remember(self, user: str, text: str, chat: str | None) -> Note: ...

    def recall(self, user: str, words: str, count: int, chat: str | None) -> list[Note]: ...

    def forget(self, user: str, number: int, chat: str | None) -> Note: ...

    def all(self, user: str, chat: str | None) -> list[Note]: ...


class Notebook:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with self._open() as connection:
            connection.executescript(f"PRAGMA journal_mode = WAL; {_LAYOUT}")

    def remember(self, user: str, text: str, chat: str | None = None) -> Note:
        """Keeps a note; the same text again is the same note.

        Raises:
            NoteError: it is empty, too long, or one too many.
        """
        text = text.replace("\0", "").strip()
        if not 0 < len(text) <= MAX_NOTE_LENGTH:
            raise NoteError(f"A note has 1 to {MAX_NOTE_LENGTH:,} characters; this one has {len(text):,}.")
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            if not (kept := self._notes(connection, "user = ? AND text = ?", (user, text))):
                (count,) = connection.execute("SELECT count(*) FROM note WHERE user = ?", (user,)).fetchone()
                if count >= MAX_NOTES:
                    raise NoteError(f"There are {count} notes already, which is the limit; forget one first.")
                connection.execute(
                    "INSERT INTO counter VALUES (?, 1) ON CONFLICT (user) DO UPDATE SET number = number + 1", (user,)
                )
                (number,) = connection.execute("SELECT number FROM counter WHERE user = ?", (user,)).fetchone()
                connection.execute("INSERT INTO note(user, number, text) VALUES (?, ?, ?)", (user, number, text))
                kept = self._notes(connection, "user = ? AND number = ?", (user, number))
            return kept[0]

    def recall(self, user: str, words: str, count: int = 5, chat: str | None = None) -> list[Note]:
        """Notes with any of the words, those first that have more of them."""
        terms = [f'"{word}"' for word in re.findall(r"\w+", words)[:30]]
        if not terms:
            return []
        with self._open() as connection:
            rows = connection.execute(
                "SELECT number, note.text, made FROM note_words JOIN note ON note.id = note_words.rowid "
                "WHERE note_words MATCH ? AND user = ? ORDER BY rank, number DESC LIMIT ?",
                (" OR ".join(terms), user, count),
            )
            return [Note(*row) for row in rows]

    def forget(self, user: str, number: int, chat: str | None = None) -> Note:
        """
        Raises:
            NoteError: the user has no note of that number.
        """
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            found = self._notes(connection, "user = ? AND number = ?", (user, number))
            if not found:
                raise NoteError(f"There is no note {number}; list_notes tells which there are.")
            connection.execute("DELETE FROM note WHERE user = ? AND number = ?", (user, number))
            # The index only marks words as deleted until its parts are merged.
            connection.execute("INSERT INTO note_words(note_words) VALUES ('optimize')")
            return found[0]

    def all(self, user: str, chat: str | None = None) -> list[Note]:
        """The newest first."""
        with self._open() as connection:
            return self._notes(connection, "user = ? ORDER BY number DESC", (user,))

    @staticmethod
    def _notes(connection: sqlite3.Connection, where: str, values: tuple[str | int, ...]) -> list[Note]:
        return [Note(*row) for row in connection.execute(f"SELECT number, text, made FROM note WHERE {where}", values)]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Opens a connection; its transaction is committed at the end, or rolled back after an exception."""
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=10.0)
        try:
            connection.execute("PRAGMA synchronous = FULL")  # a note that was kept survives the loss of power
            connection.execute("PRAGMA secure_delete = ON")  # forgotten notes do not stay in the file
            yield connection
            if connection.in_transaction:
                connection.execute("COMMIT")
        finally:
            connection.close()


class Notes(Toolset):
    """Tools over a store of notes, or over one file of them; each call sees the notes of its user alone."""

    def __init__(self, store: NoteStore | Path | str) -> None:
        self._store = store

    async def open(self) -> None:
        store = self._store
        self.book: NoteStore
        if isinstance(store, str | Path):
            self.book = await asyncio.to_thread(Notebook, store)
        else:
            self.book = store

    @tool(permission="write", approval="never", timeout=10, rate="30/min", idempotent=True)
    def remember(self, ctx: Context, text: Annotated[str, Field(min_length=1, max_length=2000)]) -> str:
        """Keep a note about the user or their work for later chats.

        Args:
            text: one fact, in a sentence that is understood without this chat.
        """
        try:
            note = self.book.remember(ctx.user, text, ctx.chat)
        except NoteError as error:
            raise Retry(str(error)) from None
        return f"Kept as note {note.number}." + ("" if note.replaced is None else f" It replaces: {note.replaced}")

    @tool(permission="read", timeout=10, rate="60/min")
    def recall(self, ctx: Context, words: str, count: Annotated[int, Field(ge=1, le=20)] = 5) -> str:
        """Find notes of earlier chats by their words.

        Args:
            words: words that the note may have.
            count: how many notes at most.
        """
        try:
            return _listed(self.book.recall(ctx.user, words, count, ctx.chat)) or "No note has any of these words."
        except NoteError as error:
            raise Retry(str(error)) from None

    @tool(permission="write", timeout=10, rate="30/min")
    def forget(self, ctx: Context, number: int) -> str:
        """Delete a note.

        Args:
            number: its number, as recall and list_notes show it.
        """
        try:
            return f"Forgotten: {self.book.forget(ctx.user, number, ctx.chat).text}"
        except NoteError as error:
            raise Retry(str(error)) from None

    @tool(permission="read", timeout=10, rate="60/min")
    def list_notes(self, ctx: Context) -> str:
        """List all notes that are kept for the user, the newest first."""
        try:
            return _listed(self.book.all(ctx.user, ctx.chat)) or "There are no notes."
        except NoteError as error:
            raise Retry(str(error)) from None


def _listed(notes: Iterable[Note]) -> str:
    return "\n".join(f"{note.number}. {note.text} ({note.made[:10]})" for note in notes)
