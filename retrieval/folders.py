"""Folders that documents come from, each a source with an identity: its user, its path, and a name of its own.

The documents of a folder are named by it, so two folders that end in the same name (`work/notes`, `home/notes`) are
kept apart: the second is called `notes (2)`. A path is a label here: nothing is read by it.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import PurePath

from retrieval.document_database import DocumentDatabase, StoreConnection
from retrieval.records import NotFound
from retrieval.rights import Rights


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of `user`; the sources of its documents begin with `name` and a slash."""

    id: int
    collection: int
    path: str
    name: str
    documents: int


class Folders:
    """The folders of a database. A user sees only their own: a path tells of its user's machine."""

    def __init__(self, database: DocumentDatabase, rights: Rights) -> None:
        self._database, self._rights = database, rights

    def enter(self, user: str, collection: int, path: str) -> Folder:
        """The user's folder at that path, made if there is none. Documents that were read from it before it was
        recorded become its own.

        Raises:
            NotFound: there is no such collection.
            NotAllowed: the user may only read it.
        """
        with self._database.writing() as db:
            self._rights.need(db, user, collection, "add documents to")
            known = 'SELECT id FROM folders WHERE collection = ? AND "user" = ? AND path = ?'
            row = db.execute(known, (collection, user, path)).fetchone()
            number = self._make(db, user, collection, path) if row is None else int(row["id"])
        return self.get(user, collection, number)

    @staticmethod
    def _make(db: StoreConnection, user: str, collection: int, path: str) -> int:
        base = PurePath(path).name
        base = "root" if base in ("", "..") else base
        below = path.rstrip("/") + "/"
        strange = """SELECT 1 FROM documents WHERE collection = ?1 AND folder IS NULL AND NOT owned
                     AND substr(source, 1, length(?2)) = ?2 AND substr(file, 1, length(?3)) != ?3"""
        for count in itertools.count(1):
            name = base if count == 1 else f"{base} ({count})"
            taken = db.execute("SELECT 1 FROM folders WHERE collection = ? AND name = ?", (collection, name)).fetchone()
            if not taken and not db.execute(strange, (collection, f"{name}/", below)).fetchone():
                break
        (number,) = db.execute(
            'INSERT INTO folders (collection, "user", path, name, created_at) VALUES (?, ?, ?, ?, ?) RETURNING id',
            (collection, user, path, name, time.time()),
        ).fetchone()
        db.execute(
            """UPDATE documents SET folder = ?4 WHERE collection = ?1 AND folder IS NULL AND NOT owned
               AND substr(source, 1, length(?2)) = ?2 AND substr(file, 1, length(?3)) = ?3""",
            (collection, f"{name}/", below, number),
        )
        return int(number)

    def of(self, user: str, collection: int) -> list[Folder]:
        """The user's folders in a collection, by name.

        Raises:
            NotFound: there is no such collection.
        """
        self._rights.readable(user, (collection,))
        rows = self._database.rows(
            f'{_FOLDERS} WHERE f.collection = ? AND f."user" = ? ORDER BY name', (collection, user)
        )
        return [Folder(**row) for row in map(dict, rows)]

    def get(self, user: str, collection: int, number: int) -> Folder:
        """
        Raises:
            NotFound: the user has no such folder there.
        """
        found = next((each for each in self.of(user, collection) if each.id == number), None)
        if found is None:
            raise NotFound(f"There is no folder {number} of yours in collection {collection}.")
        return found


_FOLDERS = """SELECT f.id, f.collection, f.path, f.name,
    (SELECT count(*) FROM documents d WHERE d.folder = f.id) AS documents FROM folders f"""
