"""Filters of a search: a document's fields and its own metadata, compared with values.

    {"media_type": "application/pdf", "year": {"gte": 2020}, "tag": {"in": ["a", "b"]}}

Every condition must hold. Fields of the document are `document`, `source`, `title`, `media_type`, `created_at` and
`updated_at`; any other name is one of its metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

FIELDS = {"document": "id", "source": "source", "title": "title", "media_type": "media_type",
          "created_at": "created_at", "updated_at": "updated_at"}  # fmt: skip
NUMBERS = ("document", "created_at", "updated_at")  # of the fields
OPERATORS = {"eq": "=", "ne": "!=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
MAX_COUNT = 20  # filters
MAX_VALUES = 1000  # of one `in`

Scalar = str | int | float | bool
Filters = Mapping[str, Scalar | Mapping[str, Scalar | Sequence[Scalar]]]


class BadFilter(Exception):
    """A filter that cannot be applied; the message names the accepted values."""


def as_sql(filters: Filters, backend: Literal["sqlite", "postgresql"] = "sqlite") -> tuple[str, list[Any]]:
    """A condition on the table `documents` and its values.

    Numbers are less than texts, and a flag is the number 0 or 1, as SQLite compares them; PostgreSQL's function
    `scalar_order` (`retrieval/postgres/postgres_schema.py`) does the same.

    Raises:
        BadFilter: an operator is unknown or a value of the wrong kind.
    """
    if len(filters) > MAX_COUNT:
        raise BadFilter(f"There are {len(filters)} filters; up to {MAX_COUNT} are accepted.")
    compare = _in_sqlite if backend == "sqlite" else _in_postgres
    parts, values = list[str](), list[Any]()
    for name, wanted in filters.items():
        conditions = wanted if isinstance(wanted, Mapping) else {"eq": wanted}
        if not conditions:
            raise BadFilter(f"The filter on {name!r} says nothing. Accepted: {_ACCEPTED}.")
        for operator, value in conditions.items():
            if operator == "in":
                if not isinstance(value, Sequence) or isinstance(value, str) or not all(map(_is_scalar, value)):
                    raise BadFilter(f"The filter on {name!r}: `in` takes a list of texts, numbers and true or false.")
                if len(value) > MAX_VALUES:
                    raise BadFilter(
                        f"The filter on {name!r}: `in` has {len(value)} values; up to {MAX_VALUES} are taken."
                    )
                part, given = compare(name, "IN", list(value))
            elif operator in OPERATORS:
                if not _is_scalar(value):
                    raise BadFilter(
                        f"The filter on {name!r}: `{operator}` takes a text, a number of up to 64 bits, true or false."
                    )
                part, given = compare(name, OPERATORS[operator], [value])
            else:
                raise BadFilter(f"The filter on {name!r} has no operator {operator!r}. Accepted: {_ACCEPTED}.")
            parts.append(part)
            values += given
    return " AND ".join(parts), values


def _in_sqlite(name: str, operator: str, values: list[Any]) -> tuple[str, list[Any]]:
    column, path = (FIELDS[name], []) if name in FIELDS else ("json_extract(metadata, ?)", ["$." + _quoted(name)])
    places = f"({','.join('?' * len(values))})" if operator == "IN" else "?"
    return f"{column} {operator} {places}", [*path, *values]


def _in_postgres(name: str, operator: str, values: list[Any]) -> tuple[str, list[Any]]:
    """By `scalar_order`, which is negative, 0 or positive, or null where the document has no such field."""
    column, key = (
        (f"to_jsonb({FIELDS[name]})", []) if name in FIELDS else ("metadata_field(metadata, ?)", [_quoted(name)[1:-1]])
    )
    order, given = f"scalar_order({column}, ?::jsonb)", [_as_json(name, value) for value in values]
    if operator != "IN":
        return f"{order} {operator} 0", [*key, *given]
    each = " OR ".join([f"{order} = 0"] * len(given)) or "FALSE"
    return f"({each})", [part for value in given for part in (*key, value)]


def _as_json(name: str, value: Scalar) -> str:
    """A value as the field's own kind of JSON, where it has one: SQLite's columns have an affinity."""
    if name in NUMBERS and isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return json.dumps(value)
    elif name in FIELDS and name not in NUMBERS and not isinstance(value, str):
        value = str(int(value) if isinstance(value, bool) else value)
    if isinstance(value, float) and not math.isfinite(value):
        return "null" if math.isnan(value) else f"{math.copysign(1, value):.0f}e999"
    if isinstance(value, str):  # JSON of PostgreSQL has no NUL; texts are kept with another character in its place
        value = value.replace("\ufdd0", "\ufdd0\ufdd0") if name in FIELDS else value
        value = value.encode("utf-8", "replace").decode().replace("\0", "\ufdd0\ufdd1")
    return json.dumps(value)


_ACCEPTED = "a value, or an object with " + ", ".join([*OPERATORS, "in"])


def _is_scalar(value: object) -> bool:
    """Returns whether SQLite can compare with it; its integers have 64 bits."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, str | float)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', "") + '"'
