"""Answers made from documents: the mark of an imported one has no events to follow from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import FLAG

revision = "0008"
down_revision: str | None = "0007"


def upgrade() -> None:
    op.add_column("messages", sa.Column("grounded", FLAG, nullable=False, server_default=sa.text("0")))
    op.execute(
        """UPDATE messages SET grounded = 1
        WHERE run_id IN (SELECT run_id FROM events WHERE type = 'citation.sources')"""
    )
    # Files before this had no mark, so what was read from one may quote documents.
    op.execute(
        """UPDATE messages SET grounded = 1
        WHERE role = 'assistant' AND run_id IS NULL AND chat_id IN (SELECT id FROM chats WHERE imported = 1)"""
    )
