"""Tokens and money that remote models used, by day, for their budgets."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import NUMBER

revision = "0004"
down_revision: str | None = "0003"


def upgrade() -> None:
    op.create_table(
        "remote_use",
        sa.Column("remote", sa.Text, nullable=False),
        sa.Column("day", sa.Text, nullable=False),
        sa.Column("requests", sa.Integer, nullable=False),
        sa.Column("prompt", sa.Integer, nullable=False),
        sa.Column("completion", sa.Integer, nullable=False),
        sa.Column("cost", NUMBER, nullable=False),
        sa.PrimaryKeyConstraint("remote", "day"),
        sqlite_with_rowid=False,
    )
