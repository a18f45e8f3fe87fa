"""Stored responses, each with its input and the response before it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import NUMBER

revision = "0003"
down_revision: str | None = "0002"


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("previous_id", sa.Text),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("input", sa.Text, nullable=False),
        sa.Column("response", sa.Text, nullable=False),
    )
