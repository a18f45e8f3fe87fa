"""Links to chats: each a page as the chat was then, found by the hash of its token."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import NUMBER

revision = "0012"
down_revision: str | None = "0011"


def upgrade() -> None:
    op.create_table(
        "shares",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("hash", sa.Text, nullable=False, unique=True),
        sa.Column("chat_id", sa.Text, sa.ForeignKey("chats.id", ondelete="CASCADE"), nullable=False),
        sa.Column("title", sa.Text, nullable=False),
        sa.Column("page", sa.Text, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("updated_at", NUMBER, nullable=False),
    )
    op.create_index("shares_chat", "shares", ["chat_id"])
