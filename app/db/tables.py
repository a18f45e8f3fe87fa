"""Tables of the two databases, ponder.db (`CHATS`) and users.db (`USERS`), as the newest migrations leave them, and the
column types that the migrations use, too.

A test holds them to the migrations (tests/app/db/test_migrations.py). The search index and its triggers are SQLite's
own and are in the migrations alone. Knows nothing of who reads or writes.
"""

from __future__ import annotations

from sqlalchemy import (
    REAL,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.types import TypeEngine

CHATS = MetaData()
USERS = MetaData()

# SQLite's files have its own names for these already. Numbers are of eight bytes in both; moments are seconds since the
# epoch.
NUMBER: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")
FLAG: TypeEngine[bool] = Boolean().with_variant(Integer(), "sqlite")

folders = Table(
    "folders", CHATS,
    Column("id", Text, primary_key=True),
    Column("user", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("created_at", NUMBER, nullable=False),
    Column("deleted_at", NUMBER),
)  # fmt: skip
_kept, _deleted = folders.c.deleted_at.is_(None), folders.c.deleted_at.is_not(None)
Index("folders_user", folders.c.user, folders.c.name, unique=True, sqlite_where=_kept, postgresql_where=_kept)
Index("folders_deleted", folders.c.deleted_at, sqlite_where=_deleted, postgresql_where=_deleted)

chats = Table(
    "chats", CHATS,
    Column("id", Text, primary_key=True),
    Column("title", Text, nullable=False),
    Column("created_at", NUMBER, nullable=False),
    Column("updated_at", NUMBER, nullable=False),
    Column("user", Text, nullable=False, server_default="local"),
    Column("leaf_id", Text),
    Column("pinned", FLAG, nullable=False, server_default=text("0")),
    Column("folder_id", Text, ForeignKey(folders.c.id, ondelete="SET NULL")),
    Column("imported", FLAG, nullable=False, server_default=text("0")),
    Column("deleted_at", NUMBER),
    Column("private", FLAG, nullable=False, server_default=text("0")),
    Column("settings", Text),  # as JSON: how its answers are made
)  # fmt: skip
_deleted = chats.c.deleted_at.is_not(None)
Index("chats_listed", chats.c.user, chats.c.pinned.desc(), chats.c.updated_at.desc())
Index("chats_folder", chats.c.folder_id)
Index("chats_deleted", chats.c.deleted_at, sqlite_where=_deleted, postgresql_where=_deleted)

messages = Table(
    "messages", CHATS,
    Column("id", Text, primary_key=True),
    Column("chat_id", Text, ForeignKey(chats.c.id, ondelete="CASCADE"), nullable=False),
    Column("position", Integer, nullable=False),
    Column("role", Text, nullable=False),
    Column("content", Text, nullable=False),
    Column("thinking", Text, nullable=False, server_default=""),
    Column("run_id", Text),
    Column("thinking_s", NUMBER),
    Column("ttft_s", NUMBER),
    Column("tokens_per_s", NUMBER),
    Column("usage", Text),  # as JSON
    Column("status", Text, nullable=False),
    Column("error", Text),
    Column("created_at", NUMBER, nullable=False),
    # No reference: deleting a chain link by link would end at SQLite's limit of nested triggers.
    Column("parent_id", Text),
    Column("steps", Text),  # as JSON
    Column("grounded", FLAG, nullable=False, server_default=text("0")),  # made from documents, or it may be
    Column("images", Text),  # a JSON list of data: URLs
    Column("files", Text),  # a JSON list of the files that a question was sent with
    Column("model", Text),  # of an answer: the one that wrote it
    UniqueConstraint("chat_id", "position"),
    Index("messages_run", "run_id"),
)  # fmt: skip

runs = Table(
    "runs", CHATS,
    Column("id", Text, primary_key=True),
    Column("chat_id", Text, ForeignKey(chats.c.id, ondelete="CASCADE"), nullable=False),
    Column("message_id", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("params", Text, nullable=False),  # as JSON
    Column("created_at", NUMBER, nullable=False),
    Column("ended_at", NUMBER),
    Index("runs_chat", "chat_id"),
)  # fmt: skip
# A literal: SQLite takes the index only for a query that has the same one.
is_running = runs.c.status == text("'running'")
Index("runs_running", runs.c.status, sqlite_where=is_running, postgresql_where=is_running)

events = Table(
    "events", CHATS,
    Column("run_id", Text, ForeignKey(runs.c.id, ondelete="CASCADE"), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("type", Text, nullable=False),
    Column("data", Text, nullable=False),  # as JSON
    PrimaryKeyConstraint("run_id", "seq"),
    sqlite_with_rowid=False,
)  # fmt: skip

traces = Table(
    "traces", CHATS,
    Column("run_id", Text, ForeignKey(runs.c.id, ondelete="CASCADE"), primary_key=True),
    Column("data", Text, nullable=False),
)  # fmt: skip

run_keys = Table(
    "run_keys", CHATS,
    Column("user", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("message_id", Text, nullable=False),
    Column("run_id", Text, ForeignKey(runs.c.id, ondelete="CASCADE"), nullable=False),
    Column("created_at", NUMBER, nullable=False),
    PrimaryKeyConstraint("user", "key"),
    Index("run_keys_run", "run_id"),
    sqlite_with_rowid=False,
)  # fmt: skip

responses = Table(
    "responses", CHATS,
    Column("id", Text, primary_key=True),
    Column("user", Text, nullable=False),
    Column("previous_id", Text),
    Column("created_at", NUMBER, nullable=False),
    Column("input", Text, nullable=False),  # as JSON
    Column("response", Text, nullable=False),  # as JSON
)  # fmt: skip

texts = Table(  # titles (message_id is null) and messages, searched by their words
    "texts", CHATS,
    Column("id", Integer, primary_key=True),
    Column("chat_id", Text, nullable=False),
    Column("message_id", Text, unique=True),
)  # fmt: skip
_title = texts.c.message_id.is_(None)
Index("texts_title", texts.c.chat_id, unique=True, sqlite_where=_title, postgresql_where=_title)

presets = Table(
    "presets", CHATS,
    Column("id", Text, primary_key=True),
    Column("user", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("icon", Text),
    Column("description", Text, nullable=False, server_default=""),
    Column("settings", Text, nullable=False),  # as JSON, as those of chats
    Column("everybody", FLAG, nullable=False, server_default=text("0")),  # whether all users see it
    Column("imported", FLAG, nullable=False, server_default=text("0")),  # read from a file
    Column("created_at", NUMBER, nullable=False),
    Column("updated_at", NUMBER, nullable=False),
    Index("presets_user", "user", "name", unique=True),
)  # fmt: skip

preset_members = Table(  # users who see another's preset
    "preset_members", CHATS,
    Column("preset_id", Text, ForeignKey(presets.c.id, ondelete="CASCADE"), nullable=False),
    Column("user", Text, nullable=False),
    PrimaryKeyConstraint("preset_id", "user"),
    Index("preset_members_user", "user"),
    sqlite_with_rowid=False,
)  # fmt: skip

prompts = Table(
    "prompts", CHATS,
    Column("id", Text, primary_key=True),
    Column("user", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("created_at", NUMBER, nullable=False),
    Column("updated_at", NUMBER, nullable=False),
    Index("prompts_user", "user", "name", unique=True),
)  # fmt: skip

memory_users = Table(
    "memory_users", CHATS,
    Column("user", Text, primary_key=True),
    Column("enabled", FLAG, nullable=False, server_default=text("1")),
    Column("last_number", Integer, nullable=False, server_default=text("0")),
    sqlite_with_rowid=False,
)  # fmt: skip

memory_notes = Table(
    "memory_notes", CHATS,
    Column("user", Text, nullable=False),
    Column("number", Integer, nullable=False),
    Column("text", Text, nullable=False),
    Column("attribute", Text),  # the one thing that it tells; null where several notes may tell such
    Column("source", Text, nullable=False),
    Column("chat_id", Text, ForeignKey(chats.c.id, ondelete="SET NULL")),
    Column("message_id", Text),
    Column("with_chat", FLAG, nullable=False, server_default=text("0")),  # to be erased with its chat
    Column("created_at", NUMBER, nullable=False),
    Column("changed_at", NUMBER, nullable=False),
    PrimaryKeyConstraint("user", "number"),
    Index("memory_notes_chat", "chat_id"),
    sqlite_with_rowid=False,
)  # fmt: skip

memory_versions = Table(  # of notes, before they were changed
    "memory_versions", CHATS,
    Column("user", Text, nullable=False),
    Column("number", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("text", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("chat_id", Text, ForeignKey(chats.c.id, ondelete="SET NULL")),
    Column("message_id", Text),
    Column("changed_at", NUMBER, nullable=False),
    PrimaryKeyConstraint("user", "number", "version"),
    ForeignKeyConstraint(["user", "number"], ["memory_notes.user", "memory_notes.number"], ondelete="CASCADE"),
    Index("memory_versions_chat", "chat_id"),
    sqlite_with_rowid=False,
)  # fmt: skip

shares = Table(
    "shares", CHATS,
    Column("id", Text, primary_key=True),
    Column("hash", Text, nullable=False, unique=True),  # of the token
    Column("chat_id", Text, ForeignKey(chats.c.id, ondelete="CASCADE"), nullable=False),
    Column("title", Text, nullable=False),
    Column("page", Text, nullable=False),  # HTML, as the chat was
    Column("created_at", NUMBER, nullable=False),
    Column("updated_at", NUMBER, nullable=False),
    Index("shares_chat", "chat_id"),
)  # fmt: skip

files = Table(  # of questions; retrieval has each as an attached collection under its id
    "files", CHATS,
    Column("id", Text, primary_key=True),
    Column("user", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("bytes", Integer, nullable=False),
    Column("chat_id", Text, ForeignKey(chats.c.id, ondelete="CASCADE")),  # null: not sent yet
    Column("created_at", NUMBER, nullable=False),
    Index("files_chat", "chat_id"),
    Index("files_user", "user"),
)  # fmt: skip

artifacts = Table(  # files that tools made
    "artifacts", CHATS,
    Column("id", Text, primary_key=True),
    Column("chat_id", Text, ForeignKey(chats.c.id, ondelete="CASCADE"), nullable=False),
    Column("run_id", Text, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("media_type", Text, nullable=False),
    Column("size", Integer, nullable=False),  # bytes
    Column("digest", Text, nullable=False),  # SHA-256 of the content
    Column("created_at", NUMBER, nullable=False),
    Column("content", LargeBinary, nullable=False),
    Column("app", Text),  # as JSON: what an MCP app's document shows
    UniqueConstraint("chat_id", "name", "version"),
)  # fmt: skip

users = Table(
    "users", USERS,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("created_at", NUMBER, nullable=False),
    Column("disabled_at", NUMBER),
    Column("quota", Text),  # as JSON, for all keys of the user
    Column("models", Text),  # of all their keys: names, as JSON; null: all there are and will be
)  # fmt: skip

keys = Table(
    "keys", USERS,
    Column("id", Text, primary_key=True),
    Column("user", Text, ForeignKey(users.c.id), nullable=False),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False),
    Column("hash", Text, nullable=False, unique=True),
    Column("created_at", NUMBER, nullable=False),
    Column("expires_at", NUMBER),
    Column("revoked_at", NUMBER),
    Column("used_at", NUMBER),
    Column("scopes", Text),  # with blanks between; null: all there are and will be
    Column("quota", Text),  # as JSON
    Column("models", Text),  # their names, as JSON; null: all there are and will be
)  # fmt: skip

sessions = Table(
    "sessions", USERS,
    Column("hash", Text, primary_key=True),
    Column("key_id", Text, ForeignKey(keys.c.id, ondelete="CASCADE"), nullable=False),
    Column("expires_at", NUMBER, nullable=False),
    Index("sessions_key", "key_id"),
    sqlite_with_rowid=False,
)  # fmt: skip

remote_use = Table(  # of remote models
    "remote_use", USERS,
    Column("remote", Text, nullable=False),
    Column("day", Text, nullable=False),
    Column("requests", Integer, nullable=False),
    Column("prompt", Integer, nullable=False),
    Column("completion", Integer, nullable=False),
    Column("cost", NUMBER, nullable=False),
    PrimaryKeyConstraint("remote", "day"),
    sqlite_with_rowid=False,
)  # fmt: skip

usage = Table(
    "usage", USERS,
    Column("key_id", Text, ForeignKey(keys.c.id, ondelete="CASCADE"), nullable=False),
    Column("day", Text, nullable=False),
    Column("requests", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    PrimaryKeyConstraint("key_id", "day"),
    sqlite_with_rowid=False,
)  # fmt: skip
