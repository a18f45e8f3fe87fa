"""What of a parameter's schema can be held where its value is raw text, not JSON.

A value that can only be a string is raw, or the word null where it may be null; all other values are JSON. Raw text can
be held to a list of values, but not to `pattern`, `minLength` and the like: `RawValue.unheld` names what is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from engine.dialects.closing import ALL_TYPES, Schema, json_types, resolve, type_of

_OF_STRINGS = ("pattern", "minLength", "maxLength", "format")
_UNREAD = ("not", "if", "$dynamicRef", "$recursiveRef")


@dataclass(frozen=True, slots=True)
class RawValue:
    """What a schema says of a value: its types, all its values where they are listed, and what raw text gives up."""

    types: frozenset[str] = ALL_TYPES
    values: tuple[Any, ...] | None = None  # Any: JSON
    unheld: tuple[str, ...] = ()

    @property
    def raw(self) -> bool:
        return "string" in self.types and self.types <= {"string", "null"}

    @property
    def nullable(self) -> bool:
        return "null" in self.types

    def also(self, other: RawValue) -> RawValue:
        """What both say."""
        types = self.types & other.types
        if self.values is None or other.values is None:
            values = other.values if self.values is None else self.values
        else:
            values = tuple(value for value in self.values if value in other.values)
        values = None if values is None else tuple(value for value in values if type_of(value) in types)
        if values is not None:
            types = frozenset(map(type_of, values))
        return RawValue(types, values, tuple(dict.fromkeys(self.unheld + other.unheld)))

    def either(self, other: RawValue) -> RawValue:
        """What one or the other says."""
        mine, others = self._listed, other._listed
        values = None if mine is None or others is None else (*mine, *(value for value in others if value not in mine))
        return RawValue(self.types | other.types, values, tuple(dict.fromkeys(self.unheld + other.unheld)))

    @property
    def _listed(self) -> tuple[Any, ...] | None:
        """Any: JSON."""
        return (None,) if self.values is None and self.types == {"null"} else self.values


_NOTHING = RawValue(frozenset(), ())


def raw_value(schema: Any, root: Schema, seen: frozenset[str] = frozenset()) -> RawValue:
    """Any: a schema is an object or a boolean. `root` is what its references are paths in."""
    if schema is False:
        return _NOTHING
    if schema is True:
        return RawValue()
    here = RawValue(json_types(schema), unheld=tuple(key for key in (*_OF_STRINGS, *_UNREAD) if key in schema))
    for listed in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if listed is not None:
            here = here.also(RawValue(values=tuple(listed)))
    if isinstance(ref := schema.get("$ref"), str):
        target = None if ref in seen else resolve(root, ref)
        here = here.also(RawValue(unheld=("$ref",)) if target is None else raw_value(target, root, seen | {ref}))
    for part in schema.get("allOf", ()):
        here = here.also(raw_value(part, root, seen))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            here = here.also(_cases(key, [raw_value(part, root, seen) for part in schema[key]]))
    return here


def _cases(key: str, cases: Sequence[RawValue]) -> RawValue:
    together = reduce(RawValue.either, cases, _NOTHING)
    texts = [case for case in cases if "string" in case.types]
    values = [value for case in texts for value in case.values or ()]
    overlap = any(case.values is None for case in texts) or len(values) != len(set(map(str, values)))
    if key == "oneOf" and len(texts) > 1 and overlap:
        return together.also(RawValue(unheld=("oneOf",)))
    return together
