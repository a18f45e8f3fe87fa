"""JSON schemas as llguidance may read them: never more texts than the schema means.

It compares the keys of an object as they are written, so a key spelt with an escape (`"\\u0061"` for `"a"`) passes for
an additional one, and a key that comes twice counts twice. A class of characters that holds all control characters lets
an escaped quote or backslash into a string (`[^"]`). And its expressions are Rust's, where a schema's are JavaScript's.
Such schemas are narrowed, which leaves out rare ways to write a value, or refused by keyword. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.constrain import limits
from engine.constrain.matcher import ConstraintRefused
from engine.constrain.rewrite import NAMED, VALUES, exact, schemas

# At most one space after a comma or a colon: no model can loop in white space. The separators are expressions.
_SPACED = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_COMPACT = {"whitespace_flexible": False}
_ESCAPES_WITHOUT_U = 'nrbtf\\"'


def for_guidance(source: str, *, compact: bool) -> str:
    """A schema in JSON text as llguidance's `%json` takes it.

    Raises:
        ConstraintRefused: it is no schema, or uses a keyword in a way that would not be held exactly.
    """
    try:
        schema = json.loads(source)
        if schema is False:
            raise ConstraintRefused(["the schema is false: nothing is valid against it"])
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise ConstraintRefused([f"the schema is {json.dumps(schema)[:40]}; a schema is an object or a boolean"])
        schema = exact(schema)
        parts = list(schemas(schema))
        for part in parts:
            _check_count(part)
        _check_bounds(parts)
        limits.check(schema, parts)
        schema = _with_patterns(schema)
    except RecursionError:
        raise ConstraintRefused(["the schema is nested too deeply"]) from None
    except json.JSONDecodeError as error:
        raise ConstraintRefused([f"the schema is not JSON: {error}"]) from None
    # Where keys are told apart by name, each may have one spelling only; else any character may be written as \uXXXX.
    escapes: dict[str, object] = (
        {"json_allowed_escapes": _ESCAPES_WITHOUT_U}
        if any(map(_tells_keys_apart, parts))
        else {"json_allow_general_unicode_escapes": True}
    )
    options = {**(_COMPACT if compact else _SPACED), **escapes}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _with_patterns(schema: Any) -> Any:
    """The schema with its expressions as `exact_pattern` has them. Any: a schema is JSON."""
    if isinstance(schema, list):
        return [_with_patterns(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "pattern" and isinstance(value, str):
            made[keyword] = exact_pattern(value)
        elif keyword == "patternProperties" and isinstance(value, dict):
            # Whatever such a key does not match is an additional one, so its dot must keep its whole meaning.
            made[keyword] = {exact_pattern(key, dot="."): _with_patterns(part) for key, part in value.items()}
        elif keyword in NAMED and isinstance(value, dict):
            made[keyword] = {name: _with_patterns(part) for name, part in value.items()}
        else:
            made[keyword] = value if keyword in VALUES else _with_patterns(value)
    return made


def _open(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))


def _tells_keys_apart(schema: Mapping[str, Any]) -> bool:
    return _open(schema) and any(schema.get(name) for name in ("properties", "patternProperties", "required"))


def _check_count(schema: Mapping[str, Any]) -> None:
    least = schema.get("minProperties")
    if isinstance(least, (int, float)) and least >= 2 and _open(schema):
        raise ConstraintRefused(
            ["minProperties: 2 or more is held only beside additionalProperties: false, without patternProperties"]
        )


def _check_bounds(parts: list[Mapping[str, Any]]) -> None:
    """A whole number as an exclusive bound is let through where the other bound is less than 1 away."""
    together = any("allOf" in part for part in parts)  # bounds of different schemas may meet
    for part in parts:
        together = together or (_bounded(part) and any(name in part for name in ("$ref", "anyOf", "oneOf")))
    for group in [parts] if together else [[part] for part in parts]:
        for exclusive, other, sign in (
            ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
            ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
        ):
            whole = [bound for bound in _numbers(group, exclusive) if bound == int(bound)]
            for far in (bound for name in other for bound in _numbers(group, name)):
                if any(0 < sign * (far - near) < 1 for near in whole):
                    raise ConstraintRefused([f"{exclusive}: a whole number less than 1 from the other bound, {far}"])


def _bounded(part: Mapping[str, Any]) -> bool:
    return any(name in part for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))


def _numbers(parts: list[Mapping[str, Any]], name: str) -> list[float]:
    """The finite numbers under a keyword. (Whatever else stands there, llguidance says what is wrong.)"""
    values = [part.get(name) for part in parts]
    return [value for value in values if isinstance(value, (int, float)) and abs(value) < 1e300]


_DOT = r"[^\n\r\u2028\u2029]"  # what JavaScript's means; Rust's stops at \n alone
_PIECE = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\[xuU](?:\{[^}]*\}|[0-9a-fA-F]*)|\\.|\[|\.|[^\\\[.]+", re.DOTALL)
_CLASS = re.compile(r"\[(?!\^?\])\^?(?:[^\\\[\]]|\\.)+\]", re.DOTALL)
_NUL = re.compile(r"\\[xuU]\{?0+\}?|.*\x00.*", re.DOTALL)


def exact_pattern(pattern: str, dot: str = _DOT) -> str:
    r"""A schema's expression as llguidance may have it.

    NUL is taken out of every class: a class that then lacks one control character is read right. Brackets inside a
    class and set operations mean something else in Rust.

    Raises:
        ConstraintRefused: it uses one of those, or NUL by itself.
    """
    made: list[str] = []
    at = 0
    while at < len(pattern):
        piece = _PIECE.match(pattern, at)
        if piece is None:  # a lone backslash at the end: llguidance says what is wrong
            return pattern
        text = piece.group()
        if text == "[":
            found = _CLASS.match(pattern, at)
            if found is None or re.search("&&|--|~~", found.group()):
                raise ConstraintRefused([f"pattern {pattern!r}: in a class, brackets, && -- and ~~ must be escaped"])
            text = found.group()
        elif _NUL.fullmatch(text):
            raise ConstraintRefused([f"pattern {pattern!r}: the character NUL"])
        is_set = text[0] == "[" or text[:2] in (r"\p", r"\P")
        made.append(dot if text == "." else rf"[{text}&&[^\x00]]" if is_set else text)
        at += len(text)
    return "".join(made)
