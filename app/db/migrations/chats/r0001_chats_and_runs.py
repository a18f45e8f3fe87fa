"""Chats, their messages, and the runs that answer them with each one's events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import NUMBER

revision = "0001"
down_revision: str | None = None


def upgrade() -> None:
    op.create_table(
        "chats",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("title", sa.Text, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("updated_at", NUMBER, nullable=False),
    )
    op.create_index("chats_updated", "chats", [sa.text("updated_at DESC")])
    op.create_table(
        "runs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("chat_id", sa.Text, sa.ForeignKey("chats.id", ondelete="CASCADE"), nullable=False),
        sa.Column("message_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("params", sa.Text, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("ended_at", NUMBER),
    )
    op.create_index("runs_chat", "runs", ["chat_id"])
    running = sa.text("status = 'running'")
    op.create_index("runs_running", "runs", ["status"], sqlite_where=running, postgresql_where=running)
    op.create_table(
        "messages",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("chat_id", sa.Text, sa.ForeignKey("chats.id", ondelete="CASCADE"), nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("thinking", sa.Text, nullable=False, server_default=""),
        sa.Column("run_id", sa.Text),
        sa.Column("thinking_s", NUMBER),
        sa.Column("ttft_s", NUMBER),
        sa.Column("tokens_per_s", NUMBER),
        sa.Column("usage", sa.Text),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.UniqueConstraint("chat_id", "position"),
    )
    op.create_table(
        "events",
        sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("run_id", "seq"),
        sqlite_with_rowid=False,
    )
