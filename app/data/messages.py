"""The messages of chats, as rows: all of these functions are for the database's thread."""

from __future__ import annotations

import json
import sqlite3

from app.data.database import Row, insert, rows
from app.data.steps import load_steps


def messages_of(db: sqlite3.Connection, chat_id: str) -> list[Row]:
    """All of a chat's, in every branch, the oldest first."""
    found = rows(db, "SELECT * FROM messages WHERE chat_id = ? ORDER BY position", chat_id)
    for row in found:
        row["usage"] = json.loads(row["usage"]) if row["usage"] else None
        row["steps"] = load_steps(row["steps"])
    return found


def add_message(db: sqlite3.Connection, chat_id: str, message: Row) -> None:
    """After all that the chat has."""
    (last,) = db.execute("SELECT coalesce(max(position), 0) FROM messages WHERE chat_id = ?", [chat_id]).fetchone()
    insert(db, "messages", {**message, "chat_id": chat_id, "position": last + 1})
