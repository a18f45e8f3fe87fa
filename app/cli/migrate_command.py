"""`ponder migrate`: the chats, users and documents of a data directory, copied into an empty PostgreSQL database.

All is copied in one transaction, documents in one that ends right after it, and read back before it is committed: each
table must have as many rows as its source, and the same digest of them. The source is only migrated to the newest
format, as a server would do at its start. What differs by nature is made anew: the words of search, and the numbers of
rows, in their order.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from sqlalchemy import Boolean, Column, Connection, Table, delete, func, select

from app.config import LOCAL_USER, BadSetting, Settings
from app.db.chat_search import index_texts
from app.db.connection import connect, transaction
from app.db.migrations import Chain, NewerDatabase, migrate, open_database
from app.db.postgres import postgres_engine
from app.db.sqlite import STORAGE_ERRORS, Row, lock_data_dir, refuse_damage
from app.db.tables import CHATS, USERS, chats, insertion_number, runs, texts, users
from app.document_library import documents_dir

_TABLES = {"ponder.db": CHATS, "users.db": USERS}
_CHAINS: dict[str, Chain] = {"ponder.db": "chats", "users.db": "users"}
_BATCH_ROWS, _BATCH_BYTES = 1000, 16 << 20


def migrate_to_postgres(settings: Settings, *, documents_only: bool = False) -> None:
    """Copies the data directory of the settings into their PostgreSQL database, and prints the rows of each table.

    Args:
        documents_only: not chats and users, which the database may have already.

    Raises:
        BadSetting: there is nothing to copy, one of the two is in use or cannot be read, the database has something
            already, or a table was not copied whole. Nothing was copied then.
    """
    data_dir, address = settings.resolved_data_dir, settings.database_address
    if address is None:
        raise BadSetting("--to names no database; accepted: a postgresql:// address there or in PONDER_DATABASE.")
    there = [] if documents_only else [name for name in _TABLES if (data_dir / name).is_file()]
    documents = (documents_dir(settings) / "documents.db").is_file()
    if not there and not documents:
        looked_for = "documents" if documents_only else "ponder.db and no users.db, and no documents"
        raise BadSetting(f"{data_dir} has no {looked_for}; accepted: a data directory, with --from.")
    refuse_damage(data_dir)
    try:
        with _locked(data_dir), contextlib.ExitStack() as closing:
            sources = {name: _opened(open_database(data_dir / name, _CHAINS[name], 5), closing) for name in there}
            target = _opened(connect(address, 5, sole=True), closing)
            for chain in _CHAINS.values():
                migrate(target, chain)
            with _documents_copied(settings, address) if documents else contextlib.nullcontext([0]) as rows:
                total = (_copy_all(sources, target) if there else 0) + sum(rows)
            with contextlib.suppress(*STORAGE_ERRORS):  # the first search goes on with it
                _index(target)
    except (OSError, *STORAGE_ERRORS, NewerDatabase) as error:
        raise BadSetting(f"{data_dir} cannot be copied: {error}. Nothing was copied.") from None
    print(
        f"{total} rows are in the PostgreSQL database. Start the server with --database and the same --data-dir: the "
        "files of documents and of tools stay there. ponder.db, users.db and documents/documents.db are as they were, "
        "and not read any more."
    )


@contextlib.contextmanager
def _documents_copied(settings: Settings, address: str) -> Iterator[list[int]]:
    """Yields the rows of each table of documents, which are kept when the block ends without an error."""
    from retrieval import InUse
    from retrieval.document_database import NewerFile, StoreError
    from retrieval.postgres.copying import NotCopied, documents_copied

    rows = list[int]()

    def tell(table: str, count: int) -> None:
        print(f"documents: {table}: {count}", flush=True)
        rows.append(count)

    engine = postgres_engine(address, 5, sole=False)
    try:
        with documents_copied(documents_dir(settings), engine, tell):
            yield rows
    except InUse as error:
        raise BadSetting(f"{error} Stop that one. Nothing was copied.") from None
    except (NotCopied, StoreError, NewerFile) as error:
        raise BadSetting(
            f"The documents of {settings.resolved_data_dir} cannot be copied: {error}. Nothing was copied."
        ) from None


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    lock = lock_data_dir(data_dir)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)
        lock.close()


def _opened(db: Connection, closing: contextlib.ExitStack) -> Connection:
    closing.callback(db.close)
    return db


def _copy_all(sources: dict[str, Connection], target: Connection) -> int:
    """Returns the number of rows.

    Raises:
        BadSetting: the target has something already, or a table was not copied whole.
    """
    total = 0
    with contextlib.ExitStack() as reading, transaction(target, immediate=True):
        _refuse_rows(target)
        for name, source in sources.items():
            reading.enter_context(transaction(source))
            if name == "users.db":
                target.execute(delete(users))  # the local user, as a new database has it
            # Texts come last: triggers fill them with what the others get.
            for table in sorted(_TABLES[name].sorted_tables, key=lambda table: table is texts):
                count = _copy(table, source, target)
                print(f"{table.name}: {count}", flush=True)
                total += count
    return total


def _refuse_rows(target: Connection) -> None:
    """
    Raises:
        BadSetting: the database has more than a new one.
    """
    for table in (*CHATS.sorted_tables, *USERS.sorted_tables):
        found = select(func.count()).select_from(table)
        if table is users:
            found = found.where(users.c.id != LOCAL_USER)
        if count := target.scalar(found):
            raise BadSetting(
                f"The PostgreSQL database is not empty: {table.name} has {count} rows. Nothing was copied. Accepted: a "
                "new database, another schema of it (`?options=-csearch_path%3DNAME`), or, where documents alone are "
                "missing, --documents-only."
            )


def _copy(table: Table, source: Connection, target: Connection) -> int:
    """Copies a table, or where triggers fill it only compares it; returns its rows.

    Raises:
        BadSetting: the copy differs.
    """
    given, kept = _Digest(), _Digest()
    with Console(stderr=True).status(f"{table.name} …") as status:
        for batch in _batches(table, source):
            if table is not texts:
                target.execute(table.insert(), [_converted(table, row) for row in batch])
            given.add(table, batch)
            status.update(f"{table.name}: {given.rows} …")
        for batch in _batches(table, target):
            kept.add(table, batch)
            status.update(f"{table.name}: {kept.rows} of {given.rows} compared …")
    if given != kept:
        raise BadSetting(
            f"The table {table.name} was not copied whole: {given.rows} rows with the digest {given.sum:x} became "
            f"{kept.rows} with {kept.sum:x}. Nothing was copied."
        )
    return given.rows


def _batches(table: Table, db: Connection) -> Iterator[list[Row]]:
    """Reads a table in the order of insertion where a later row is told by it, in parts that memory has room for."""
    found = select(*_columns(table))
    if table in (chats, runs):
        found = found.order_by(insertion_number(table.c.id))
    batch, size = list[Row](), 0
    for row in db.execute(found.execution_options(yield_per=50)).mappings():
        batch.append(dict(row))
        size += sum(len(value) for value in row.values() if isinstance(value, str | bytes))
        if len(batch) == _BATCH_ROWS or size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _columns(table: Table) -> Sequence[Column[Any]]:
    """A table's columns, but for the numbers that each database gives the texts of search itself."""
    return [column for column in table.c if column is not texts.c.id]


def _converted(table: Table, row: Row) -> Row:
    """SQLite's flags are numbers."""
    flags = [column.name for column in table.c if isinstance(column.type, Boolean)]
    return {**row, **{name: bool(row[name]) for name in flags}}


@dataclass
class _Digest:
    """Digest of rows in whatever order: the sum of each one's SHA-256."""

    rows: int = 0
    sum: int = 0

    def add(self, table: Table, batch: Sequence[Row]) -> None:
        names = [column.name for column in _columns(table)]
        for row in batch:
            values = [_plain(row[name]) for name in names]
            self.rows += 1
            self.sum = (self.sum + int(hashlib.sha256(json.dumps(values).encode()).hexdigest(), 16)) % 2**256


def _plain(value: object) -> object:
    if isinstance(value, bytes | memoryview):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    return int(value) if isinstance(value, bool) else value


def _index(target: Connection) -> None:
    """Indexes the texts for search, which would else be done by the first one."""
    done = 0
    with Console(stderr=True).status("search …") as status:
        while True:
            with transaction(target):
                some = index_texts(target)
            if not some:
                return
            done += some
            status.update(f"search: {done} texts …")
