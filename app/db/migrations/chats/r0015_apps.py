"""MCP apps: artifacts that are documents of a server, with what they show."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision: str | None = "0014"


def upgrade() -> None:
    op.add_column("artifacts", sa.Column("app", sa.Text))
