"""Migrations of ponder.db (`chats/`) and users.db (`users/`): Alembic's revisions, numbered from 0001.

A revision that was released is never edited; a change is a new revision. Each runs in a transaction of its own, so a
crash between two leaves a database that the next start can go on with. `PRAGMA user_version` is kept at the revision's
number: Ponders from before Alembic counted their steps there, and such a Ponder refuses a newer database by it.
Alembic is imported only where there is something to do.
"""

from __future__ import annotations

import logging
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sqlalchemy import Connection, text

from app.db.connection import connect, transaction

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

Chain = Literal["chats", "users"]

_FOLDER = Path(__file__).parent
_ALEMBIC = threading.Lock()  # a revision's `op` is one for the process


class NewerDatabase(Exception):
    """The database was written by a newer Ponder than this one."""


def newest_revision(chain: Chain) -> int:
    return len(list((_FOLDER / chain).glob("r[0-9]*.py")))


def open_database(path: Path, chain: Chain, busy_timeout_s: float) -> Connection:
    """Opens a database file, which is made where there is none, and migrates it.

    Raises:
        NewerDatabase: a newer Ponder wrote it.
    """
    db = connect(path, busy_timeout_s)
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
        version, stamped = _taken(db, newest)
    while version < to or stamped != version:
        with _ALEMBIC:
            version = stamped = _step(db, chain, newest, to)


def _taken(db: Connection, newest: int) -> tuple[int, int]:
    """Returns the revision that the database is at, and the one in Alembic's own table, 0 where it has none."""
    version: int = db.exec_driver_sql("PRAGMA user_version").scalar_one()
    has_table = db.scalar(text("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'"))
    stamped = int(db.scalar(text("SELECT version_num FROM alembic_version")) or 0) if has_table else 0
    if (version := max(version, stamped)) > newest:
        raise NewerDatabase(
            f"the database has format {version} and this Ponder knows formats up to {newest}: "
            "start the newer Ponder that wrote it, or choose another --data-dir"
        )
    return version, stamped


def _step(db: Connection, chain: Chain, newest: int, to: int) -> int:
    """Takes one revision, or only stamps the one that was taken; returns it."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    script = _scripts(chain)
    with transaction(db, immediate=True):
        version, _ = _taken(db, newest)  # again: another process may have taken some meanwhile
        context = MigrationContext.configure(db)
        if version < to:
            version += 1
            with Operations.context(context):
                script.get_revision(f"{version:04}").module.upgrade()
        context.stamp(script, f"{version:04}")
        db.exec_driver_sql(f"PRAGMA user_version = {version}")
    return version


@cache
def _scripts(chain: Chain) -> ScriptDirectory:
    from alembic.script import ScriptDirectory

    logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells each step, with words of its own
    return ScriptDirectory(_FOLDER, version_locations=[_FOLDER / chain])
