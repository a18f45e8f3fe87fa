"""Servers of runs: where several have one database, the one that makes an answer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import TEXT

revision = "0016"
down_revision: str | None = "0015"


def upgrade() -> None:
    op.add_column("runs", sa.Column("server", TEXT))
