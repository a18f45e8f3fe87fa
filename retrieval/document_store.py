"""Document store, the truth about documents: stores, replaces and deletes them, and reads them for users.

The documents a search may show are decided here, in one read transaction, even if the indexes are stale. Knows nothing
of parsing, embedding or searching.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrieval.document_database import DatabaseFile, DocumentDatabase, StoreConnection, marks
from retrieval.folders import Folders
from retrieval.index.chunks import Chunks
from retrieval.index.filters import Filters, as_sql
from retrieval.parsing.parsed import ParsedPage, ParseFault
from retrieval.records import Document, New, NotFound, Passage, SourceTaken
from retrieval.rights import Rights, check_source

_CURSOR = re.compile(r"(\d{1,12}\.\d{1,20})_(\d{1,18})", re.ASCII)  # when it was updated, its number


class BadCursor(ValueError):
    """A text that is no place in a list."""


class DocumentStore:
    """The documents of a SQLite file, which one process at a time writes to, or of PostgreSQL. Safe in threads."""

    def __init__(self, place: Path | DocumentDatabase) -> None:
        """
        Raises:
            OSError, sqlite3.Error: the file cannot be used.
            NewerFile: a newer version wrote it.
        """
        self.database: DocumentDatabase = DatabaseFile(place) if isinstance(place, Path) else place
        self.rights = Rights(self.database)
        self.folders = Folders(self.database, self.rights)
        self.chunks = Chunks(self.database)

    def close(self) -> None:
        self.database.close()

    # Changes

    def put(
        self, user: str, collection: int, documents: Sequence[New], replace: bool = True
    ) -> tuple[list[int], list[Path]]:
        """Store documents, each in place of the one with its source, in one transaction.

        Returns their numbers, and the files of ours that nothing refers to any more.

        Raises:
            NotFound: there is no such collection.
            NotAllowed: the user may only read it.
            SourceTaken: another user added one of a source, and `replace` is false.
        """
        with self.database.writing() as db:
            self.rights.need(db, user, collection, "add documents to", attached=True)
            for new in () if replace else documents:
                check_source(db, user, collection, new.source)
            generation = _next_generation(db)
            loose = set[bytes]()
            numbers, files = list[int](), list[Path]()
            for new in documents:
                if old_file := self._make_room(db, collection, new, generation, loose):
                    files.append(old_file)
                numbers.append(self._put(db, user, collection, new, generation))
            _forget_vectors(db, loose)
            self.database.index_words(db, generation)
        return numbers, files

    def _make_room(
        self, db: StoreConnection, collection: int, new: New, generation: int, loose: set[bytes]
    ) -> Path | None:
        """Take the old document's parts out; its number stays. Returns its file if that was ours."""
        old = db.execute(
            "SELECT id, file, owned FROM documents WHERE collection = ? AND source = ?", (collection, new.source)
        ).fetchone()
        if old is None:
            return None
        loose |= _remove_chunks(db, "document = ?", (old["id"],), generation)
        for table in ("parents", "pages"):
            db.execute(f"DELETE FROM {table} WHERE document = ?", (old["id"],))
        return Path(old["file"]) if old["owned"] and old["file"] != str(new.file) else None

    def _put(self, db: StoreConnection, user: str, collection: int, new: New, generation: int) -> int:
        now = time.time()
        values = {
            "collection": collection,
            "source": new.source,
            "version": new.version,
            "title": new.parsed.title or new.source,
            "media_type": new.parsed.media_type,
            "bytes": new.bytes,
            "characters": len(new.parsed.text),
            "metadata": json.dumps(dict(new.metadata)),
            "faults": json.dumps([(fault.message, fault.page) for fault in new.parsed.faults]),
            "text": new.parsed.text,
            "file": str(new.file) if new.file else None,
            "owned": new.owned,
            "root": str(new.root) if new.root else None,
            "folder": _folder(db, collection, new.folder),
            "added_by": user,
            "created_at": now,
            "updated_at": now,
        }
        kept = ("collection", "source", "created_at")
        (document,) = db.execute(
            f"""INSERT INTO documents ({", ".join(values)}) VALUES ({", ".join(f":{key}" for key in values)})
                ON CONFLICT (collection, source)
                DO UPDATE SET {", ".join(f"{key} = excluded.{key}" for key in values if key not in kept)}
                RETURNING id""",
            values,
        ).fetchone()
        db.executemany(
            'INSERT INTO pages (document, start, "end", number) VALUES (?, ?, ?, ?)',
            [(document, page.start, page.end, page.number) for page in new.parsed.pages],
        )
        db.executemany(
            'INSERT INTO parents (document, number, start, "end") VALUES (?, ?, ?, ?)',
            [(document, number, start, end) for number, (start, end) in enumerate(new.cut.parents)],
        )
        db.executemany(
            """INSERT INTO chunks (document, collection, number, start, "end", parent, context, text, hash, added)
               VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
            [
                (
                    *(document, collection, number, chunk.start, chunk.end, chunk.parent, chunk.context),
                    *(new.parsed.text[chunk.start : chunk.end], digest, generation),
                )
                for number, (chunk, digest) in enumerate(zip(new.cut.chunks, new.hashes, strict=True))
            ],
        )
        return int(document)

    def delete(self, user: str, document: int) -> list[Path]:
        """Delete a document; nobody is shown it from here on. Returns the files that were ours.

        Raises:
            NotFound: there is none, or the user may not read it.
            NotAllowed: the user may only read it.
        """
        with self.database.writing() as db:
            collection = self._collection_of(db, user, document)
            self.rights.need(db, user, collection, "delete documents from", attached=True)
            return self._delete(db, "id = ?", "document = ?", document)

    def rename(self, user: str, document: int, source: str) -> None:
        """Give a document another source. One that has no title of its own is titled by it anew: the indexes get its
        chunks again, with the vectors that they have.

        Raises:
            NotFound: there is none, or the user may not read it.
            NotAllowed: the user may only read it.
            SourceTaken: another document of the collection has that source.
        """
        with self.database.writing() as db:
            collection = self._collection_of(db, user, document)
            self.rights.need(db, user, collection, "add documents to", attached=True)
            taken = "SELECT id FROM documents WHERE collection = ? AND source = ? AND id != ?"
            if other := db.execute(taken, (collection, source, document)).fetchone():
                raise SourceTaken(f"Document {other['id']} of the collection is called {source!r:.60} already.")
            titled = "SELECT 1 FROM documents WHERE id = ? AND title = source"
            renamed = db.execute(titled, (document,)).fetchone() is not None
            db.execute(
                "UPDATE documents SET source = ?1, title = CASE WHEN ?2 THEN ?1 ELSE title END WHERE id = ?3",
                (source, renamed, document),
            )
            if renamed:
                generation = _next_generation(db)
                columns = 'document, collection, number, start, "end", parent, context, text, hash'
                db.execute(
                    f"INSERT INTO chunks ({columns}, added) SELECT {columns}, ? FROM chunks WHERE document = ?",
                    (generation, document),
                )
                _remove_chunks(db, "document = ? AND added < ?", (document, generation), generation)
                self.database.index_words(db, generation)

    def delete_collection(self, user: str, collection: int, *, attached: bool = False) -> list[Path]:
        """Delete it with all its documents. Returns the files that were ours. `attached`: it may be an attached one.

        Raises:
            NotFound: there is no such collection.
            NotAllowed: the user is not the owner.
        """
        with self.database.writing() as db:
            self.rights.need(db, user, collection, "delete", attached=attached)
            files = self._delete(db, "collection = ?", "collection = ?", collection)
            db.execute("DELETE FROM collections WHERE id = ?", (collection,))
        return files

    def delete_folder(self, user: str, collection: int, folder: int) -> list[Path]:
        """Delete a folder with all its documents. Returns the files that were ours.

        Raises:
            NotFound: the user has no such folder there.
            NotAllowed: the user may only read the collection.
        """
        self.folders.get(user, collection, folder)
        with self.database.writing() as db:
            self.rights.need(db, user, collection, "delete documents from")
            files = self._delete(db, "folder = ?", "document IN (SELECT id FROM documents WHERE folder = ?)", folder)
            db.execute("DELETE FROM folders WHERE id = ?", (folder,))
        return files

    @staticmethod
    def _delete(db: StoreConnection, documents: str, chunks: str, number: int) -> list[Path]:
        rows = db.execute(f"SELECT file FROM documents WHERE {documents} AND owned", (number,))
        files = [Path(row["file"]) for row in rows]
        loose = _remove_chunks(db, chunks, (number,), _next_generation(db))
        db.execute(f"DELETE FROM documents WHERE {documents}", (number,))
        _forget_vectors(db, loose)
        return files

    # Reads for ingest, which has checked the right before

    def stored(self, collection: int, source: str) -> Document | None:
        """The document of that source, if there is one."""
        rows = self.database.rows(f"{_DOCUMENTS} WHERE d.collection = ? AND d.source = ?", (collection, source))
        return _document(rows[0]) if rows else None

    def newest(self, collection: int) -> Document | None:
        """The document of a collection that was added or changed last, if there is one."""
        rows = self.database.rows(
            f"{_DOCUMENTS} WHERE d.collection = ? ORDER BY d.updated_at DESC, d.id DESC LIMIT 1", (collection,)
        )
        return _document(rows[0]) if rows else None

    def settle(self, document: int, folder: int | None, place: tuple[Path, Path | None] | None) -> None:
        """Note the folder of a document whose bytes are the same, and where they are now: the file, and the folder from
        which on no link to it is followed. A file of ours stays."""
        file, root = (str(each) if each else None for each in place or (None, None))
        differs = """SELECT collection FROM documents WHERE id = ?1
                     AND ((?2 IS NOT NULL AND (folder IS NULL OR folder != ?2))
                          OR (?3 IS NOT NULL AND NOT owned AND (file IS NULL OR file != ?3)))"""
        if not self.database.rows(differs, (document, folder, file)):
            return
        with self.database.writing() as db:
            db.execute(
                """UPDATE documents SET folder =
                       (SELECT f.id FROM folders f WHERE f.id = ?1 AND f.collection = documents.collection)
                   WHERE id = ?2 AND ?1 IS NOT NULL""",
                (folder, document),
            )
            moved = "UPDATE documents SET file = ?1, root = ?2 WHERE id = ?3 AND NOT owned AND ?1 IS NOT NULL"
            db.execute(moved, (file, root, document))

    def relocate(self, folder: Path) -> None:
        """Point to our files in `folder`, where a data directory was moved or put back elsewhere."""
        with self.database.writing() as db:
            for table, column in (("documents", "file"), ("job_files", "path")):
                rows = db.execute(f"SELECT DISTINCT {column} FROM {table} WHERE owned").fetchall()
                moved = [(str(folder / Path(old).name), old) for (old,) in rows if Path(old).parent != folder]
                db.executemany(f"UPDATE {table} SET {column} = ? WHERE owned AND {column} = ?", moved)

    def any(self) -> bool:
        return bool(self.database.rows("SELECT 1 FROM documents LIMIT 1"))

    def files(self) -> set[Path]:
        """The files of ours that documents refer to."""
        return {Path(row["file"]) for row in self.database.rows("SELECT file FROM documents WHERE owned")}

    # Reads for users

    def matching(self, collections: Iterable[int], filters: Filters) -> frozenset[int]:
        """The documents in these collections that a filter lets through.

        Raises:
            BadFilter: it cannot be applied.
        """
        condition, values = as_sql(filters, self.database.backend)
        among = list(collections)
        rows = self.database.rows(
            f"SELECT id FROM documents WHERE collection IN ({marks(among)}) AND {condition}", [*among, *values]
        )
        return frozenset(row[0] for row in rows)

    def containing(self, collections: Iterable[int], string: str, most: int) -> list[int]:
        """Documents in these collections with a string in their text, ignoring the case of ASCII letters."""
        among = list(collections)
        rows = self.database.rows(
            f"""SELECT id FROM documents WHERE collection IN ({marks(among)}) AND instr(lower(text), ?) > 0
                ORDER BY updated_at DESC, id DESC LIMIT ?""",
            [*among, _lower(string), most],
        )
        return [row[0] for row in rows]

    def passages(self, user: str, chunks: Sequence[int]) -> dict[int, Passage]:
        """Those of the chunks that are there and that the user may read, by number."""
        found: dict[int, Passage] = {}
        with self.database.reading() as db:
            for at in range(0, len(chunks), 500):
                some = [int(chunk) for chunk in chunks[at : at + 500]]
                rows = db.execute(
                    f"""SELECT c.id, c.document, c.collection, c.start, c."end", c.parent, c.context, c.text,
                               d.title, d.source, d.metadata,
                               (SELECT number FROM pages p WHERE p.document = c.document AND p.start <= c.start
                                ORDER BY p.start DESC LIMIT 1) AS page
                        FROM chunks c JOIN documents d ON d.id = c.document JOIN collections o ON o.id = c.collection
                        WHERE c.id IN ({marks(some)}) AND (o.owner = ? OR EXISTS
                            (SELECT 1 FROM members m WHERE m.collection = o.id AND m."user" = ?))""",
                    (*some, user, user),
                )
                found |= {row["id"]: _passage(row) for row in rows}
        return found

    def parent(self, user: str, document: int, number: int) -> tuple[int, int, str]:
        """Start, end and text of the window that a chunk stands in.

        Raises:
            NotFound: there is none, or the user may not read it.
        """
        with self.database.reading() as db:
            self._collection_of(db, user, document)
            row = db.execute(
                """SELECT p.start, p."end", substr(d.text, p.start + 1, p."end" - p.start) FROM parents p
                   JOIN documents d ON d.id = p.document WHERE p.document = ? AND p.number = ?""",
                (document, number),
            ).fetchone()
        if row is None:
            raise NotFound(f"Document {document} has no part {number}.")
        return int(row[0]), int(row[1]), str(row[2])

    def text(self, user: str, document: int, start: int = 0, end: int | None = None) -> str:
        """Characters `start` to `end` of a document.

        Raises:
            NotFound: there is no such document, or the user may not read it.
        """
        with self.database.reading() as db:
            self._collection_of(db, user, document)
            length = -1 if end is None else max(0, end - start)
            sql = """SELECT substr(text, ?1 + 1, CASE WHEN ?2 < 0 THEN length(text) ELSE ?2 END)
                     FROM documents WHERE id = ?3"""
            (found,) = db.execute(sql, (start, length, document)).fetchone()
        return str(found)

    def document(self, user: str, document: int) -> Document:
        """
        Raises:
            NotFound: there is none, or the user may not read it.
        """
        with self.database.reading() as db:
            self._collection_of(db, user, document)
            return _document(db.execute(f"{_DOCUMENTS} WHERE d.id = ?", (document,)).fetchone())

    def documents(self, user: str, collection: int | None = None) -> list[Document]:
        """The documents that the user may read, in one collection or in all, the newest first.

        Raises:
            NotFound: there is no such collection.
        """
        among = sorted(self.rights.readable(user, "all" if collection is None else (collection,)))
        rows = self.database.rows(
            f"{_DOCUMENTS} WHERE d.collection IN ({marks(among)}) ORDER BY d.updated_at DESC, d.id DESC", among
        )
        return [_document(row) for row in rows]

    def page(
        self, user: str, collection: int | None, folder: int | None, limit: int, before: str | None
    ) -> tuple[list[Document], str | None]:
        """At most `limit` of the documents that the user may read, of a collection, or of a folder of the user's,
        the newest first; and the place where the list goes on, if it does.

        Raises:
            NotFound: there is no such collection or folder.
            BadCursor: `before` is no place that a list gave.
        """
        among = sorted(self.rights.readable(user, "all" if collection is None else (collection,)))
        where, values = f"d.collection IN ({marks(among)})", list[int | float](among)
        if folder is not None:
            if not self.database.rows('SELECT 1 FROM folders WHERE id = ? AND "user" = ?', (folder, user)):
                raise NotFound(f"There is no folder {folder} of yours.")
            where, values = f"{where} AND d.folder = ?", [*values, folder]
        if before is not None:
            place = _CURSOR.fullmatch(before)
            if place is None:
                raise BadCursor(before)
            where, values = f"{where} AND (d.updated_at, d.id) < (?, ?)", [*values, float(place[1]), int(place[2])]
        rows = self.database.rows(
            f"{_DOCUMENTS} WHERE {where} ORDER BY d.updated_at DESC, d.id DESC LIMIT ?", [*values, limit + 1]
        )
        found = [_document(row) for row in rows[:limit]]
        return found, f"{found[-1].updated_at!r}_{found[-1].id}" if len(rows) > limit else None

    def pages(self, user: str, document: int) -> tuple[ParsedPage, ...]:
        """
        Raises:
            NotFound: there is no such document, or the user may not read it.
        """
        with self.database.reading() as db:
            self._collection_of(db, user, document)
            rows = db.execute('SELECT number, start, "end" FROM pages WHERE document = ? ORDER BY start', (document,))
            return tuple(ParsedPage(*row) for row in rows)

    def file(self, user: str, document: int) -> tuple[Path, Path | None]:
        """Returns the path that the document was read from, and the folder from which on no link to it is followed.

        Raises:
            NotFound: there is no such document, the user may not read it, or it came as text.
        """
        with self.database.reading() as db:
            self._collection_of(db, user, document)
            row = db.execute("SELECT file, owned, root FROM documents WHERE id = ?", (document,)).fetchone()
        if row["file"] is None:
            raise NotFound(f"Document {document} came as text; it has no file.")
        path = Path(row["file"])
        return path, None if row["owned"] else Path(row["root"] or path.parent)

    def _collection_of(self, db: StoreConnection, user: str, document: int) -> int:
        """The collection of a document that the user may read."""
        row = db.execute("SELECT collection FROM documents WHERE id = ?", (document,)).fetchone()
        try:
            if row is not None:
                self.rights.role(db, user, row["collection"], attached=True)
                return int(row["collection"])
        except NotFound:
            pass
        raise NotFound(f"There is no document {document}.")


def _folder(db: StoreConnection, collection: int, folder: int | None) -> int | None:
    """The folder's number while it is there: it may have been forgotten since the job began."""
    row = db.execute("SELECT id FROM folders WHERE id = ? AND collection = ?", (folder, collection)).fetchone()
    return None if row is None else int(row["id"])


def _lower(text: str) -> str:
    """A text with ASCII letters in lower case, as both databases' `lower` makes them in the locale C."""
    return "".join(letter.lower() if letter.isascii() else letter for letter in text)


def _next_generation(db: StoreConnection) -> int:
    db.execute("UPDATE state SET value = value + 1 WHERE key = 'generation'")
    (number,) = db.execute("SELECT value FROM state WHERE key = 'generation'").fetchone()
    return int(number)


def _remove_chunks(db: StoreConnection, where: str, values: tuple[Any, ...], generation: int) -> set[bytes]:
    """Take chunks out and note for the indexes that they went. Returns the hashes of their texts."""
    hashes = {row[0] for row in db.execute(f"SELECT hash FROM chunks WHERE {where}", values)}
    db.execute(f"INSERT INTO gone SELECT id, {int(generation)} FROM chunks WHERE {where}", values)
    db.execute(f"DELETE FROM chunks WHERE {where}", values)
    return hashes


def _forget_vectors(db: StoreConnection, hashes: Iterable[bytes]) -> None:
    """Delete the vectors of texts that no chunk has any more: a vector reveals much of its text."""
    db.executemany(
        "DELETE FROM vectors WHERE hash = ?1 AND NOT EXISTS (SELECT 1 FROM chunks WHERE hash = ?1)",
        [(digest,) for digest in hashes],
    )


_DOCUMENTS = """SELECT d.id, d.collection, d.source, d.title, d.media_type, d.version, d.bytes, d.characters,
    d.metadata, d.faults, d.created_at, d.updated_at, d.folder,
    (SELECT count(*) FROM chunks c WHERE c.document = d.id) AS chunks,
    (SELECT count(*) FROM pages p WHERE p.document = d.id) AS pages
    FROM documents d"""


def _document(row: Any) -> Document:
    faults = tuple(ParseFault(message, page) for message, page in json.loads(row["faults"]))
    return Document(**_parsed(row) | {"faults": faults})


def _passage(row: Any) -> Passage:
    return Passage(**_parsed(row))


def _parsed(row: Any) -> dict[str, Any]:
    values: Mapping[str, Any] = dict(row)
    return {**values, "metadata": json.loads(values["metadata"])}
