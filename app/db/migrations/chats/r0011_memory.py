"""Memory: each user's notes, the earlier texts of each, and who has switched it off."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import FLAG, NUMBER

revision = "0011"
down_revision: str | None = "0010"


def upgrade() -> None:
    op.create_table(
        "memory_users",
        sa.Column("user", sa.Text, primary_key=True),
        sa.Column("enabled", FLAG, nullable=False, server_default=sa.text("1")),
        sa.Column("last_number", sa.Integer, nullable=False, server_default=sa.text("0")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "memory_notes",
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("attribute", sa.Text),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("chat_id", sa.Text, sa.ForeignKey("chats.id", ondelete="SET NULL")),
        sa.Column("message_id", sa.Text),
        sa.Column("with_chat", FLAG, nullable=False, server_default=sa.text("0")),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("changed_at", NUMBER, nullable=False),
        sa.PrimaryKeyConstraint("user", "number"),
        sqlite_with_rowid=False,
    )
    op.create_index("memory_notes_chat", "memory_notes", ["chat_id"])
    op.create_table(
        "memory_versions",
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("chat_id", sa.Text, sa.ForeignKey("chats.id", ondelete="SET NULL")),
        sa.Column("message_id", sa.Text),
        sa.Column("changed_at", NUMBER, nullable=False),
        sa.PrimaryKeyConstraint("user", "number", "version"),
        sa.ForeignKeyConstraint(["user", "number"], ["memory_notes.user", "memory_notes.number"], ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_index("memory_versions_chat", "memory_versions", ["chat_id"])
