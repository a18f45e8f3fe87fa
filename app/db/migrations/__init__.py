"""Migrations of chats (`chats/`, ponder.db) and users (`users/`, users.db): Alembic's revisions, numbered from 0001.

A revision that was released is never edited; a change is a new revision. Each runs in a transaction of its own, so a
crash between two leaves a database that the next start can go on with. `PRAGMA user_version` is kept at the revision's
number: Ponders from before Alembic counted their steps there, and such a Ponder refuses a newer database by it.
A PostgreSQL database, which may hold both, begins with the shape of the newest revision (`postgres.py`): there were
none before revision 0015 of chats and 0006 of users, and those are SQLite's. Later revisions run on both. Alembic is
imported only where there is something to do.
"""

from __future__ import annotations

import logging
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sqlalchemy import Connection, text

from app.db.connection import connect, is_sqlite, transaction

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

Chain = Literal["chats", "users"]

_FOLDER = Path(__file__).parent
_ALEMBIC = threading.Lock()  # a revision's `op` is one for the process


class NewerDatabase(Exception):
    """The database was written by a newer Ponder than this one."""


def newest_revision(chain: Chain) -> int:
    return len(list((_FOLDER / chain).glob("r[0-9]*.py")))


def open_database(
    place: Path | str, chain: Chain, busy_timeout_s: float, *, sole: bool = False, member: str | None = None
) -> Connection:
    """Opens a database as `connect` does, and migrates it.

    Raises:
        NewerDatabase: a newer Ponder wrote it.
    """
    db = connect(place, busy_timeout_s, sole=sole, member=member)
    try:
        migrate(db, chain)
    except BaseException:
        db.close()
        raise
    return db


def migrate(db: Connection, chain: Chain, to: int | None = None) -> None:
    """Take the revisions that `db` has not taken yet; a database from before Alembic is stamped with its own.

    Raises:
        NewerDatabase: it has taken more revisions than there are here.
    """
    newest = newest_revision(chain)
    to = newest if to is None else to
    with transaction(db):
        version, stamped = _taken(db, chain, newest)
    while version < to or stamped != version:
        with _ALEMBIC:
            version = stamped = _step(db, chain, newest, to)


def _taken(db: Connection, chain: Chain, newest: int) -> tuple[int, int]:
    """Returns the revision that the database is at, and the one in Alembic's own table, 0 where it has none."""
    version: int = db.exec_driver_sql("PRAGMA user_version").scalar_one() if is_sqlite(db) else 0
    table = _version_table(db, chain)
    stamped = int(db.scalar(text(f"SELECT version_num FROM {table}")) or 0) if has_table(db, table) else 0
    if (version := max(version, stamped)) > newest:
        raise NewerDatabase(
            f"the database has format {version} and this Ponder knows formats up to {newest}: "
            "start the newer Ponder that wrote it, or choose another --data-dir or --database"
        )
    return version, stamped


def has_table(db: Connection, name: str) -> bool:
    if is_sqlite(db):
        found = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = :name"
    else:  # to_regclass would answer from a cache, which does not see what another has made since the transaction began
        found = "SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = :name"
    return db.execute(text(found), {"name": name}).first() is not None


def _version_table(db: Connection, chain: Chain) -> str:
    return "alembic_version" if is_sqlite(db) else f"alembic_version_{chain}"


def _step(db: Connection, chain: Chain, newest: int, to: int) -> int:
    """Takes one revision, all of them in a new PostgreSQL database, or only stamps the one taken; returns it."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    script = _scripts(chain)
    with transaction(db, immediate=True):
        version, _ = _taken(db, chain, newest)  # again: another process may have taken some meanwhile
        context = MigrationContext.configure(db, opts={"version_table": _version_table(db, chain)})
        if version == 0 and not is_sqlite(db):
            from app.db.migrations import postgres

            (postgres.make_chats if chain == "chats" else postgres.make_users)(db)
            version = newest
        elif version < to:
            version += 1
            with Operations.context(context):
                script.get_revision(f"{version:04}").module.upgrade()
        context.stamp(script, f"{version:04}")
        if is_sqlite(db):
            db.exec_driver_sql(f"PRAGMA user_version = {version}")
    return version


@cache
def _scripts(chain: Chain) -> ScriptDirectory:
    from alembic.script import ScriptDirectory

    logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells each step, with words of its own
    return ScriptDirectory(_FOLDER, version_locations=[_FOLDER / chain])
