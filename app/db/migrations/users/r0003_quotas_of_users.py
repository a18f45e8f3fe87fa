"""Quotas of a user, for all their keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision: str | None = "0002"


def upgrade() -> None:
    op.add_column("users", sa.Column("quota", sa.Text))
