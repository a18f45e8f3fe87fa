"""Chats that are kept from remote models."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import FLAG

revision = "0007"
down_revision: str | None = "0006"


def upgrade() -> None:
    op.add_column("chats", sa.Column("private", FLAG, nullable=False, server_default=sa.text("0")))
