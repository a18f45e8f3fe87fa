"""Which constraints are plainly harmless: whatever they say, soon compiled, and with quick masks.

Told by reading them once: by size, and by what llguidance multiplies out (counts within counts, intersections). All
others are compiled by way of `probe`. It errs towards those: a constraint that is not plain is only compiled twice.
"""

from __future__ import annotations

import json
import re
from typing import Any

from engine.constrain import spec
from engine.constrain.limits import remainders
from engine.constrain.rewrite import exact
from engine.constrain.spec import Constraint

LONGEST_SCHEMA = 16_000  # characters
LONGEST_PATTERN = 400
LONGEST_TOGETHER = 64_000
MOST_COUNT = 10_000  # in a schema: of characters, items, properties
MOST_COUNT_MATCHED = 256  # of the characters of a string with a pattern
MOST_PROPERTIES = 200
MOST_BRANCHES = 64  # of an anyOf
MOST_MULTIPLIED = 12  # branches in all, where some are multiplied with something
MOST_REMAINDERS = 100  # of a multipleOf
MOST_ITEMS = 16  # of a prefixItems
MOST_DEPTH = 64
MOST_REPEATS = 2_000  # characters of all expressions that count, with the counts written out
FORMAT = 10  # characters that a format counts for
WIDE = 16  # times as much for an expression with classes of other than a few ASCII characters

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_WRITTEN = tuple(  # in other keywords
    f'"{name}"'
    for name in ("uniqueItems", "dependencies", "dependentRequired", "dependentSchemas", "not", "propertyNames")
)
MOST_WRITTEN = 4  # of each
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
    written = [source.count(name) for name in _WRITTEN]
    if len(source) > LONGEST_SCHEMA or max(written) > MOST_WRITTEN:
        return None
    try:
        schema = json.loads(source)  # as it is written for llguidance, where that is more
        todo: list[tuple[Any, int]] = [(exact(schema) if any(written) and isinstance(schema, dict) else schema, 0)]
    except (ValueError, RecursionError):  # a refusal is a ValueError, too
        return 0  # refused at once
    length = branches = 0
    multiplied = False
    while todo:
        part, depth = todo.pop()
        if isinstance(part, list):
            todo.extend((each, depth + 1) for each in part)
        elif isinstance(part, dict):  # what stands in an enum is looked at too: it can only make it less plain
            if depth > MOST_DEPTH or len(part) > MOST_PROPERTIES or not _few(part):
                return None
            lists = [some for name in _BRANCHING if isinstance(some := part.get(name), list)]
            branches += sum(map(len, lists))
            several = len(lists) > 1 or len(part.get("allOf") or ()) > 1
            multiplied = multiplied or (bool(lists) and (several or not _MULTIPLIED.isdisjoint(part)))
            keys = part.get("patternProperties")
            for pattern in (part.get("pattern"), *(keys if isinstance(keys, dict) else ())):
                length += _repeats(pattern) if isinstance(pattern, str) else 0
            length += FORMAT * isinstance(part.get("format"), str)
            todo.extend((each, depth + 1) for each in part.values())
    if multiplied and (branches > MOST_MULTIPLIED or "Ref" in source or "$ref" in source):
        return None
    return length


def _few(schema: dict[str, Any]) -> bool:
    """No large counts, no long lists of alternatives or items, no large step."""
    most = MOST_COUNT_MATCHED if "pattern" in schema else MOST_COUNT
    if any(isinstance(count := schema.get(name), (int, float)) and count > most for name in _COUNTS):
        return False
    lists = [(len(some), MOST_BRANCHES) for name in _BRANCHING if isinstance(some := schema.get(name), list)]
    for name, limit in (("prefixItems", MOST_ITEMS), ("patternProperties", MOST_ITEMS)):
        if isinstance(some := schema.get(name), (list, dict)):
            lists.append((len(some), limit))
    if any(length > limit for length, limit in lists):
        return False
    return "multipleOf" not in schema or remainders(schema["multipleOf"]) <= MOST_REMAINDERS


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
