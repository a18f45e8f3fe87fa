"""A journal of calls begun and finished: a side effect happens at most once per call id, also across crashes.

A call that must not run twice is *begun* before it runs, and its outcome *finished* before it is given back. After a
crash, a finished call's outcome is given back without running; a call that was only begun may or may not have happened,
and is not run again. Knows nothing of tools: an outcome is text.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tools.errors import JournalConflict

_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    run TEXT NOT NULL, id TEXT NOT NULL, fingerprint TEXT NOT NULL, begun_at REAL NOT NULL, outcome TEXT,
    PRIMARY KEY (run, id)
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A call in the journal; `outcome` is None from its beginning to its end."""

    fingerprint: str
    outcome: str | None


class Journal(Protocol):
    """Calls by run and id. Every method may block, may come from any thread, and has reached the disk on return."""

    def look(self, run: str, call_id: str, fingerprint: str) -> Entry | None:
        """Returns the recorded state of a call.

        Raises:
            JournalConflict: the id stands for a call of another tool, or with other arguments.
        """

    def begin(self, run: str, call_id: str, fingerprint: str) -> bool:
        """Notes that a call is about to run; False where it was begun before, so that only one may run it.

        Raises:
            JournalConflict: as `look`.
        """

    def finish(self, run: str, call_id: str, fingerprint: str, outcome: str) -> str:
        """Notes a call's outcome, and returns the one that stands: the first.

        Raises:
            JournalConflict: as `look`.
        """


class SqliteJournal:
    """A journal in one SQLite file, which several processes may share."""

    def __init__(self, path: Path | str) -> None:
        """`path` is the file, or ":memory:" for a journal that ends with the process."""
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        self._db.execute("PRAGMA journal_mode = WAL")
        # FULL: a commit survives the loss of power too, which is when it matters.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute(_SCHEMA)

    def look(self, run: str, call_id: str, fingerprint: str) -> Entry | None:
        with self._lock:
            return self._look(run, call_id, fingerprint)

    def begin(self, run: str, call_id: str, fingerprint: str) -> bool:
        with self._lock:
            made = self._db.execute(
                "INSERT OR IGNORE INTO calls (run, id, fingerprint, begun_at) VALUES (?, ?, ?, ?)",
                (run, call_id, fingerprint, time.time()),
            )
            if made.rowcount == 1:
                return True
            self._look(run, call_id, fingerprint)
            return False

    def finish(self, run: str, call_id: str, fingerprint: str, outcome: str) -> str:
        with self._lock:
            self._db.execute(
                "INSERT INTO calls (run, id, fingerprint, begun_at, outcome) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (run, id) DO UPDATE SET outcome = excluded.outcome "
                "WHERE outcome IS NULL AND fingerprint = excluded.fingerprint",
                (run, call_id, fingerprint, time.time(), outcome),
            )
            stands = self._look(run, call_id, fingerprint)
            return outcome if stands is None or stands.outcome is None else stands.outcome

    def forget(self, run: str) -> int:
        """Deletes a run's calls, once it can't be resumed any more; returns how many they were."""
        with self._lock:
            return self._db.execute("DELETE FROM calls WHERE run = ?", (run,)).rowcount

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _look(self, run: str, call_id: str, fingerprint: str) -> Entry | None:
        row = self._db.execute(
            "SELECT fingerprint, outcome FROM calls WHERE run = ? AND id = ?", (run, call_id)
        ).fetchone()
        if row is None:
            return None
        if row[0] != fingerprint:
            raise JournalConflict(
                f"The call id {call_id!r} was already used in this run, for another tool or other arguments; "
                "give every call an id of its own."
            )
        return Entry(*row)
