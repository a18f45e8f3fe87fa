"""The database's shape, as numbered steps. A step that was released is never edited; a change is a new step.

`PRAGMA user_version` holds the number of steps taken. Each runs in a transaction of its own, so a crash between two
leaves a database that the next start can go on with.
"""

from __future__ import annotations

from sqlite_utils import Database

STEPS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE chats (
            id TEXT PRIMARY KEY, title TEXT NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL)""",
        "CREATE INDEX chats_updated ON chats (updated_at DESC)",
        """CREATE TABLE runs (
            id TEXT PRIMARY KEY, chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
            message_id TEXT NOT NULL, status TEXT NOT NULL, params TEXT NOT NULL,
            created_at REAL NOT NULL, ended_at REAL)""",
        "CREATE INDEX runs_chat ON runs (chat_id)",
        "CREATE INDEX runs_running ON runs (status) WHERE status = 'running'",
        """CREATE TABLE messages (
            id TEXT PRIMARY KEY, chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
            position INTEGER NOT NULL, role TEXT NOT NULL, content TEXT NOT NULL, thinking TEXT NOT NULL DEFAULT '',
            run_id TEXT, thinking_s REAL, ttft_s REAL, tokens_per_s REAL, usage TEXT,
            status TEXT NOT NULL, error TEXT, created_at REAL NOT NULL, UNIQUE (chat_id, position))""",
        """CREATE TABLE events (
            run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, seq INTEGER NOT NULL,
            type TEXT NOT NULL, data TEXT NOT NULL, PRIMARY KEY (run_id, seq)) WITHOUT ROWID""",
    ),
    ("CREATE TABLE traces (run_id TEXT PRIMARY KEY REFERENCES runs (id) ON DELETE CASCADE, data TEXT NOT NULL)",),
    (
        """CREATE TABLE responses (
            id TEXT PRIMARY KEY, user TEXT NOT NULL, previous_id TEXT, created_at REAL NOT NULL,
            input TEXT NOT NULL, response TEXT NOT NULL)""",
    ),
)


class NewerDatabase(Exception):
    """The database was written by a newer Ponder than this one."""


def migrate(db: Database) -> None:
    """Take the steps that `db` has not taken yet.

    Raises:
        NewerDatabase: it has taken more steps than there are here.
    """
    (version,) = db.conn.execute("PRAGMA user_version").fetchone()
    if version > len(STEPS):
        raise NewerDatabase(
            f"the database has format {version} and this Ponder knows formats up to {len(STEPS)}: "
            "start the newer Ponder that wrote it, or choose another --data-dir"
        )
    for number, statements in enumerate(STEPS[version:], version + 1):
        db.conn.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                db.conn.execute(statement)
            db.conn.execute(f"PRAGMA user_version = {number}")
        except BaseException:
            db.conn.execute("ROLLBACK")
            raise
        db.conn.execute("COMMIT")
