"""Collections, and the rights of users to read, write and share them. Every right is checked here.

Sharing invites: an invitation gives no right, a user becomes a member by accepting, and may leave. A user who may not
read a collection gets the same answer as for one that is not there. An attached collection holds one file that belongs
to something else (a question of a chat): it is in no list, cannot be named, shared or added to, and is searched where
its number is passed as that of a file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Literal

from retrieval.document_database import DocumentDatabase, StoreConnection, marks
from retrieval.records import (
    Collection,
    CollectionNameTaken,
    Invitation,
    Member,
    MemberRole,
    NotAllowed,
    NotFound,
    Role,
    SourceTaken,
    TooManyInvited,
)

MAX_NAME_LENGTH = 200
MAX_INVITATIONS = 1000  # open ones of a collection
_MAY = {"share": ("owner",), "delete": ("owner",), "rename": ("owner",), "add documents to": ("owner", "writer"),
        "delete documents from": ("owner", "writer")}  # fmt: skip
Deed = Literal["share", "delete", "rename", "add documents to", "delete documents from"]


class Rights:
    """The collections of a database."""

    def __init__(self, database: DocumentDatabase) -> None:
        self._database = database

    def create(self, user: str, name: str) -> Collection:
        """The user's collection of that name, made if there is none.

        Raises:
            ValueError: the name is empty or too long.
        """
        name = _checked(name)
        with self._database.writing() as db:
            db.execute(
                "INSERT INTO collections (name, owner, created_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                (name, user, time.time()),
            )
        return next(each for each in self.collections(user) if each.role == "owner" and each.name == name)

    def attach(self, user: str, name: str) -> int:
        """Makes an attached collection; returns its number. `name` is unique among the user's."""
        with self._database.writing() as db:
            insert = "INSERT INTO collections (name, owner, created_at, attached) VALUES (?, ?, ?, TRUE) RETURNING id"
            (number,) = db.execute(insert, (_attached(name), user, time.time())).fetchone()
        return int(number)

    def attached(self, user: str, names: Sequence[str] | None = None) -> dict[str, int]:
        """The numbers of the user's attached collections by name: all, or those of `names` that are there."""
        sql, values = "SELECT name, id FROM collections WHERE owner = ? AND attached", [user]
        if names is not None:
            named = sorted({f"{_MARK}{name}" for name in names})
            sql, values = f"{sql} AND name IN ({marks(named)})", [user, *named]
        return {row["name"].removeprefix(_MARK): int(row["id"]) for row in self._database.rows(sql, values)}

    def all_attached(self) -> list[tuple[str, str]]:
        """User and name of every attached collection."""
        rows = self._database.rows("SELECT owner, name FROM collections WHERE attached")
        return [(row["owner"], row["name"].removeprefix(_MARK)) for row in rows]

    def rename(self, owner: str, collection: int, name: str) -> None:
        """
        Raises:
            ValueError: the name is empty or too long.
            NameTaken: the owner has another collection of this name.
            NotFound: there is no such collection.
            NotAllowed: the user is not the owner.
        """
        name = _checked(name)
        with self._database.writing() as db:
            self.need(db, owner, collection, "rename")
            taken = "SELECT 1 FROM collections WHERE owner = ? AND name = ? AND id != ?"
            if db.execute(taken, (owner, name, collection)).fetchone():
                raise CollectionNameTaken(f"There is a collection {name!r:.60} already.")
            db.execute("UPDATE collections SET name = ? WHERE id = ?", (name, collection))

    def collections(self, user: str) -> list[Collection]:
        """All that the user may read, with the user's role; the user's own first."""
        rows = self._database.rows(
            """SELECT c.id, c.name, c.owner, CASE WHEN c.owner = :user THEN 'owner' ELSE m.role END AS role,
                      (SELECT count(*) FROM documents d WHERE d.collection = c.id) AS documents
               FROM collections c LEFT JOIN members m ON m.collection = c.id AND m."user" = :user
               WHERE NOT c.attached AND (c.owner = :user OR m."user" IS NOT NULL)
               ORDER BY c.owner != :user, c.name, c.id""",
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

    def members(self, user: str, collection: int) -> list[Member]:
        """Users beside the owner who may read or write it; for the owner also those who are invited.

        Raises:
            NotFound: there is none, or the user may not read it.
        """
        with self._database.reading() as db:
            owns = self.role(db, user, collection) == "owner"
            rows = db.execute(
                """SELECT "user", role, 'member' AS status FROM members WHERE collection = :collection
                   UNION ALL SELECT "user", role, 'invited' FROM invitations WHERE collection = :collection AND :owns
                   ORDER BY 1""",
                {"collection": collection, "owns": owns},
            )
            return [Member(**row) for row in map(dict, rows)]

    def invite(self, owner: str, collection: int, user: str, role: MemberRole) -> Member:
        """Offer a user a role in the owner's collection; of one who is a member, change the role.

        Looks at no list of users: an id that nobody has is invited like any other. A declined invitation stays one, and
        only the user can distinguish it from an open one.

        Raises:
            ValueError: the user owns the collection.
            NotFound: there is no such collection.
            NotAllowed: the user is not the owner.
            TooManyInvited: it has as many invitations as it may have.
        """
        with self._database.writing() as db:
            self.need(db, owner, collection, "share")
            if user == owner:
                raise ValueError(f"{user!r} owns this collection; accepted: somebody else.")
            changed = db.execute(
                'UPDATE members SET role = ? WHERE collection = ? AND "user" = ?', (role, collection, user)
            ).rowcount
            if changed:
                return Member(user, role, "member")
            count = 'SELECT count(*) FROM invitations WHERE collection = ? AND "user" != ?'
            if db.execute(count, (collection, user)).fetchone()[0] >= MAX_INVITATIONS:
                raise TooManyInvited(
                    f"The collection has {MAX_INVITATIONS} open invitations, which is the limit; withdraw some first."
                )
            db.execute(
                """INSERT INTO invitations (collection, "user", role, created_at) VALUES (?, ?, ?, ?)
                   ON CONFLICT (collection, "user") DO UPDATE SET role = excluded.role""",
                (collection, user, role, time.time()),
            )
        return Member(user, role, "invited")

    def remove(self, asker: str, collection: int, user: str) -> bool:
        """Take a role or an invitation back as the owner, or leave as a member; False if there was none.

        Raises:
            NotFound: there is no such collection.
            NotAllowed: a member asks for another's.
        """
        with self._database.writing() as db:
            role = self.role(db, asker, collection)
            if role != "owner" and user != asker:
                self.need(db, asker, collection, "share")
            removed = 0
            for table in ("members", "invitations"):
                delete = f'DELETE FROM {table} WHERE collection = ? AND "user" = ?'
                removed += db.execute(delete, (collection, user)).rowcount
        return removed > 0

    def forget_user(self, user: str) -> None:
        """Takes every role and invitation from a user who is deleted. Documents in others' collections stay there."""
        with self._database.writing() as db:
            for table in ("members", "invitations"):
                db.execute(f'DELETE FROM {table} WHERE "user" = ?', (user,))
            db.execute("UPDATE documents SET added_by = NULL WHERE added_by = ?", (user,))

    def invitations(self, user: str) -> list[Invitation]:
        """Open invitations of the user, the newest first."""
        rows = self._database.rows(
            """SELECT i.collection, c.name, c.owner, i.role, i.created_at FROM invitations i
               JOIN collections c ON c.id = i.collection WHERE i."user" = ? AND NOT i.declined
               ORDER BY i.created_at DESC, i.collection DESC""",
            (user,),
        )
        return [Invitation(**row) for row in map(dict, rows)]

    def accept(self, user: str, collection: int) -> None:
        """Become a member, in the role that was offered.

        Raises:
            NotFound: the user has no open invitation to it.
        """
        with self._database.writing() as db:
            role = self._invited(db, user, collection)
            db.execute('DELETE FROM invitations WHERE collection = ? AND "user" = ?', (collection, user))
            db.execute('INSERT INTO members (collection, "user", role) VALUES (?, ?, ?)', (collection, user, role))

    def decline(self, user: str, collection: int) -> None:
        """Close an invitation. The owner is not notified: that would reveal that the user exists.

        Raises:
            NotFound: the user has no open invitation to it.
        """
        with self._database.writing() as db:
            self._invited(db, user, collection)
            db.execute('UPDATE invitations SET declined = TRUE WHERE collection = ? AND "user" = ?', (collection, user))

    def readable(
        self, user: str, among: Iterable[int] | Literal["own", "all"] = "all", files: frozenset[int] = frozenset()
    ) -> frozenset[int]:
        """The collections that the user may read: all, the user's own, or those of `among`; and of the attached ones
        those of `files` that are there.

        Raises:
            NotFound: one of `among` is not readable.
        """
        if files:
            named = sorted(files)
            mine = f"SELECT id FROM collections WHERE owner = ? AND attached AND id IN ({marks(named)})"
            there = frozenset(int(row["id"]) for row in self._database.rows(mine, [user, *named]))
            return self.readable(user, among) | there
        sql = "SELECT id FROM collections WHERE owner = :user AND NOT attached"
        if among != "own":
            sql += ' UNION SELECT collection FROM members WHERE "user" = :user'
        found = frozenset(row[0] for row in self._database.rows(sql, {"user": user}))
        if among == "own" or among == "all":
            return found
        wanted = frozenset(among)
        if missing := sorted(wanted - found):
            raise NotFound(f"There is no collection {missing[0]}.")
        return wanted

    # Within a transaction

    def role(self, db: StoreConnection, user: str, collection: int, *, attached: bool = False) -> Role:
        """`attached`: it may be one that is attached.

        Raises:
            NotFound: there is none, or the user may not read it.
        """
        row = db.execute(
            """SELECT CASE WHEN c.owner = ?1 THEN 'owner' ELSE m.role END AS role FROM collections c
               LEFT JOIN members m ON m.collection = c.id AND m."user" = ?1
               WHERE c.id = ?2 AND (?3 OR NOT c.attached)""",
            (user, collection, attached),
        ).fetchone()
        if row is None or row["role"] is None:
            raise NotFound(f"There is no collection {collection}.")
        role: Role = row["role"]
        return role

    def need(self, db: StoreConnection, user: str, collection: int, deed: Deed, *, attached: bool = False) -> None:
        """`attached`: it may be one that is attached.

        Raises:
            NotFound: there is no such collection, or the user may not read it.
            NotAllowed: the user may read it, but not do this.
        """
        role = self.role(db, user, collection, attached=attached)
        if role not in _MAY[deed]:
            raise NotAllowed(f"A {role} may not {deed} this collection; that takes the {_either(_MAY[deed])}.")

    @staticmethod
    def _invited(db: StoreConnection, user: str, collection: int) -> MemberRole:
        """The role of an open invitation."""
        row = db.execute(
            'SELECT role FROM invitations WHERE collection = ? AND "user" = ? AND NOT declined', (collection, user)
        ).fetchone()
        if row is None:
            raise NotFound(f"There is no invitation to collection {collection}.")
        role: MemberRole = row["role"]
        return role


def check_source(db: StoreConnection, user: str, collection: int, source: str) -> None:
    """
    Raises:
        SourceTaken: another user's document of the collection has that source.
    """
    sql = "SELECT 1 FROM documents WHERE collection = ? AND source = ? AND (added_by IS NULL OR added_by != ?)"
    if db.execute(sql, (collection, source, user)).fetchone():
        raise SourceTaken(
            f"The collection has a document {source!r:.300} that another user added. Give yours another name, or "
            "say that it is to take that one's place (replace=true)."
        )


_MARK = " "  # before the name of an attached collection, which no other name can begin with


def _attached(name: str) -> str:
    return f"{_MARK}{_checked(name)}"


def _checked(name: str) -> str:
    """
    Raises:
        ValueError: it is no name of a collection.
    """
    name = name.strip()
    if not name or len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"A collection's name has 1 to {MAX_NAME_LENGTH} characters.")
    return name


def _either(roles: Sequence[str]) -> str:
    return " or a ".join(roles)
