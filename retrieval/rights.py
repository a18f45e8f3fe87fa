"""Collections, and who may read, write and share them. Every question about a right is answered here.

A user who may not read a collection is told what a user is told of one that is not there.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Literal

from retrieval.database import DatabaseFile
from retrieval.records import Collection, NameTaken, NotAllowed, NotFound, Role

LONGEST_NAME = 200
_MAY = {"share": ("owner",), "delete": ("owner",), "rename": ("owner",), "add documents to": ("owner", "writer"),
        "delete documents from": ("owner", "writer")}  # fmt: skip
Deed = Literal["share", "delete", "rename", "add documents to", "delete documents from"]


class Rights:
    """The collections of a database."""

    def __init__(self, database: DatabaseFile) -> None:
        self._database = database

    def create(self, user: str, name: str) -> Collection:
        """The user's collection of that name, made if there is none.

        Raises:
            ValueError: the name is empty or too long.
        """
        name = _checked(name)
        with self._database.writing() as db:
            db.execute(
                "INSERT OR IGNORE INTO collections (name, owner, created_at) VALUES (?, ?, ?)",
                (name, user, time.time()),
            )
        return next(each for each in self.collections(user) if each.role == "owner" and each.name == name)

    def rename(self, owner: str, collection: int, name: str) -> None:
        """
        Raises:
            ValueError: the name is empty or too long.
            NameTaken: the owner has another collection of this name.
            NotFound: there is no such collection.
            NotAllowed: it is not the owner who asks.
        """
        name = _checked(name)
        with self._database.writing() as db:
            self.need(db, owner, collection, "rename")
            taken = "SELECT 1 FROM collections WHERE owner = ? AND name = ? AND id != ?"
            if db.execute(taken, (owner, name, collection)).fetchone():
                raise NameTaken(f"There is a collection {name!r:.60} already.")
            db.execute("UPDATE collections SET name = ? WHERE id = ?", (name, collection))

    def collections(self, user: str) -> list[Collection]:
        """All that the user may read, with the user's role; the user's own first."""
        rows = self._database.rows(
            """SELECT c.id, c.name, c.owner, iif(c.owner = :user, 'owner', m.role) AS role,
                      (SELECT count(*) FROM documents d WHERE d.collection = c.id) AS documents
               FROM collections c LEFT JOIN members m ON m.collection = c.id AND m.user = :user
               WHERE c.owner = :user OR m.user IS NOT NULL ORDER BY c.owner != :user, c.name, c.id""",
            {"user": user},
        )
        return [Collection(**row) for row in map(dict, rows)]

    def collection(self, user: str, number: int) -> Collection:
        """
        Raises:
            NotFound: there is none, or the user may not read it.
        """
        found = next((each for each in self.collections(user) if each.id == number), None)
        if found is None:
            raise NotFound(f"There is no collection {number}.")
        return found

    def members(self, user: str, collection: int) -> dict[str, Role]:
        """Who may read or write it besides its owner.

        Raises:
            NotFound: there is none, or the user may not read it.
        """
        with self._database.reading() as db:
            self.role(db, user, collection)
            rows = db.execute("SELECT user, role FROM members WHERE collection = ? ORDER BY user", (collection,))
            return {row["user"]: row["role"] for row in rows}

    def share(self, owner: str, collection: int, user: str, role: Literal["reader", "writer"] | None) -> None:
        """Give a user a role in the owner's collection, or take it away with None.

        Raises:
            NotFound: there is no such collection.
            NotAllowed: it is not the owner who asks.
        """
        with self._database.writing() as db:
            self.need(db, owner, collection, "share")
            if role is None:
                db.execute("DELETE FROM members WHERE collection = ? AND user = ?", (collection, user))
            else:
                db.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?)", (collection, user, role))

    def readable(self, user: str, among: Iterable[int] | None = None) -> frozenset[int]:
        """The collections that the user may read, or those of `among`.

        Raises:
            NotFound: one of `among` is not readable.
        """
        rows = self._database.rows(
            "SELECT id FROM collections WHERE owner = ? UNION SELECT collection FROM members WHERE user = ?",
            (user, user),
        )
        found = frozenset(row[0] for row in rows)
        if among is None:
            return found
        if missing := sorted(set(among) - found):
            raise NotFound(f"There is no collection {missing[0]}.")
        return frozenset(among)

    # Within a transaction

    def role(self, db: sqlite3.Connection, user: str, collection: int) -> Role:
        """
        Raises:
            NotFound: there is none, or the user may not read it.
        """
        row = db.execute(
            """SELECT iif(c.owner = ?1, 'owner', m.role) AS role FROM collections c
               LEFT JOIN members m ON m.collection = c.id AND m.user = ?1 WHERE c.id = ?2""",
            (user, collection),
        ).fetchone()
        if row is None or row["role"] is None:
            raise NotFound(f"There is no collection {collection}.")
        role: Role = row["role"]
        return role

    def need(self, db: sqlite3.Connection, user: str, collection: int, deed: Deed) -> None:
        """
        Raises:
            NotFound: there is no such collection, or the user may not read it.
            NotAllowed: the user may read it, but not do this.
        """
        role = self.role(db, user, collection)
        if role not in _MAY[deed]:
            raise NotAllowed(f"A {role} may not {deed} this collection; that takes the {_either(_MAY[deed])}.")


def _checked(name: str) -> str:
    """
    Raises:
        ValueError: it is no name of a collection.
    """
    name = name.strip()
    if not name or len(name) > LONGEST_NAME:
        raise ValueError(f"A collection's name has 1 to {LONGEST_NAME} characters.")
    return name


def _either(roles: Sequence[str]) -> str:
    return " or a ".join(roles)
