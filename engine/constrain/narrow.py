"""JSON schemas as llguidance may read them: never more texts than the schema means.

llguidance compares the keys of an object as they are written, so a key spelt with an escape (`"\\u0061"` for `"a"`)
passes for an additional one, and a key that comes twice counts twice. Here such schemas are narrowed (some ways of
writing the same value are left out) or refused by keyword. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.constrain.matcher import ConstraintRefused

# At most one space after a comma or a colon: no model can loop in white space. The separators are expressions.
_SPACED = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_COMPACT = {"whitespace_flexible": False}
_ESCAPES_WITHOUT_U = 'nrbtf\\"'


def for_guidance(source: str, *, compact: bool) -> str:
    """A schema in JSON text as llguidance's `%json` takes it. Raises `ConstraintRefused`."""
    try:
        schema = json.loads(source)
    except RecursionError:
        raise ConstraintRefused(["the schema is nested too deeply"]) from None
    except ValueError as error:
        raise ConstraintRefused([f"the schema is not JSON: {error}"]) from None
    if schema is False:
        raise ConstraintRefused(["the schema is false: nothing is valid against it"])
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise ConstraintRefused([f"the schema is {json.dumps(schema)[:40]}; a schema is an object or a boolean"])
    try:
        parts = list(_objects(schema))
    except RecursionError:
        raise ConstraintRefused(["the schema is nested too deeply"]) from None
    for part in parts:
        _check_count(part)
    # Where keys are told apart by name, each may have one spelling only; else any character may be written as \uXXXX.
    escapes: dict[str, object] = (
        {"json_allowed_escapes": _ESCAPES_WITHOUT_U}
        if any(map(_tells_keys_apart, parts))
        else {"json_allow_general_unicode_escapes": True}
    )
    options = {**(_COMPACT if compact else _SPACED), **escapes}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every JSON object in a schema: the subschemas, wherever a reference may find them, and harmlessly the rest."""
    if isinstance(value, dict):
        yield value
        for part in value.values():
            yield from _objects(part)
    elif isinstance(value, list):
        for part in value:
            yield from _objects(part)


def _open(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))


def _tells_keys_apart(schema: Mapping[str, Any]) -> bool:
    return _open(schema) and any(schema.get(name) for name in ("properties", "patternProperties"))


def _check_count(schema: Mapping[str, Any]) -> None:
    least = schema.get("minProperties")
    if isinstance(least, (int, float)) and least >= 2 and _open(schema):
        raise ConstraintRefused(
            ["minProperties: 2 or more is held only beside additionalProperties: false, without patternProperties"]
        )
