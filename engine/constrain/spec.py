"""What text a span may write: an algebra of constraints, as plain data.

A JSON schema, a regular expression, a choice or a Lark grammar is a constraint, and so is a sequence, an alternative or
an option of constraints: a tool call is a literal, then a schema, then a literal. Both backends compile the same
algebra. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON text that is valid against a schema (draft 2020-12), its keys in the schema's order.

    `source` is the schema as JSON text: `JsonSchema.of` writes it. `compact` leaves out all white space; otherwise a
    comma and a colon may be followed by one space.
    """

    source: str
    compact: bool = False

    @classmethod
    def of(cls, schema: Mapping[str, Any] | bool, *, compact: bool = False) -> JsonSchema:
        """Any: a schema is JSON."""
        return cls(json.dumps(schema, ensure_ascii=False, separators=(",", ":")), compact)


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that the expression matches as a whole, in the syntax of Rust's `regex`: no look-around, no references."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text of a context-free grammar in Lark's notation, from its rule `start`."""

    source: str


@dataclass(frozen=True, slots=True)
class Until:
    """Any text up to the first `stop`, and the stop itself, which is not empty."""

    stop: str

    def __post_init__(self) -> None:
        if not self.stop:
            raise ValueError("Until needs a stop: the empty text stops before anything")


class _Hashed:
    """Made of constraints, and looked up often: its hash is worked out when it is made, or unpickled."""

    __slots__ = ("_hash",)
    __match_args__: tuple[str, ...]  # a dataclass lists its fields there
    _hash: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((type(self), *self._fields())))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[_Hashed], tuple[object, ...]]:
        return type(self), self._fields()

    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)


@dataclass(frozen=True, slots=True)
class Sequence(_Hashed):
    """One after another."""

    parts: tuple[Constraint, ...]

    __hash__ = _Hashed.__hash__


@dataclass(frozen=True, slots=True)
class OneOf(_Hashed):
    """Any one of them."""

    parts: tuple[Constraint, ...]

    __hash__ = _Hashed.__hash__


@dataclass(frozen=True, slots=True)
class Optional(_Hashed):
    """This, or nothing."""

    part: Constraint

    __hash__ = _Hashed.__hash__


@dataclass(frozen=True, slots=True)
class Repeat(_Hashed):
    """Once or more, with `separator` between."""

    part: Constraint
    separator: str

    __hash__ = _Hashed.__hash__


Constraint = Literal | JsonSchema | Regex | Grammar | Until | Sequence | OneOf | Optional | Repeat

JSON_OBJECT = JsonSchema('{"type":"object"}')


def choice(texts: Iterable[str]) -> OneOf:
    """One of these texts."""
    return OneOf(tuple(Literal(text) for text in texts))


def sequence(*parts: Constraint | str) -> Sequence:
    """Parts one after another; a plain string stands for itself."""
    return Sequence(tuple(Literal(part) if isinstance(part, str) else part for part in parts))
