"""Small closed JSON schemas as regular expressions, or a refusal that names what is not one.

Closed means that every object lists its properties and allows no others, and that nothing refers, combines or computes.
Such a schema's texts are a regular language, and the expression here is exactly that language, written as
`JsonSchema` says: keys in order, at most one space after a comma or colon.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.constrain.regular import escape

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id"}
)
_INTEGER = r"-?(?:0|[1-9][0-9]{0,17})"
_NUMBER = _INTEGER + r"(?:\.[0-9]{1,17})?(?:[eE][+-]?[0-9]{1,2})?"
_CHARACTER = r'(?:[^"\\\x00-\x1f\x7f]|\\(?:["\\/bfnrt]|u[0-9a-cA-Ce-fE-F][0-9a-fA-F]{3}))'
_ALLOWED = {
    "string": {"minLength", "maxLength"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
}
MOST_LENGTH, MOST_ITEMS, MOST_PROPERTIES, MOST_DEPTH = 64, 8, 32, 4


class NotClosed(Exception):
    """The schema is not a small closed one; the message says where it is more."""


def pattern(source: str, *, compact: bool) -> str:
    """The expression of a schema in JSON text. Raises `NotClosed`."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError):
        raise NotClosed("not JSON, or nested too deeply") from None
    return _Writer("," if compact else ", ?", ":" if compact else ": ?").value(schema, 0)


class _Writer:
    def __init__(self, comma: str, colon: str) -> None:
        self._comma = comma
        self._colon = colon

    def value(self, schema: Any, depth: int) -> str:
        """Any: a schema is JSON."""
        if not isinstance(schema, Mapping):
            raise NotClosed(f"a schema that is {json.dumps(schema)}")
        if depth > MOST_DEPTH:
            raise NotClosed(f"more than {MOST_DEPTH} levels")
        rest = schema.keys() - ANNOTATIONS
        if "const" in rest or "enum" in rest:
            if more := rest - {"const", "enum", "type"} or ({"const", "enum"} <= rest):
                raise NotClosed(f"enum or const beside {more}")
            return self._one_of(schema)
        kinds = schema.get("type")
        if not isinstance(kinds, str) or kinds not in _ALLOWED:
            raise NotClosed("no type" if kinds is None else f"type {json.dumps(kinds)}")
        if unknown := rest - _ALLOWED[kinds] - {"type"}:
            raise NotClosed(f"keyword {sorted(unknown)[0]}")
        match kinds:
            case "string":
                return f'"{_CHARACTER}{_count(schema, "Length", MOST_LENGTH)}"'
            case "integer":
                return _INTEGER
            case "number":
                return _NUMBER
            case "boolean":
                return "(?:true|false)"
            case "null":
                return "null"
            case "array":
                return self._array(schema, depth)
        return self._object(schema, depth)

    def _one_of(self, schema: Mapping[str, Any]) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list):
            raise NotClosed("an enum that is no list")
        if "type" in schema and not all(_is(value, schema["type"]) for value in values):
            raise NotClosed("a type that some of the values do not have")
        if not values or any(isinstance(value, (dict, list, float)) for value in values):
            raise NotClosed("an enum without values, or with values that have parts or decimals")
        return "(?:" + "|".join(escape(json.dumps(value, ensure_ascii=False)) for value in values) + ")"

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        if "items" not in schema:
            raise NotClosed("an array without items")
        item = self.value(schema["items"], depth + 1)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not _whole(least, MOST_ITEMS) or not (most is None or _whole(most, MOST_ITEMS)):
            raise NotClosed(f"minItems or maxItems beyond {MOST_ITEMS}")
        if most is not None and most < least:
            raise NotClosed("maxItems below minItems")
        if most == 0:
            return r"\[\]"
        more = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        filled = f"{item}(?:{self._comma}{item}){more}"
        return rf"\[{filled}\]" if least else rf"\[(?:{filled})?\]"

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if schema.get("additionalProperties") is not False:
            raise NotClosed("an object that is open (additionalProperties is not false)")
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise NotClosed("properties that are no object, or required that is no list")
        if len(properties) > MOST_PROPERTIES:
            raise NotClosed(f"more than {MOST_PROPERTIES} properties")
        if not all(isinstance(name, str) and name in properties for name in required):
            raise NotClosed("a required property without a schema")
        members = [
            (escape(json.dumps(name, ensure_ascii=False)) + self._colon + self.value(part, depth + 1), name in required)
            for name, part in properties.items()
        ]
        return r"\{" + self._members(members) + r"\}"

    def _members(self, members: list[tuple[str, bool]]) -> str:
        """Members in order, the optional ones there or not, with commas between.

        Before the first required member an optional one brings its comma after it, behind it before it. Without a
        required one, any of the optional ones may be the first.
        """
        first = next((i for i, (_, required) in enumerate(members) if required), None)
        if first is not None:
            before = "".join(f"(?:{text}{self._comma})?" for text, _ in members[:first])
            return before + members[first][0] + self._following(members[first + 1 :])
        starts = (text + self._following(members[i + 1 :]) for i, (text, _) in enumerate(members))
        return f"(?:{'|'.join(starts)})?" if members else ""

    def _following(self, members: list[tuple[str, bool]]) -> str:
        return "".join(self._comma + text if required else f"(?:{self._comma}{text})?" for text, required in members)


def _count(schema: Mapping[str, Any], of: str, limit: int) -> str:
    least, most = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    if not _whole(least, limit) or not (most is None or (_whole(most, limit) and most >= least)):
        raise NotClosed(f"min{of} or max{of} beyond {limit}")
    return f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"


def _whole(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _is(value: object, kind: object) -> bool:
    kinds = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
    return kinds.get(type(value)) == kind or (kind == "number" and type(value) is int)
