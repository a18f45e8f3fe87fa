"""The models that a user may ask for, by any key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision: str | None = "0005"


def upgrade() -> None:
    op.add_column("users", sa.Column("models", sa.Text))
