"""Keys by which a client begins a run at most once, however often it asks: kept a day, each with what was asked.

Knows nothing of HTTP.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import NamedTuple

from app.clock import steady
from app.data.database import Database, insert, row
from app.data.errors import KeyReused

KEPT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RunKey:
    """A client's key; `body` is a digest of all that was asked with it."""

    key: str
    body: str


class Started(NamedTuple):
    """A run that was begun: its answer's message, and the question's."""

    run_id: str
    message_id: str
    question_id: str


class RunKeys:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def run_of(self, user: str, key: RunKey) -> Started | None:
        """The run that was begun with this key; None where there is none.

        Raises:
            KeyReused: it was begun with another body.
        """
        found = await self._database.read(
            lambda db: row(
                db, "SELECT body, run_keys.run_id, run_keys.message_id, parent_id FROM run_keys "
                "JOIN messages ON messages.id = run_keys.message_id "
                "JOIN chats ON chats.id = chat_id AND chats.deleted_at IS NULL "
                "WHERE run_keys.user = ? AND key = ? AND run_keys.created_at > ?",
                user, key.key, steady() - KEPT_S,
            )
        )  # fmt: skip
        if found is None:
            return None
        if found["body"] != key.body:
            raise KeyReused(
                f"The Idempotency-Key {key.key!r:.60} was used within a day with another chat or body; accepted: the "
                "very same request, or another key."
            )
        return Started(found["run_id"], found["message_id"], found["parent_id"])


def remember(db: sqlite3.Connection, user: str, key: RunKey, run_id: str, message_id: str) -> None:
    """In the database's thread, where the run begins. What is older than a day is forgotten."""
    now = steady()
    db.execute("DELETE FROM run_keys WHERE created_at <= ?", [now - KEPT_S])
    kept = {"user": user, "key": key.key, "body": key.body, "run_id": run_id, "message_id": message_id}
    insert(db, "run_keys", {**kept, "created_at": now})
