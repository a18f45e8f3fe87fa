"""Images of questions, as a JSON list of data: URLs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision: str | None = "0008"


def upgrade() -> None:
    op.add_column("messages", sa.Column("images", sa.Text))
