"""Queries of SQLite files: read-only, within limits, without tables and columns that the operator hides."""

from tools.sql.grammar import query_pattern
from tools.sql.reach import Column, SqlRelation, described
from tools.sql.sql_database import QueryLimits, SqlDatabase, Table
from tools.sql.statement import Forbidden, Mistaken, QueryError, Stopped

__all__ = [
    "Column",
    "Forbidden",
    "Mistaken",
    "QueryError",
    "QueryLimits",
    "SqlDatabase",
    "SqlRelation",
    "Stopped",
    "Table",
    "described",
    "query_pattern",
]
