"""Artifacts: files that tools made in a chat, in versions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import NUMBER

revision = "0014"
down_revision: str | None = "0013"


def upgrade() -> None:
    op.create_table(
        "artifacts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("chat_id", sa.Text, sa.ForeignKey("chats.id", ondelete="CASCADE"), nullable=False),
        sa.Column("run_id", sa.Text, nullable=False),
        sa.Column("call_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("media_type", sa.Text, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("chat_id", "name", "version"),
    )
