"""Questions to SQLite files: read-only, within limits, without what the operator hides."""

from tools.sql.database import Database, QueryLimits, Table
from tools.sql.reach import Column, Relation, described
from tools.sql.statement import Forbidden, Mistaken, QueryError, Stopped

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
