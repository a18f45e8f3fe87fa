"""SQLite files of a data directory: their lock, their rights and the check for damage; and the errors of what is kept.

A lock keeps other processes out. Before a server writes to any database, all are checked for damage; a damaged file is
only read, and stays as it is until its operator decides. `steady` is the wall clock as it was at the start plus the
time passed since, for waits and time limits: setting the machine's clock does not change them. Dates (a key's expiry, a
quota's day, a message's time) follow the wall clock. Imports no SQLAlchemy: API workers have no database open.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import sqlite3
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from app.config import BadSetting
from retrieval.document_database import StoreError

log = logging.getLogger("ponder")

OTHERS = 0o077  # rights of group and others

Row = dict[str, Any]  # a row of a table: its columns are in app/db/tables.py


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def make_data_dir(path: Path) -> None:
    """Make the data directory where there is none, so that it is there after a loss of power too."""
    if not path.is_dir():
        from retrieval.durable import make_folder  # the indexes come with it: at a first start alone

        make_folder(path)


def lock_data_dir(data_dir: Path) -> IO[str]:
    """Hold the directory for this process: two servers would each take the other's running answers for dead."""
    make_data_dir(data_dir)
    lock = (data_dir / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise OSError(
            f"another Ponder (process {holder}) is using it; stop that one, or give another --data-dir"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    make_private(data_dir)
    return lock


def make_private(data_dir: Path) -> None:
    """Take from group and others every right to a data directory and what is in it; links are not followed.

    SQLite gives its `-wal` and `-shm` files the rights of the database, so these stay private from here on.
    """
    left = list[str]()

    def close(path: str) -> None:
        try:
            mode = os.lstat(path).st_mode
            if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) & OTHERS:
                os.chmod(path, stat.S_IMODE(mode) & ~OTHERS)
        except FileNotFoundError:  # it was there for a moment
            pass
        except OSError as error:
            left.append(f"{path}: {error.strerror}")

    close(str(data_dir))
    for folder, folders, files in os.walk(data_dir, onerror=lambda error: left.append(str(error))):
        for name in (*folders, *files):
            close(os.path.join(folder, name))
    if left:
        log.warning("%d files in %s stay open to others, the first: %s", len(left), data_dir, left[0])


class NotThere(LookupError):
    """The user has no such thing; another may. `what`: chat, folder, message or run."""

    def __init__(self, what: str, id: str) -> None:
        super().__init__(f"There is no {what} {id!r:.60}.")
        self.what = what


class NameTaken(ValueError):
    """The user has a folder of this name."""


class WrongPlace(ValueError):
    """A message cannot stand there. `field`: what was given, as the request names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class KeyReused(ValueError):
    """The key was given with another request."""


class ChatBusy(Exception):
    """The chat's last answer is still being made, or as many as can be compared."""


class RunTaken(Exception):
    """Another server has taken the run over: nothing more is written to it here."""


class PostgresError(StoreError):
    """An error of PostgreSQL in the database of chats and users."""

    @property
    def is_conflict(self) -> bool:
        """True where another transaction came first, and this one, which changed nothing, may be tried again."""
        return self.sqlstate in ("40001", "40P01")


STORAGE_ERRORS = (sqlite3.Error, PostgresError)

_STARTED = time.time() - time.monotonic()


def steady() -> float:
    """Now, in seconds since the epoch by the clock that the process started with."""
    return _STARTED + time.monotonic()


DATABASES = ("ponder.db", "users.db", "permissions.db", "calls.db", "notes.db", "documents/documents.db")
RESTORING = "restore-unfinished"  # a file that is there while a backup is put in place
LOOKED_AT_S = 5.0  # for all of them at a server's start; `ponder backup` looks at everything
_STEPS = 10_000  # of SQLite's machine, between two looks at the clock


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that can't change the file, nor move its write-ahead log into it."""
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=30)


def damage_of(path: Path, within_s: float | None = None) -> str | None:
    """Returns why a database can't be used, in SQLite's words; None where nothing was found within that time."""
    try:
        if not path.is_file():
            return "it is not a file" if path.exists() else None
        if not path.stat().st_size:
            return "it is empty"
        until = time.monotonic() + (math.inf if within_s is None else within_s)
        with closing(open_for_reading(path)) as db:
            db.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
            found = [str(row[0]) for row in db.execute("PRAGMA quick_check(3)")]
    except sqlite3.OperationalError as error:
        # No time is left, or it can't be looked at now: who opens it to write is told why.
        return None if str(error).startswith(("interrupted", "unable to open", "database is locked")) else str(error)
    except (sqlite3.Error, OSError) as error:
        return str(error)
    return None if found == ["ok"] else "; ".join(" ".join(each.split()) for each in found)[:500]


def damaged(data_dir: Path, within_s: float | None = None) -> Iterator[tuple[Path, str]]:
    """The damaged databases of a data directory, and what is wrong with each."""
    until = None if within_s is None else time.monotonic() + within_s
    whole = [name for name in DATABASES if (data_dir / name).is_file() and (data_dir / name).stat().st_size]
    for name in DATABASES:
        left_s = None if until is None else max(0.1, until - time.monotonic())
        reason = damage_of(data_dir / name, left_s)
        if reason == "it is empty" and not whole:
            continue  # a first start that was cut short
        if reason is not None:
            yield data_dir / name, reason


def refuse_damage(data_dir: Path) -> None:
    """
    Raises:
        BadSetting: a database is damaged, or a backup is half in place. Nothing was changed.
    """
    if (data_dir / RESTORING).exists():
        raise BadSetting(
            f"A backup was being put in place in {data_dir} and did not come to its end. "
            "Run `ponder backup restore` again; what was there before is kept beside it."
        )
    for path, reason in damaged(data_dir, LOOKED_AT_S):
        raise BadSetting(
            f"The database {path} is damaged: {reason}. Nothing was changed. `ponder backup restore` puts the newest "
            f"backup in its place and keeps the damaged file beside it; or move {path.name} away, with its -wal and "
            "-shm, to start without what it held."
        )
