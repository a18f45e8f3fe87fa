"""Filters of a search: a document's fields and its own metadata, compared with values.

    {"media_type": "application/pdf", "year": {"gte": 2020}, "tag": {"in": ["a", "b"]}}

Every condition must hold. Fields of the document are `document`, `source`, `title`, `media_type`, `created_at` and
`updated_at`; any other name is one of its metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FIELDS = {"document": "id", "source": "source", "title": "title", "media_type": "media_type",
          "created_at": "created_at", "updated_at": "updated_at"}  # fmt: skip
OPERATORS = {"eq": "=", "ne": "!=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
MAX_COUNT = 20  # filters
MAX_VALUES = 1000  # of one `in`

Scalar = str | int | float | bool
Filters = Mapping[str, Scalar | Mapping[str, Scalar | Sequence[Scalar]]]


class BadFilter(Exception):
    """A filter that cannot be applied; the message names the accepted values."""


def as_sql(filters: Filters) -> tuple[str, list[Any]]:
    """A condition on the table `documents` and its values.

    Raises:
        BadFilter: an operator is unknown or a value of the wrong kind.
    """
    if len(filters) > MAX_COUNT:
        raise BadFilter(f"There are {len(filters)} filters; up to {MAX_COUNT} are accepted.")
    parts, values = list[str](), list[Any]()
    for name, wanted in filters.items():
        column = FIELDS.get(name)
        if column is None:
            column = "json_extract(metadata, ?)"
            path = "$." + _quoted(name)
        else:
            path = None
        conditions = wanted if isinstance(wanted, Mapping) else {"eq": wanted}
        if not conditions:
            raise BadFilter(f"The filter on {name!r} says nothing. Accepted: {_ACCEPTED}.")
        for operator, value in conditions.items():
            if path is not None:
                values.append(path)
            if operator == "in":
                if not isinstance(value, Sequence) or isinstance(value, str) or not all(map(_is_scalar, value)):
                    raise BadFilter(f"The filter on {name!r}: `in` takes a list of texts, numbers and true or false.")
                if len(value) > MAX_VALUES:
                    raise BadFilter(
                        f"The filter on {name!r}: `in` has {len(value)} values; up to {MAX_VALUES} are taken."
                    )
                parts.append(f"{column} IN ({','.join('?' * len(value))})")
                values += value
            elif operator in OPERATORS:
                if not _is_scalar(value):
                    raise BadFilter(
                        f"The filter on {name!r}: `{operator}` takes a text, a number of up to 64 bits, true or false."
                    )
                parts.append(f"{column} {OPERATORS[operator]} ?")
                values.append(value)
            else:
                raise BadFilter(f"The filter on {name!r} has no operator {operator!r}. Accepted: {_ACCEPTED}.")
    return " AND ".join(parts), values


_ACCEPTED = "a value, or an object with " + ", ".join([*OPERATORS, "in"])


def _is_scalar(value: object) -> bool:
    """Returns whether SQLite can compare with it; its integers have 64 bits."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, str | float)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', "") + '"'
