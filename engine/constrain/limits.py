"""Schemas that would keep llguidance busy for minutes, which nothing could stop: told by counting, before it sees them.

It multiplies alternatives out where schemas are intersected (`allOf`, or several keywords side by side), and makes an
automaton with a state for every remainder of a `multipleOf`. Everything else it takes costs milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from math import prod
from typing import Any

from engine.constrain.matcher import ConstraintRefused
from engine.constrain.references import followed

MOST_ALTERNATIVES = 1024
MOST_REMAINDERS = 10_000


def check(schema: Mapping[str, Any], parts: Iterable[Mapping[str, Any]]) -> None:
    """`parts` are all the schemas within `schema`. Raises `ConstraintRefused`. Any: a schema is JSON."""
    parts = list(parts)
    steps = [remainders(part["multipleOf"]) for part in parts if "multipleOf" in part]
    total = prod(steps) if any("allOf" in part for part in parts) else sum(steps)
    if total > MOST_REMAINDERS:
        raise ConstraintRefused([f"multipleOf: {total} remainders to tell apart; at most {MOST_REMAINDERS} are held"])
    _Alternatives(schema).of([schema])


def remainders(step: object) -> int:
    """Of what is not a number llguidance says what is wrong."""
    if isinstance(step, bool) or not isinstance(step, (int, float)) or step <= 0:
        return 1
    return int("".join(map(str, Decimal(str(step)).normalize().as_tuple().digits)))


class _Alternatives:
    """Counts what an intersection of schemas is multiplied out to."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[frozenset[int], int] = {}

    def of(self, schemas: list[Any]) -> int:
        """How many alternatives the intersection has; each is looked at once, so references may go round."""
        flat: dict[int, Mapping[str, Any]] = {}
        self._flatten(schemas, flat)
        key = frozenset(flat)
        if key in self._known:
            return self._known[key]
        self._known[key] = 1
        lists = [
            part[name] for part in flat.values() for name in ("anyOf", "oneOf") if isinstance(part.get(name), list)
        ]
        count = prod(sum(self.of([branch]) for branch in branches) for branches in lists if isinstance(branches, list))
        if count > MOST_ALTERNATIVES:
            raise ConstraintRefused(
                [f"allOf, anyOf, oneOf: {count} combinations of alternatives; at most {MOST_ALTERNATIVES} are held"]
            )
        self._known[key] = count
        for same in self._members(flat.values()).values():
            self.of(same)
        return count

    def _flatten(self, schemas: list[Any], flat: dict[int, Mapping[str, Any]]) -> None:
        """What has to hold together, `allOf` and references resolved, by identity."""
        for schema in schemas:
            if isinstance(schema, dict) and id(schema) not in flat:
                flat[id(schema)] = schema
                if isinstance(schema.get("allOf"), list):
                    self._flatten(schema["allOf"], flat)
                if isinstance(reference := schema.get("$ref"), str):
                    anchor = reference.startswith("#") and "/" not in reference  # it may be anywhere: the whole counts
                    self._flatten([self._root if anchor else followed(self._root, reference)], flat)

    def _members(self, schemas: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Any]]:
        """The schemas that one place within is held to: a property, an item."""
        members: dict[tuple[str, str], list[Any]] = {}
        for schema in schemas:
            for keyword in ("properties", "patternProperties"):
                if isinstance(schema.get(keyword), dict):
                    for name, part in schema[keyword].items():
                        members.setdefault((keyword, name), []).append(part)
            for keyword in ("items", "additionalProperties"):
                members.setdefault((keyword, ""), []).append(schema.get(keyword))
        return members
