"""Whether a value has the shape of a JSON Schema, as far as the dialects read it: what they then walk, they can trust.

It does not look for keywords that a backend cannot hold, nor for schemas that nothing is valid against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.errors import InvalidParameter

MOST_DEPTH = 100  # levels of objects and lists

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = (
    *("items", "additionalProperties", "additionalItems", "unevaluatedItems", "unevaluatedProperties"),
    *("not", "if", "then", "else", "contains", "propertyNames"),
)


def check_schema(schema: object, path: str) -> None:
    """Raises `InvalidParameter` that names the keyword's path, should a keyword's value be of the wrong kind."""
    level: list[Any] = [schema]  # Any: JSON
    for _ in range(MOST_DEPTH):
        level = [part for whole in level if isinstance(whole, (Mapping, list)) for part in _children(whole)]
    if level:
        raise InvalidParameter(path, f"{path} is nested too deeply; accepted: at most {MOST_DEPTH} levels.")
    _check(schema, path)


def _children(whole: Any) -> Iterator[Any]:
    """Any: JSON."""
    return iter(whole.values() if isinstance(whole, Mapping) else whole)


def _check(schema: object, path: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise invalid(path, schema, "a JSON Schema: an object, true or false")
    for keyword, (fits, accepted) in _KINDS.items():
        if keyword in schema and not fits(schema[keyword]):
            raise invalid(f"{path}.{keyword}", schema[keyword], accepted)
    for keyword in _SCHEMAS_BY_NAME:
        for name, part in schema.get(keyword, {}).items():
            _check(part, f"{path}.{keyword}.{name}")
    for keyword in (*_SCHEMA_LISTS, *_SCHEMAS):
        part = schema.get(keyword, True)
        for i, one in enumerate(part if isinstance(part, list) else [part]):
            _check(one, f"{path}.{keyword}[{i}]" if isinstance(part, list) else f"{path}.{keyword}")
    for name, part in schema.get("dependencies", {}).items():
        if not _strings(part):
            _check(part, f"{path}.dependencies.{name}")


def invalid(path: str, value: object, accepted: str) -> InvalidParameter:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "…"
    return InvalidParameter(path, f"{path} is {shown}; accepted: {accepted}.")


def _strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is(*kinds: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "type": (lambda value: isinstance(value, str) or _strings(value), "a type's name, or a list of them"),
    "required": (_strings, "a list of names"),
    "enum": (_is(list), "a list of values"),
    "$ref": (_is(str), "a string"),
    "minProperties": (_is(int, float), "a number"),
    "dependencies": (_is(Mapping), "an object"),
    **dict.fromkeys(_SCHEMAS_BY_NAME, (_is(Mapping), "an object of schemas by name")),
    **dict.fromkeys(_SCHEMA_LISTS, (_is(list), "a list of schemas")),
    **dict.fromkeys(_SCHEMAS, (_is(Mapping, bool), "a schema")),
    "items": (_is(Mapping, bool, list), "a schema"),
}
