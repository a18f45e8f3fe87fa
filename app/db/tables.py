"""Tables of the two databases, ponder.db (`CHATS`) and users.db (`USERS`), as the newest migrations leave them, and the
column types that the migrations use, too.

Tests hold them to the migrations (tests/app/db/test_migrations.py, test_postgres.py). The search index and its triggers
are each database's own and are in the migrations alone. Knows nothing of who reads or writes.
"""

from __future__ import annotations

from sqlalchemy import (
    REAL,
    BigInteger,
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
    false,
    text,
    true,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

CHATS = MetaData()
USERS = MetaData()

# SQLite's files have its own names for these already. Numbers are of eight bytes in both; moments are seconds since the
# epoch.
NUMBER: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")
FLAG: TypeEngine[bool] = Boolean().with_variant(Integer(), "sqlite")
# PostgreSQL's integers have four bytes, and the order of its texts is the locale's where nothing else is said.
BIG: TypeEngine[int] = Integer().with_variant(BigInteger(), "postgresql")
TEXT: TypeEngine[str] = Text().with_variant(Text(collation="C"), "postgresql")


class insertion_number(FunctionElement[int]):  # noqa: N801  # named as SQLAlchemy's functions are
    """Number of a row in the order of insertion, given one of its table's columns."""

    type = BigInteger()
    inherit_cache = True


@compiles(insertion_number)
def _rowid(element: insertion_number, compiler: SQLCompiler, **_: object) -> str:
    return _numbered(element, compiler, "rowid")


@compiles(insertion_number, "postgresql")
def _identity(element: insertion_number, compiler: SQLCompiler, **_: object) -> str:
    return _numbered(element, compiler, "number")  # app/db/migrations/postgres.py makes it


def _numbered(element: insertion_number, compiler: SQLCompiler, column: str) -> str:
    (of,) = element.clauses
    return compiler.process(of).rpartition(".")[0] + "." + column


class text_position(FunctionElement[int]):  # noqa: N801
    """Place of the second text in the first one, counted from 1; 0 where it is not there."""

    type = Integer()
    inherit_cache = True


@compiles(text_position)
def _instr(element: text_position, compiler: SQLCompiler, **kw: object) -> str:
    return f"instr({compiler.process(element.clauses, **kw)})"


@compiles(text_position, "postgresql")
def _strpos(element: text_position, compiler: SQLCompiler, **kw: object) -> str:
    return f"strpos({compiler.process(element.clauses, **kw)})"


folders = Table(
    "folders", CHATS,
    Column("id", TEXT, primary_key=True),
    Column("user", TEXT, nullable=False),
    Column("name", TEXT, nullable=False),
    Column("created_at", NUMBER, nullable=False),
    Column("deleted_at", NUMBER),
)  # fmt: skip
_kept, _deleted = folders.c.deleted_at.is_(None), folders.c.deleted_at.is_not(None)
Index("folders_user", folders.c.user, folders.c.name, unique=True, sqlite_where=_kept, postgresql_where=_kept)
Index("folders_deleted", folders.c.deleted_at, sqlite_where=_deleted, postgresql_where=_deleted)

chats = Table(
    "chats", CHATS,
    Column("id", TEXT, primary_key=True),
    Column("title", TEXT, nullable=False),
    Column("created_at", NUMBER, nullable=False),
    Column("updated_at", NUMBER, nullable=False),
    Column("user", TEXT, nullable=False, server_default="local"),
    Column("leaf_id", TEXT),
    Column("pinned", FLAG, nullable=False, server_default=false()),
    Column("folder_id", TEXT, ForeignKey(folders.c.id, ondelete="SET NULL")),
    Column("imported", FLAG, nullable=False, server_default=false()),
    Column("deleted_at", NUMBER),
    Column("private", FLAG, nullable=False, server_default=false()),
    Column("settings", TEXT),  # as JSON: how its answers are made
)  # fmt: skip
_deleted = chats.c.deleted_at.is_not(None)
Index("chats_listed", chats.c.user, chats.c.pinned.desc(), chats.c.updated_at.desc())
Index("chats_folder", chats.c.folder_id)
Index("chats_deleted", chats.c.deleted_at, sqlite_where=_deleted, postgresql_where=_deleted)

messages = Table(
    "messages", CHATS,
    Column("id", TEXT, primary_key=True),
    Column("chat_id", TEXT, ForeignKey(chats.c.id, ondelete="CASCADE"), nullable=False),
    Column("position", Integer, nullable=False),
    Column("role", TEXT, nullable=False),
    Column("content", TEXT, nullable=False),
    Column("thinking", TEXT, nullable=False, server_default=""),
    Column("run_id", TEXT),
    Column("thinking_s", NUMBER),
    Column("ttft_s", NUMBER),
    Column("tokens_per_s", NUMBER),
    Column("usage", TEXT),  # as JSON
    Column("status", TEXT, nullable=False),
    Column("error", TEXT),
    Column("created_at", NUMBER, nullable=False),
    # No reference: deleting a chain link by link would end at SQLite's limit of nested triggers.
    Column("parent_id", TEXT),
    Column("steps", TEXT),  # as JSON
    Column("grounded", FLAG, nullable=False, server_default=false()),  # made from documents, or it may be
    Column("images", TEXT),  # a JSON list of data: URLs
    Column("files", TEXT),  # a JSON list of the files that a question was sent with
    Column("model", TEXT),  # of an answer: the one that wrote it
    UniqueConstraint("chat_id", "position"),
    Index("messages_run", "run_id"),
)  # fmt: skip

runs = Table(
    "runs", CHATS,
    Column("id", TEXT, primary_key=True),
    Column("chat_id", TEXT, ForeignKey(chats.c.id, ondelete="CASCADE"), nullable=False),
    Column("message_id", TEXT, nullable=False),
    Column("status", TEXT, nullable=False),
    Column("params", TEXT, nullable=False),  # as JSON
    Column("created_at", NUMBER, nullable=False),
    Column("ended_at", NUMBER),
    Column("server", TEXT),  # of several: the one that makes it; null where there is one
    Index("runs_chat", "chat_id"),
)  # fmt: skip
# A literal: SQLite takes the index only for a query that has the same one.
is_running = runs.c.status == text("'running'")
Index("runs_running", runs.c.status, sqlite_where=is_running, postgresql_where=is_running)

events = Table(
    "events", CHATS,
    Column("run_id", TEXT, ForeignKey(runs.c.id, ondelete="CASCADE"), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("type", TEXT, nullable=False),
    Column("data", TEXT, nullable=False),  # as JSON
    PrimaryKeyConstraint("run_id", "seq"),
    sqlite_with_rowid=False,
)  # fmt: skip

traces = Table(
    "traces", CHATS,
    Column("run_id", TEXT, ForeignKey(runs.c.id, ondelete="CASCADE"), primary_key=True),
    Column("data", TEXT, nullable=False),
)  # fmt: skip

run_keys = Table(
    "run_keys", CHATS,
    Column("user", TEXT, nullable=False),
    Column("key", TEXT, nullable=False),
    Column("body", TEXT, nullable=False),
    Column("message_id", TEXT, nullable=False),
    Column("run_id", TEXT, ForeignKey(runs.c.id, ondelete="CASCADE"), nullable=False),
    Column("created_at", NUMBER, nullable=False),
    PrimaryKeyConstraint("user", "key"),
    Index("run_keys_run", "run_id"),
    sqlite_with_rowid=False,
)  # fmt: skip

responses = Table(
    "responses", CHATS,
    Column("id", TEXT, primary_key=True),
    Column("user", TEXT, nullable=False),
    Column("previous_id", TEXT),
    Column("created_at", NUMBER, nullable=False),
    Column("input", TEXT, nullable=False),  # as JSON
    Column("response", TEXT, nullable=False),  # as JSON
)  # fmt: skip

texts = Table(  # titles (message_id is null) and messages, searched by their words
    "texts", CHATS,
    Column("id", Integer, primary_key=True),
    Column("chat_id", TEXT, nullable=False),
    Column("message_id", TEXT, unique=True),
)  # fmt: skip
_title = texts.c.message_id.is_(None)
Index("texts_title", texts.c.chat_id, unique=True, sqlite_where=_title, postgresql_where=_title)

presets = Table(
    "presets", CHATS,
    Column("id", TEXT, primary_key=True),
    Column("user", TEXT, nullable=False),
    Column("name", TEXT, nullable=False),
    Column("icon", TEXT),
    Column("description", TEXT, nullable=False, server_default=""),
    Column("settings", TEXT, nullable=False),  # as JSON, as those of chats
    Column("everybody", FLAG, nullable=False, server_default=false()),  # whether all users see it
    Column("imported", FLAG, nullable=False, server_default=false()),  # read from a file
    Column("created_at", NUMBER, nullable=False),
    Column("updated_at", NUMBER, nullable=False),
    Index("presets_user", "user", "name", unique=True),
)  # fmt: skip

preset_members = Table(  # users who see another's preset
    "preset_members", CHATS,
    Column("preset_id", TEXT, ForeignKey(presets.c.id, ondelete="CASCADE"), nullable=False),
    Column("user", TEXT, nullable=False),
    PrimaryKeyConstraint("preset_id", "user"),
    Index("preset_members_user", "user"),
    sqlite_with_rowid=False,
)  # fmt: skip

prompts = Table(
    "prompts", CHATS,
    Column("id", TEXT, primary_key=True),
    Column("user", TEXT, nullable=False),
    Column("name", TEXT, nullable=False),
    Column("text", TEXT, nullable=False),
    Column("created_at", NUMBER, nullable=False),
    Column("updated_at", NUMBER, nullable=False),
    Index("prompts_user", "user", "name", unique=True),
)  # fmt: skip

memory_users = Table(
    "memory_users", CHATS,
    Column("user", TEXT, primary_key=True),
    Column("enabled", FLAG, nullable=False, server_default=true()),
    Column("last_number", Integer, nullable=False, server_default=text("0")),
    sqlite_with_rowid=False,
)  # fmt: skip

memory_notes = Table(
    "memory_notes", CHATS,
    Column("user", TEXT, nullable=False),
    Column("number", Integer, nullable=False),
    Column("text", TEXT, nullable=False),
    Column("attribute", TEXT),  # the one thing that it tells; null where several notes may tell such
    Column("source", TEXT, nullable=False),
    Column("chat_id", TEXT, ForeignKey(chats.c.id, ondelete="SET NULL")),
    Column("message_id", TEXT),
    Column("with_chat", FLAG, nullable=False, server_default=false()),  # to be erased with its chat
    Column("created_at", NUMBER, nullable=False),
    Column("changed_at", NUMBER, nullable=False),
    PrimaryKeyConstraint("user", "number"),
    Index("memory_notes_chat", "chat_id"),
    sqlite_with_rowid=False,
)  # fmt: skip

memory_versions = Table(  # of notes, before they were changed
    "memory_versions", CHATS,
    Column("user", TEXT, nullable=False),
    Column("number", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("text", TEXT, nullable=False),
    Column("source", TEXT, nullable=False),
    Column("chat_id", TEXT, ForeignKey(chats.c.id, ondelete="SET NULL")),
    Column("message_id", TEXT),
    Column("changed_at", NUMBER, nullable=False),
    PrimaryKeyConstraint("user", "number", "version"),
    ForeignKeyConstraint(["user", "number"], ["memory_notes.user", "memory_notes.number"], ondelete="CASCADE"),
    Index("memory_versions_chat", "chat_id"),
    sqlite_with_rowid=False,
)  # fmt: skip

shares = Table(
    "shares", CHATS,
    Column("id", TEXT, primary_key=True),
    Column("hash", TEXT, nullable=False, unique=True),  # of the token
    Column("chat_id", TEXT, ForeignKey(chats.c.id, ondelete="CASCADE"), nullable=False),
    Column("title", TEXT, nullable=False),
    Column("page", TEXT, nullable=False),  # HTML, as the chat was
    Column("created_at", NUMBER, nullable=False),
    Column("updated_at", NUMBER, nullable=False),
    Index("shares_chat", "chat_id"),
)  # fmt: skip

files = Table(  # of questions; retrieval has each as an attached collection under its id
    "files", CHATS,
    Column("id", TEXT, primary_key=True),
    Column("user", TEXT, nullable=False),
    Column("name", TEXT, nullable=False),
    Column("bytes", BIG, nullable=False),
    Column("chat_id", TEXT, ForeignKey(chats.c.id, ondelete="CASCADE")),  # null: not sent yet
    Column("created_at", NUMBER, nullable=False),
    Index("files_chat", "chat_id"),
    Index("files_user", "user"),
)  # fmt: skip

artifacts = Table(  # files that tools made
    "artifacts", CHATS,
    Column("id", TEXT, primary_key=True),
    Column("chat_id", TEXT, ForeignKey(chats.c.id, ondelete="CASCADE"), nullable=False),
    Column("run_id", TEXT, nullable=False),
    Column("call_id", TEXT, nullable=False),
    Column("name", TEXT, nullable=False),
    Column("version", Integer, nullable=False),
    Column("media_type", TEXT, nullable=False),
    Column("size", BIG, nullable=False),  # bytes
    Column("digest", TEXT, nullable=False),  # SHA-256 of the content
    Column("created_at", NUMBER, nullable=False),
    Column("content", LargeBinary, nullable=False),
    Column("app", TEXT),  # as JSON: what an MCP app's document shows
    UniqueConstraint("chat_id", "name", "version"),
)  # fmt: skip

users = Table(
    "users", USERS,
    Column("id", TEXT, primary_key=True),
    Column("name", TEXT, nullable=False),
    Column("role", TEXT, nullable=False),
    Column("created_at", NUMBER, nullable=False),
    Column("disabled_at", NUMBER),
    Column("quota", TEXT),  # as JSON, for all keys of the user
    Column("models", TEXT),  # of all their keys: names, as JSON; null: all there are and will be
)  # fmt: skip

keys = Table(
    "keys", USERS,
    Column("id", TEXT, primary_key=True),
    Column("user", TEXT, ForeignKey(users.c.id), nullable=False),
    Column("name", TEXT, nullable=False),
    Column("prefix", TEXT, nullable=False),
    Column("hash", TEXT, nullable=False, unique=True),
    Column("created_at", NUMBER, nullable=False),
    Column("expires_at", NUMBER),
    Column("revoked_at", NUMBER),
    Column("used_at", NUMBER),
    Column("scopes", TEXT),  # with blanks between; null: all there are and will be
    Column("quota", TEXT),  # as JSON
    Column("models", TEXT),  # their names, as JSON; null: all there are and will be
)  # fmt: skip

sessions = Table(
    "sessions", USERS,
    Column("hash", TEXT, primary_key=True),
    Column("key_id", TEXT, ForeignKey(keys.c.id, ondelete="CASCADE"), nullable=False),
    Column("expires_at", NUMBER, nullable=False),
    Index("sessions_key", "key_id"),
    sqlite_with_rowid=False,
)  # fmt: skip

remote_use = Table(  # of remote models
    "remote_use", USERS,
    Column("remote", TEXT, nullable=False),
    Column("day", TEXT, nullable=False),
    Column("requests", BIG, nullable=False),
    Column("prompt", BIG, nullable=False),
    Column("completion", BIG, nullable=False),
    Column("cost", NUMBER, nullable=False),
    PrimaryKeyConstraint("remote", "day"),
    sqlite_with_rowid=False,
)  # fmt: skip

usage = Table(
    "usage", USERS,
    Column("key_id", TEXT, ForeignKey(keys.c.id, ondelete="CASCADE"), nullable=False),
    Column("day", TEXT, nullable=False),
    Column("requests", BIG, nullable=False),
    Column("tokens", BIG, nullable=False),
    PrimaryKeyConstraint("key_id", "day"),
    sqlite_with_rowid=False,
)  # fmt: skip
