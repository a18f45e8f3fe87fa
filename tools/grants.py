"""A person's grants and lasting answers, kept for as long as they are valid.

A grant is plain data, with the words that the person read when they answered. `MemoryGrants` ends with its process;
`SqliteGrants` is a file that several processes may share, and every change is on the disk before anybody acts on it.
Knows nothing of a grant's effect on a call: the policy does.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

from tools.options import PERMISSIONS, Permission

_SCHEMA = """
CREATE TABLE IF NOT EXISTS classes (user TEXT NOT NULL, chat TEXT, classes TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS classes_of ON classes (user, chat);
CREATE TABLE IF NOT EXISTS grants (
    id TEXT PRIMARY KEY, user TEXT NOT NULL, tool TEXT NOT NULL, origin TEXT NOT NULL, grant_json TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS grants_of ON grants (user, tool, origin);
"""


@dataclass(frozen=True, slots=True)
class Grant:
    """A remembered answer. None is any: any chat of the user, any arguments. Times are seconds since the epoch.

    `definition` is the tool as it was when the answer was given, as a hash; `preview` is the text the person read.
    """

    user: str
    tool: str
    origin: str
    allow: bool
    chat: str | None = None
    arguments_hash: str | None = None
    expires_at: float | None = None
    definition: str = ""
    preview: str = ""
    given_at: float = 0.0

    @property
    def id(self) -> str:
        """Returns its subject as a hash: a grant replaces the one of the same id."""
        about = json.dumps([self.user, self.chat, self.tool, self.origin, self.arguments_hash])
        return hashlib.sha256(about.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Grants(Protocol):
    """A store of grants. Every method may block, and may come from any thread."""

    def classes(self, user: str, chat: str | None) -> frozenset[Permission] | None:
        """The classes granted to a user (`chat` None) or in a chat of theirs; None where nothing was set."""

    def chats(self, user: str) -> Mapping[str, frozenset[Permission]]:
        """The chats of a user for which classes were set."""

    def set_classes(self, user: str, classes: Collection[Permission], *, chat: str | None = None) -> None:
        """Sets a user's permissions, or those in one chat.

        Raises:
            ValueError: a class that there is not.
        """

    def unset_classes(self, user: str, *, chat: str | None = None) -> None:
        """From now on it is as if nothing had been set."""

    def of(self, user: str, tool: str, origin: str) -> Sequence[Grant]:
        """The user's grants about a tool, expired ones included."""

    def of_user(self, user: str) -> Sequence[Grant]:
        """All of the user's grants, expired ones included, by the names of tools."""

    def put(self, grant: Grant) -> None:
        """Keeps a grant, in place of the one of the same id."""

    def withdraw(self, grant: Grant) -> None:
        """Forgets a grant; one that is not there is forgotten already."""

    def forget_user(self, user: str) -> None:
        """Forgets the user's grants and classes, those of chats too."""


class MemoryGrants:
    """Grants that last as long as the process."""

    def __init__(self) -> None:
        self._classes = dict[tuple[str, str | None], frozenset[Permission]]()
        self._grants = dict[str, Grant]()

    def classes(self, user: str, chat: str | None) -> frozenset[Permission] | None:
        return self._classes.get((user, chat))

    def chats(self, user: str) -> dict[str, frozenset[Permission]]:
        return {chat: held for (whose, chat), held in list(self._classes.items()) if whose == user and chat is not None}

    def set_classes(self, user: str, classes: Collection[Permission], *, chat: str | None = None) -> None:
        self._classes[user, chat] = known(classes)

    def unset_classes(self, user: str, *, chat: str | None = None) -> None:
        self._classes.pop((user, chat), None)

    def of(self, user: str, tool: str, origin: str) -> list[Grant]:
        return [each for each in self.of_user(user) if (each.tool, each.origin) == (tool, origin)]

    def of_user(self, user: str) -> list[Grant]:
        return sorted((each for each in list(self._grants.values()) if each.user == user), key=_order)

    def put(self, grant: Grant) -> None:
        self._grants[grant.id] = grant

    def withdraw(self, grant: Grant) -> None:
        self._grants.pop(grant.id, None)

    def forget_user(self, user: str) -> None:
        self._classes = {held: classes for held, classes in self._classes.items() if held[0] != user}
        self._grants = {id: grant for id, grant in self._grants.items() if grant.user != user}


class SqliteGrants:
    """Grants in one SQLite file, which several processes may share: all see a change at once."""

    def __init__(self, path: Path | str) -> None:
        """`path` is the file, or ":memory:" for grants that end with the process."""
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        self._db.execute("PRAGMA journal_mode = WAL")
        # FULL: a refusal for good must not be lost with the power.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)

    def classes(self, user: str, chat: str | None) -> frozenset[Permission] | None:
        rows = self._rows("SELECT classes FROM classes WHERE user = ? AND chat IS ?", user, chat)
        return _read(rows[0][0]) if rows else None

    def chats(self, user: str) -> dict[str, frozenset[Permission]]:
        rows = self._rows("SELECT chat, classes FROM classes WHERE user = ? AND chat IS NOT NULL", user)
        return {chat: _read(text) for chat, text in rows}

    def set_classes(self, user: str, classes: Collection[Permission], *, chat: str | None = None) -> None:
        text = json.dumps(sorted(known(classes)))
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM classes WHERE user = ? AND chat IS ?", (user, chat))
            self._db.execute("INSERT INTO classes (user, chat, classes) VALUES (?, ?, ?)", (user, chat, text))

    def unset_classes(self, user: str, *, chat: str | None = None) -> None:
        self._rows("DELETE FROM classes WHERE user = ? AND chat IS ?", user, chat)

    def of(self, user: str, tool: str, origin: str) -> list[Grant]:
        sql = "SELECT grant_json FROM grants WHERE user = ? AND tool = ? AND origin = ?"
        return sorted((_grant(text) for (text,) in self._rows(sql, user, tool, origin)), key=_order)

    def of_user(self, user: str) -> list[Grant]:
        rows = self._rows("SELECT grant_json FROM grants WHERE user = ?", user)
        return sorted((_grant(text) for (text,) in rows), key=_order)

    def put(self, grant: Grant) -> None:
        self._rows(
            "INSERT OR REPLACE INTO grants (id, user, tool, origin, grant_json) VALUES (?, ?, ?, ?, ?)",
            grant.id, grant.user, grant.tool, grant.origin, json.dumps(asdict(grant)),
        )  # fmt: skip

    def withdraw(self, grant: Grant) -> None:
        self._rows("DELETE FROM grants WHERE id = ?", grant.id)

    def forget_user(self, user: str) -> None:
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for table in ("grants", "classes"):
                self._db.execute(f"DELETE FROM {table} WHERE user = ?", (user,))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _rows(self, sql: str, *values: str | None) -> list[tuple[str, ...]]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()


def known(classes: Collection[str]) -> frozenset[Permission]:
    """The classes, each of which there is.

    Raises:
        ValueError: a class that there is not.
    """
    if unknown := set(classes) - set(PERMISSIONS):
        raise ValueError(f"Unknown classes: {', '.join(sorted(unknown))}; accepted: {', '.join(PERMISSIONS)}.")
    return frozenset(each for each in PERMISSIONS if each in classes)


def _read(text: str) -> frozenset[Permission]:
    # A class that a newer Ponder granted and this one does not know is not granted here.
    return known([each for each in json.loads(text) if each in PERMISSIONS])


def _grant(text: str) -> Grant:
    kept = json.loads(text)
    return Grant(**{each.name: kept[each.name] for each in fields(Grant) if each.name in kept})


def _order(grant: Grant) -> tuple[str, str, str]:
    return grant.tool, grant.origin, grant.id
