"""Checks of a SQL statement before it runs.

SQLite's authorizer is the guard; this finds statements that the authorizer is not asked about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator


class QueryError(Exception):
    """A query was refused, stopped or wrong."""


class Forbidden(QueryError):
    """The query does, or reads, something that is not allowed here."""


class Stopped(QueryError):
    """The query went beyond a limit."""


class Mistaken(QueryError):
    """The query is not SQL that this database understands."""


MAX_LENGTH = 20_000  # characters
_TOKEN = re.compile(
    r"""(?P<blank>\s+|--[^\n]*(?:\n|\Z)|/\*.*?(?:\*/|\Z))
      | (?P<quoted>'(?:[^']|'')*(?:'|\Z)|"(?:[^"]|"")*(?:"|\Z)|`(?:[^`]|``)*(?:`|\Z)|\[[^\]]*(?:\]|\Z))
      | (?P<word>[^\W\d][\w$]*)
      | (?P<other>\d[\w.]*|.)""",
    re.VERBOSE | re.DOTALL,
)
_READS = frozenset({"SELECT", "WITH", "VALUES"})


def tokens(sql: str) -> Iterator[tuple[str, str]]:
    """Each token's kind (quoted, word or other) and text, without blanks and comments."""
    for match in _TOKEN.finditer(sql):
        if match.lastgroup and match.lastgroup != "blank":
            yield match.lastgroup, match[0]


def joins_by_name(sql: str) -> bool:
    """Returns whether a join is written NATURAL or USING.

    SQLite compares the columns of such a join without asking the authorizer, so a hidden column could be guessed.
    """
    return any(kind == "word" and text.upper() in ("NATURAL", "USING") for kind, text in tokens(sql))


def mentions(sql: str, names: frozenset[str]) -> bool:
    """Returns whether a name (in lower case) stands in `sql`, quoted or not, be it in a string."""
    words = frozenset(re.findall(r"[\w$]+", sql.casefold()))
    return any(name in words or (not re.fullmatch(r"[\w$]+", name) and name in sql.casefold()) for name in names)


def check(sql: str) -> None:
    """
    Raises:
        Forbidden: it is too long, is not one statement, or does not begin as one that reads.
    """
    if len(sql) > MAX_LENGTH:
        raise Forbidden(f"The query has {len(sql):,} characters; accepted: at most {MAX_LENGTH:,}.")
    if "\0" in sql:
        raise Forbidden("The query has a null character; accepted: text without.")
    read = list(tokens(sql))
    while read and read[-1] == ("other", ";"):
        read.pop()
    if ("other", ";") in read:
        raise Forbidden("There is more than one statement; accepted: one SELECT at a time.")
    if not read or read[0][1].upper() not in _READS:
        begins = f"begins with {read[0][1][:40]!r}" if read else "is empty"
        raise Forbidden(f"The query {begins}; accepted: SELECT, WITH … SELECT, or VALUES.")
