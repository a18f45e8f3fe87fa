"""Questions to SQLite files: read-only, within limits, without what the operator hides."""

from tools.sql.database import Database, QueryLimits, Table
from tools.sql.errors import Forbidden, Mistaken, QueryError, Stopped
from tools.sql.reach import Column, Relation, described

__all__ = [
    "Column",
    "Database",
    "Forbidden",
    "Mistaken",
    "QueryError",
    "QueryLimits",
    "Relation",
    "Stopped",
    "Table",
    "described",
]
