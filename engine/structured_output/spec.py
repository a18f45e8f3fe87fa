"""An algebra of constraints on a span's text, as plain data.

A JSON schema, a regular expression, a choice or a Lark grammar is a constraint, and so is a sequence, an alternative or
an option of constraints: a tool call is a literal, then a schema, then a literal. Knows nothing of tokens, but that
some formats have control tokens in the middle of a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
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
    """Text of a context-free grammar in Lark's notation, from its rule `start`. `control` are the ids of control tokens
    that it refers to, as `<[id]>`."""

    source: str
    control: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Until:
    """Any text up to the first `stop`, and the stop itself, which is not empty."""

    stop: str

    def __post_init__(self) -> None:
        if not self.stop:
            raise ValueError("Until needs a stop: the empty text stops before anything")


@dataclass(frozen=True, slots=True)
class Substring:
    """A run of words of `text`, of `min_length` to `max_length` characters, that begins with a word or a quotation
    mark.

    Raises:
        ValueError: the lengths contradict each other, or nothing in `text` is long enough.
    """

    text: str
    min_length: int = 1
    max_length: int = 1000

    def __post_init__(self) -> None:
        if not 1 <= self.min_length <= min(self.max_length, len(self.text)):
            raise ValueError(
                f"a run of {self.min_length} to {self.max_length} characters of a text that has {len(self.text)}"
            )


@dataclass(frozen=True, slots=True)
class ControlToken:
    """The control token of this id, which is no text."""

    id: int


class _Compound:
    """Made of constraints, and looked up often: 64 tools are some 400 texts. All of them stand in one flat tuple, made
    with the constraint or when it is unpickled, which is hashed once and compared without a step of Python."""

    __slots__ = ("_flat", "_hash")
    __match_args__: tuple[str, ...]  # a dataclass lists its fields there
    _flat: tuple[object, ...]
    _hash: int

    def __post_init__(self) -> None:
        flat: list[object] = [type(self)]
        for field in self._fields():
            parts = field if isinstance(field, tuple) else (field,)
            flat.append(len(parts))  # so that no two constraints have one tuple
            for part in parts:
                flat += part._flat if isinstance(part, _Compound) else _leaf(part)
        object.__setattr__(self, "_flat", tuple(flat))
        object.__setattr__(self, "_hash", hash(self._flat))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Compound):
            return NotImplemented
        return self._hash == other._hash and self._flat == other._flat

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[_Compound], tuple[object, ...]]:
        return type(self), self._fields()

    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)


def _leaf(part: object) -> tuple[object, ...]:
    """A constraint without parts as its type and fields; a text as itself."""
    if isinstance(part, str):
        return (part,)
    return type(part), *(getattr(part, name) for name in type(part).__match_args__)  # type: ignore[attr-defined]  # a dataclass has them


@dataclass(frozen=True, slots=True, eq=False)
class Sequence(_Compound):
    """One after another."""

    parts: tuple[Constraint, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OneOf(_Compound):
    """Any one of them."""

    parts: tuple[Constraint, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Optional(_Compound):
    """This, or nothing."""

    part: Constraint


@dataclass(frozen=True, slots=True, eq=False)
class Repeat(_Compound):
    """Once or more, with `separator` between."""

    part: Constraint
    separator: str


Constraint = (
    Literal | JsonSchema | Regex | Grammar | Until | Substring | ControlToken | Sequence | OneOf | Optional | Repeat
)

JSON_OBJECT = JsonSchema('{"type":"object"}')


def choice(texts: Iterable[str]) -> OneOf:
    """One of these texts."""
    return OneOf(tuple(Literal(text) for text in texts))


def sequence(*parts: Constraint | str) -> Sequence:
    """Parts one after another; a plain string stands for itself."""
    return Sequence(tuple(Literal(part) if isinstance(part, str) else part for part in parts))


def parts(constraint: Constraint) -> Iterator[Constraint]:
    """The constraint and every one within it."""
    yield constraint
    match constraint:
        case Sequence(inner) | OneOf(inner):
            for part in inner:
                yield from parts(part)
        case Optional(part) | Repeat(part, _):
            yield from parts(part)
