"""Owners, folders and branches: messages are a tree, and keep their calls."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import FLAG, NUMBER

revision = "0004"
down_revision: str | None = "0003"


def upgrade() -> None:
    op.create_table(
        "folders",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
    )
    op.create_index("folders_user", "folders", ["user", "name"], unique=True)
    op.add_column("chats", sa.Column("user", sa.Text, nullable=False, server_default="local"))
    op.add_column("chats", sa.Column("leaf_id", sa.Text))
    op.add_column("chats", sa.Column("pinned", FLAG, nullable=False, server_default=sa.text("0")))
    of_folder = sa.ForeignKey("folders.id", ondelete="SET NULL")
    op.add_column("chats", sa.Column("folder_id", sa.Text, of_folder), inline_references=True)
    op.add_column("chats", sa.Column("imported", FLAG, nullable=False, server_default=sa.text("0")))
    op.drop_index("chats_updated", "chats")
    op.create_index("chats_listed", "chats", ["user", sa.text("pinned DESC"), sa.text("updated_at DESC")])
    op.create_index("chats_folder", "chats", ["folder_id"])
    # No reference: deleting a chain link by link would end at SQLite's limit of nested triggers.
    op.add_column("messages", sa.Column("parent_id", sa.Text))
    op.add_column("messages", sa.Column("steps", sa.Text))
    op.execute(
        """UPDATE messages SET parent_id = (
            SELECT id FROM messages AS earlier
            WHERE earlier.chat_id = messages.chat_id AND earlier.position < messages.position
            ORDER BY position DESC LIMIT 1)"""
    )
    op.execute(
        """UPDATE chats SET leaf_id = (
            SELECT id FROM messages WHERE chat_id = chats.id ORDER BY position DESC LIMIT 1)"""
    )
    op.create_index("messages_run", "messages", ["run_id"])
    op.create_table(
        "run_keys",
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("message_id", sa.Text, nullable=False),
        sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.PrimaryKeyConstraint("user", "key"),
        sqlite_with_rowid=False,
    )
    op.create_index("run_keys_run", "run_keys", ["run_id"])
