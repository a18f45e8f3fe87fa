"""Scopes and quotas of keys, usage by day, and users that are disabled."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import NUMBER

revision = "0002"
down_revision: str | None = "0001"


def upgrade() -> None:
    op.add_column("keys", sa.Column("scopes", sa.Text))
    op.add_column("keys", sa.Column("quota", sa.Text))
    op.add_column("users", sa.Column("disabled_at", NUMBER))
    op.create_table(
        "usage",
        sa.Column("key_id", sa.Text, sa.ForeignKey("keys.id", ondelete="CASCADE"), nullable=False),
        sa.Column("day", sa.Text, nullable=False),
        sa.Column("requests", sa.Integer, nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("key_id", "day"),
        sqlite_with_rowid=False,
    )
