"""Constraints that a finite automaton can hold, as one regular expression.

Knows nothing of tokens or automata. The expression is in the syntax of Rust's `regex` crate, which llguidance reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from engine.constrain import spec
from engine.constrain.spec import Constraint

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


def regular(constraint: Constraint) -> str | None:
    """The whole constraint as one expression; None where a part of it is not plainly regular."""
    match constraint:
        case spec.Literal(text):
            return escape(text)
        case spec.Regex(pattern):
            return f"(?:{pattern})"
        case spec.Sequence(parts):
            each = _all(parts)
            return None if each is None else "".join(each)
        case spec.OneOf(parts):
            each = _all(parts)
            return f"(?:{'|'.join(each)})" if each else None
        case spec.Optional(part):
            once = regular(part)
            return None if once is None else f"(?:{once})?"
        case spec.Repeat(part, separator):
            once = regular(part)
            return None if once is None else f"{once}(?:{escape(separator)}{once})*"
    return None


def _all(parts: Iterable[Constraint]) -> list[str] | None:
    found = [regular(part) for part in parts]
    whole = [each for each in found if each is not None]
    return whole if len(whole) == len(found) else None


def escape(text: str) -> str:
    """An expression that matches exactly `text`. (`re.escape` also escapes what Rust's `regex` wants left alone.)"""
    return _SPECIAL.sub(lambda match: "\\" + match.group(), text)


def patterns(constraint: Constraint) -> list[str]:
    """Every expression that stands in the constraint, to be checked by itself before it is put among others."""
    match constraint:
        case spec.Regex(pattern):
            return [pattern]
        case spec.Sequence(parts) | spec.OneOf(parts):
            return [pattern for part in parts for pattern in patterns(part)]
        case spec.Optional(part) | spec.Repeat(part, _):
            return patterns(part)
    return []
