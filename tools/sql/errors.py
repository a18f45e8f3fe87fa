"""Why a query has no answer, in words that a person or a model can act on."""

from __future__ import annotations


class QueryError(Exception):
    """A query was refused, stopped or wrong."""


class Forbidden(QueryError):
    """The query does, or reads, what is not allowed here."""


class Stopped(QueryError):
    """The query went beyond a limit."""


class Mistaken(QueryError):
    """The query is not SQL that this database understands."""
