"""Settings of chats, as JSON, the models of answers, as their runs' events name them, and presets and prompts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import FLAG, NUMBER

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
    op.create_table(
        "presets",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("icon", sa.Text),
        sa.Column("description", sa.Text, nullable=False, server_default=""),
        sa.Column("settings", sa.Text, nullable=False),
        sa.Column("everybody", FLAG, nullable=False, server_default=sa.text("0")),
        sa.Column("imported", FLAG, nullable=False, server_default=sa.text("0")),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("updated_at", NUMBER, nullable=False),
    )
    op.create_index("presets_user", "presets", ["user", "name"], unique=True)
    op.create_table(
        "preset_members",
        sa.Column("preset_id", sa.Text, sa.ForeignKey("presets.id", ondelete="CASCADE"), nullable=False),
        sa.Column("user", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("preset_id", "user"),
        sqlite_with_rowid=False,
    )
    op.create_index("preset_members_user", "preset_members", ["user"])
    op.create_table(
        "prompts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("updated_at", NUMBER, nullable=False),
    )
    op.create_index("prompts_user", "prompts", ["user", "name"], unique=True)
