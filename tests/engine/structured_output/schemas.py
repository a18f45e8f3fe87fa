"""Random JSON schemas of every keyword that can be held, and of their combinations."""

from __future__ import annotations

from random import Random
from typing import Any

PATTERNS = ['^[^"]*$', "^a", "b$", "^[a-c]{2,4}$", "x|y", "^\\w+$", "^[^\\\\]+$", "\\d", "^.{0,3}$", "^$", "[^a-z]"]
VALUES = ["a", "b", 1, 0, True, None, 1.5, [1], {"a": 1}, '"', "é\n", {}, [], -2.5, 1e10]
NAMES = ["a", "b", "ab", 'c"', "é", "", "x\ny"]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
LEAVES = ["string", "integer", "number", "boolean", "null", "enum", "const"]
INNER = [*LEAVES, "array", "object", "object", "anyOf", "allOf", "oneOf", "ref", "any", "types"]


def schema(random: Random) -> dict[str, Any]:
    """One with definitions to refer to."""
    return {**_schema(random, 3), "$defs": {"x": _schema(random, 1), "y": _schema(random, 2)}}


def _schema(random: Random, depth: int) -> dict[str, Any]:
    kind = random.choice(INNER if depth else LEAVES)
    match kind:
        case "string":
            return {"type": kind, **_bounds(random, "Length", 6), **_some(random, 0.4, pattern=PATTERNS)}
        case "integer" | "number":
            low = {random.choice(["minimum", "exclusiveMinimum"]): random.choice([0, -5, 3, 2.5, -1.25, 10, 1e3])}
            high = {random.choice(["maximum", "exclusiveMaximum"]): random.choice([10, 20, 12.75, 0.5, 100, 1e6])}
            steps = _some(random, 0.2, multipleOf=[1, 2, 3, 5, 0.5, 0.25, 7, 10])
            return {"type": kind, **_maybe(random, 0.4, low), **_maybe(random, 0.4, high), **steps}
        case "enum":
            return {"enum": random.sample(VALUES, 3)}
        case "const":
            return {"const": random.choice(VALUES)}
        case "any":
            return {}
        case "types":
            return {"type": random.sample(TYPES, 2)}
        case "ref":
            return {"$ref": random.choice(["#/$defs/x", "#/$defs/y"])}
        case "array":
            items = _maybe(random, 0.8, {"items": _schema(random, depth - 1)})
            first = _maybe(random, 0.3, {"prefixItems": [_schema(random, depth - 1) for _ in range(2)]})
            return {"type": kind, **items, **first, **_bounds(random, "Items", 4)}
        case "object":
            return _object(random, depth)
        case "anyOf" | "allOf" | "oneOf":
            beside = _maybe(random, 0.3, _schema(random, depth - 1))
            return {**beside, kind: [_schema(random, depth - 1) for _ in range(random.randint(1, 3))]}
    return {"type": kind}


def _object(random: Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = _maybe(random, 0.9, {"type": "object"})
    if names := random.sample(NAMES, random.randint(0, 3)):
        made["properties"] = {name: _schema(random, depth - 1) for name in names}
    made |= _maybe(random, 0.5, {"required": random.sample(["a", "b", "ab", "zz"], random.randint(0, 2))})
    made |= _maybe(random, 0.6, {"additionalProperties": random.choice([False, _schema(random, depth - 1)])})
    pattern = random.choice(["^a", "b$", '^[^"]+$', "x"])
    made |= _maybe(random, 0.25, {"patternProperties": {pattern: _schema(random, depth - 1)}})
    return made | _maybe(random, 0.2, _bounds(random, "Properties", 4))


def _bounds(random: Random, of: str, most: int) -> dict[str, Any]:
    low = random.randint(0, 3)
    high = random.randint(low, most)
    return {**_maybe(random, 0.4, {f"min{of}": low}), **_maybe(random, 0.4, {f"max{of}": high})}


def _maybe(random: Random, chance: float, part: dict[str, Any]) -> dict[str, Any]:
    return part if random.random() < chance else {}


def _some(random: Random, chance: float, **choices: list[Any]) -> dict[str, Any]:
    return _maybe(random, chance, {name: random.choice(values) for name, values in choices.items()})
