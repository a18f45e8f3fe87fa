"""Are the databases of a data directory whole? Asked before a server writes to any, so that nothing is made worse.

They are read, never written: a damaged file stays as it is until its operator says what becomes of it.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from app.config import BadSetting

DATABASES = ("ponder.db", "users.db", "permissions.db", "calls.db", "notes.db", "documents/documents.db")
RESTORING = "restore-unfinished"  # a file that is there while a backup is put in place
LOOKED_AT_S = 5.0  # for all of them at a server's start; `ponder backup` looks at everything
_STEPS = 10_000  # of SQLite's machine, between two looks at the clock


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that can't change the file, nor move its write-ahead log into it."""
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=30)


def damage_of(path: Path, within_s: float | None = None) -> str | None:
    """Why a database can't be used, in SQLite's words; None where nothing was found within that time."""
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
