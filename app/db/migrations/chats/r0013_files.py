"""Files of questions: each is its user's until it is sent, then its chat's; a message keeps what it was sent with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import NUMBER

revision = "0013"
down_revision: str | None = "0012"


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("bytes", sa.Integer, nullable=False),
        sa.Column("chat_id", sa.Text, sa.ForeignKey("chats.id", ondelete="CASCADE")),
        sa.Column("created_at", NUMBER, nullable=False),
    )
    op.create_index("files_chat", "files", ["chat_id"])
    op.create_index("files_user", "files", ["user"])
    op.add_column("messages", sa.Column("files", sa.Text))
