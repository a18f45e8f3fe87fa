"""Users, their keys, and the sessions that keys open."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

from app.config import LOCAL_USER
from app.db.tables import NUMBER

revision = "0001"
down_revision: str | None = None


def upgrade() -> None:
    users = op.create_table(
        "users",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("created_at", NUMBER, nullable=False),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("user", sa.Text, sa.ForeignKey("users.id"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("hash", sa.Text, nullable=False, unique=True),
        sa.Column("created_at", NUMBER, nullable=False),
        sa.Column("expires_at", NUMBER),
        sa.Column("revoked_at", NUMBER),
        sa.Column("used_at", NUMBER),
    )
    op.create_table(
        "sessions",
        sa.Column("hash", sa.Text, primary_key=True),
        sa.Column("key_id", sa.Text, sa.ForeignKey("keys.id", ondelete="CASCADE"), nullable=False),
        sa.Column("expires_at", NUMBER, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("sessions_key", "sessions", ["key_id"])
    # Owns everything where nobody has to say who they are: a key for this user opens it from then on.
    local = {"id": LOCAL_USER, "name": LOCAL_USER, "role": "operator", "created_at": float(int(time.time()))}
    op.bulk_insert(users, [local])
