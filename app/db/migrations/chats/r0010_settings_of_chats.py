"""Settings of chats, as JSON, and the models of answers, as their runs' events name them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision: str | None = "0009"


def upgrade() -> None:
    op.add_column("chats", sa.Column("settings", sa.Text))
    op.add_column("messages", sa.Column("model", sa.Text))
    # `auto` is no model: the router's choice is an event of its own.
    op.execute(
        """UPDATE messages SET model = (
            SELECT json_extract(data, '$.model') FROM events
            WHERE events.run_id = messages.run_id
                AND (type = 'route.answering' OR type = 'run.started' AND json_extract(data, '$.model') <> 'auto')
            ORDER BY seq DESC LIMIT 1)
        WHERE run_id IS NOT NULL"""
    )
