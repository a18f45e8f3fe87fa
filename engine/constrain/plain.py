"""Which constraints are plainly harmless: whatever they say, soon compiled, and with quick masks.

Told by reading them once: by size, and by what llguidance multiplies out (counts within counts, intersections). All
others are compiled by way of `probe`. It errs towards those: a constraint that is not plain is only compiled twice.
"""

from __future__ import annotations

import json
import re
from typing import Any

from engine.constrain import spec
from engine.constrain.spec import Constraint

LONGEST_SCHEMA = 8_000  # characters
LONGEST_PATTERN = 400
LONGEST_TOGETHER = 64_000
MOST_COUNT = 256  # in a schema: of characters, items, properties
MOST_PROPERTIES = 200
MOST_BRANCHES = 16  # of an anyOf
MOST_DEPTH = 64
MOST_REPEATS = 2_000  # characters of all expressions that count, with the counts written out
FORMAT = 10  # characters that a format counts for
WIDE = 16  # times as much for an expression with classes of other than a few ASCII characters

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_HEAVY = frozenset({"patternProperties", "multipleOf", "prefixItems"})
_BRANCHING = ("anyOf", "oneOf", "allOf")
_MULTIPLIED = frozenset({"$ref", "properties", "additionalProperties", "items", "pattern"})  # beside alternatives
_COUNTED = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\d*(?:,\d*)?\}|.", re.DOTALL)
_WIDE_CLASS = re.compile(r"\\[pPwWDS]|\[\^|\.|[^\x00-\x7f]")


def plain(constraint: Constraint) -> bool:
    """Whether it may be compiled without trying it elsewhere first."""
    todo: list[Constraint] = [constraint]
    characters = repeats = 0
    while todo:
        part = todo.pop()
        characters += 1
        match part:
            case spec.Sequence(parts) | spec.OneOf(parts):
                todo.extend(parts)
            case spec.Optional(inner):
                todo.append(inner)
            case spec.Repeat(inner, separator):
                characters += len(separator)
                todo.append(inner)
            case spec.Literal(text) | spec.Until(text):
                characters += len(text)
            case spec.Regex(pattern):
                characters += len(pattern)
                repeats += _repeats(pattern)
            case spec.JsonSchema(source, _):
                characters += len(source)
                written = _expressions(source)
                if written is None:
                    return False
                repeats += written
            case spec.Grammar():
                return False
        if characters > LONGEST_TOGETHER or repeats > MOST_REPEATS:
            return False
    return True


def _expressions(source: str) -> int | None:
    """How long the expressions are in a schema that is plain but for them; None where it is not plain."""
    if len(source) > LONGEST_SCHEMA:
        return None
    try:
        todo: list[tuple[Any, int]] = [(json.loads(source), 0)]  # Any: a schema is JSON
    except (ValueError, RecursionError):
        return 0  # refused at once
    length = 0
    while todo:
        part, depth = todo.pop()
        if isinstance(part, list):
            todo.extend((each, depth + 1) for each in part)
        elif isinstance(part, dict):  # what stands in an enum is looked at too: it can only make it less plain
            if depth > MOST_DEPTH or len(part) > MOST_PROPERTIES or not _HEAVY.isdisjoint(part) or not _few(part):
                return None
            if isinstance(pattern := part.get("pattern"), str):
                length += _repeats(pattern)
            length += FORMAT * isinstance(part.get("format"), str)
            todo.extend((each, depth + 1) for each in part.values())
    return length


def _few(schema: dict[str, Any]) -> bool:
    """No large counts, and nothing to be multiplied out: no intersection, at most one short list of alternatives."""
    if any(isinstance(count := schema.get(name), (int, float)) and count > MOST_COUNT for name in _COUNTS):
        return False
    lists = [(name, branches) for name in _BRANCHING if isinstance(branches := schema.get(name), list)]
    if not lists:
        return True
    (name, branches), *more = lists
    most = 1 if name == "allOf" else MOST_BRANCHES
    return not more and len(branches) <= most and _MULTIPLIED.isdisjoint(schema)


def _repeats(pattern: str) -> int:
    """How long the expression is with its counts written out; 0 where it has none."""
    if len(pattern) > LONGEST_PATTERN:
        return MOST_REPEATS + 1
    if "{" not in pattern:
        return 0
    open_groups, last = [0], 0
    for piece in _PIECE.findall(pattern):
        if piece == "(":
            open_groups.append(0)
        elif piece == ")" and len(open_groups) > 1:
            last = open_groups.pop()
            open_groups[-1] += last
        elif counted := _COUNTED.fullmatch(piece):
            times = max(1, int(counted[2] or counted[1] or 1))
            open_groups[-1] += last * (times - 1)
            last *= times
        elif piece not in "*+?":
            last = 1
            open_groups[-1] += 1
    return sum(open_groups) * (WIDE if _WIDE_CLASS.search(pattern) else 1)
