"""Databases as Ponder made them before Alembic: its numbered steps, counted by `PRAGMA user_version`.

They are never edited: such databases exist.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

Steps = tuple[tuple[str, ...], ...]

CHATS: Steps = (
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
    (  # chats have an owner, a folder and branches; messages are a tree, and keep their calls
        "CREATE TABLE folders (id TEXT PRIMARY KEY, user TEXT NOT NULL, name TEXT NOT NULL, created_at REAL NOT NULL)",
        "CREATE UNIQUE INDEX folders_user ON folders (user, name)",
        "ALTER TABLE chats ADD COLUMN user TEXT NOT NULL DEFAULT 'local'",
        "ALTER TABLE chats ADD COLUMN leaf_id TEXT",
        "ALTER TABLE chats ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE chats ADD COLUMN folder_id TEXT REFERENCES folders (id) ON DELETE SET NULL",
        "ALTER TABLE chats ADD COLUMN imported INTEGER NOT NULL DEFAULT 0",
        "DROP INDEX chats_updated",
        "CREATE INDEX chats_listed ON chats (user, pinned DESC, updated_at DESC)",
        "CREATE INDEX chats_folder ON chats (folder_id)",
        # No reference: deleting a chain link by link would end at SQLite's limit of nested triggers.
        "ALTER TABLE messages ADD COLUMN parent_id TEXT",
        "ALTER TABLE messages ADD COLUMN steps TEXT",
        """UPDATE messages SET parent_id = (
            SELECT id FROM messages AS earlier
            WHERE earlier.chat_id = messages.chat_id AND earlier.position < messages.position
            ORDER BY position DESC LIMIT 1)""",
        """UPDATE chats SET leaf_id = (
            SELECT id FROM messages WHERE chat_id = chats.id ORDER BY position DESC LIMIT 1)""",
        "CREATE INDEX messages_run ON messages (run_id)",
        """CREATE TABLE run_keys (
            user TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, message_id TEXT NOT NULL,
            run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE, created_at REAL NOT NULL,
            PRIMARY KEY (user, key)) WITHOUT ROWID""",
        "CREATE INDEX run_keys_run ON run_keys (run_id)",
    ),
    (  # titles (message_id is null) and messages, searched by their words
        "CREATE TABLE texts (id INTEGER PRIMARY KEY, chat_id TEXT NOT NULL, message_id TEXT UNIQUE)",
        "CREATE UNIQUE INDEX texts_title ON texts (chat_id) WHERE message_id IS NULL",
        """CREATE VIRTUAL TABLE text_index USING fts5 (
            text, tokenize = 'unicode61 remove_diacritics 2', prefix = '2 3')""",
        "INSERT INTO texts (chat_id) SELECT id FROM chats",
        "INSERT INTO texts (chat_id, message_id) SELECT chat_id, id FROM messages",
        """INSERT INTO text_index (rowid, text)
            SELECT texts.id, coalesce(messages.content, chats.title) FROM texts
            JOIN chats ON chats.id = texts.chat_id LEFT JOIN messages ON messages.id = texts.message_id""",
        """CREATE TRIGGER chat_added AFTER INSERT ON chats BEGIN
            INSERT INTO texts (chat_id) VALUES (new.id);
            INSERT INTO text_index (rowid, text)
                SELECT id, new.title FROM texts WHERE chat_id = new.id AND message_id IS NULL; END""",
        """CREATE TRIGGER chat_renamed AFTER UPDATE OF title ON chats WHEN old.title <> new.title BEGIN
            UPDATE text_index SET text = new.title
                WHERE rowid = (SELECT id FROM texts WHERE chat_id = new.id AND message_id IS NULL); END""",
        """CREATE TRIGGER chat_deleted AFTER DELETE ON chats BEGIN
            DELETE FROM text_index
                WHERE rowid = (SELECT id FROM texts WHERE chat_id = old.id AND message_id IS NULL);
            DELETE FROM texts WHERE chat_id = old.id AND message_id IS NULL; END""",
        """CREATE TRIGGER message_added AFTER INSERT ON messages BEGIN
            INSERT INTO texts (chat_id, message_id) VALUES (new.chat_id, new.id);
            INSERT INTO text_index (rowid, text) SELECT id, new.content FROM texts WHERE message_id = new.id; END""",
        """CREATE TRIGGER message_changed AFTER UPDATE OF content ON messages WHEN old.content <> new.content BEGIN
            UPDATE text_index SET text = new.content WHERE rowid = (SELECT id FROM texts WHERE message_id = new.id);
            END""",
        """CREATE TRIGGER message_deleted AFTER DELETE ON messages BEGIN
            DELETE FROM text_index WHERE rowid = (SELECT id FROM texts WHERE message_id = old.id);
            DELETE FROM texts WHERE message_id = old.id; END""",
    ),
    (  # what was deleted, and when: it may come back for a while (app/db/store.py)
        "ALTER TABLE chats ADD COLUMN deleted_at REAL",
        "ALTER TABLE folders ADD COLUMN deleted_at REAL",
        "CREATE INDEX chats_deleted ON chats (deleted_at) WHERE deleted_at IS NOT NULL",
        "CREATE INDEX folders_deleted ON folders (deleted_at) WHERE deleted_at IS NOT NULL",
        "DROP INDEX folders_user",
        "CREATE UNIQUE INDEX folders_user ON folders (user, name) WHERE deleted_at IS NULL",
    ),
)

USERS: Steps = (
    (
        "CREATE TABLE users (id TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, created_at REAL NOT NULL)",
        """CREATE TABLE keys (
            id TEXT PRIMARY KEY, user TEXT NOT NULL REFERENCES users (id), name TEXT NOT NULL, prefix TEXT NOT NULL,
            hash TEXT NOT NULL UNIQUE, created_at REAL NOT NULL, expires_at REAL, revoked_at REAL, used_at REAL)""",
        """CREATE TABLE sessions (
            hash TEXT PRIMARY KEY, key_id TEXT NOT NULL REFERENCES keys (id) ON DELETE CASCADE,
            expires_at REAL NOT NULL) WITHOUT ROWID""",
        "CREATE INDEX sessions_key ON sessions (key_id)",
        # Owns everything where nobody has to say who they are: a key for this user opens it from then on.
        "INSERT INTO users VALUES ('local', 'local', 'operator', strftime('%s'))",
    ),
    (
        "ALTER TABLE keys ADD COLUMN scopes TEXT",  # with blanks between; null: all there are and will be
        "ALTER TABLE keys ADD COLUMN quota TEXT",  # as JSON
        "ALTER TABLE users ADD COLUMN disabled_at REAL",
        """CREATE TABLE usage (
            key_id TEXT NOT NULL REFERENCES keys (id) ON DELETE CASCADE, day TEXT NOT NULL, requests INTEGER NOT NULL,
            tokens INTEGER NOT NULL, PRIMARY KEY (key_id, day)) WITHOUT ROWID""",
    ),
    ("ALTER TABLE users ADD COLUMN quota TEXT",),  # as JSON, for all keys of the user
)


def make(path: Path, steps: Steps, rows: tuple[str, ...] = ()) -> None:
    """Makes a database that has taken these steps, and holds what the statements of `rows` put in."""
    with closing(sqlite3.connect(path)) as db:
        for statement in (*(each for step in steps for each in step), *rows):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(steps)}")
        db.commit()
