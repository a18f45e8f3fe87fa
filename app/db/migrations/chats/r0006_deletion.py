"""The moment of a deletion: it may be undone for a while (app/db/store.py)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db.tables import NUMBER

revision = "0006"
down_revision: str | None = "0005"


def upgrade() -> None:
    for table in ("chats", "folders"):
        op.add_column(table, sa.Column("deleted_at", NUMBER))
        deleted = sa.text("deleted_at IS NOT NULL")
        op.create_index(f"{table}_deleted", table, ["deleted_at"], sqlite_where=deleted, postgresql_where=deleted)
    op.drop_index("folders_user", "folders")
    kept = sa.text("deleted_at IS NULL")
    op.create_index("folders_user", "folders", ["user", "name"], unique=True, sqlite_where=kept, postgresql_where=kept)
