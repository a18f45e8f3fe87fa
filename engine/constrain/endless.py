"""Which constraints could force text without an end: those that lead back into themselves.

`{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}` fits no text, but each piece of it forces the next, and
llguidance would write them down for ever, with the interpreter's lock held. So text is only forced where nothing leads
back; masks are the same with and without. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from typing import Any

from engine.constrain import spec
from engine.constrain.plain import plain
from engine.constrain.references import followed
from engine.constrain.spec import Constraint

_OTHER_REFERENCES = ("$dynamicRef", "$recursiveRef")


def forces_soon(constraint: Constraint) -> bool:
    """Whether what is forced at any place is soon over: the constraint is plain, and nothing in it leads back."""
    if not plain(constraint):
        return False
    todo: list[Constraint] = [constraint]
    while todo:
        match todo.pop():
            case spec.Sequence(parts) | spec.OneOf(parts):
                todo.extend(parts)
            case spec.Optional(inner) | spec.Repeat(inner, _):  # there is always a way out of a repetition
                todo.append(inner)
            case spec.JsonSchema(source, _) if leads_back(source):
                return False
            case spec.Grammar():
                return False
    return True


def leads_back(source: str) -> bool:
    """Whether a schema may refer to itself, directly or by way of others; one that cannot be followed may."""
    if "Ref" not in source and "$ref" not in source:
        return False
    try:
        root = json.loads(source)
        return _Following(root).leads_back()
    except (ValueError, RecursionError):
        return True


class _Following:
    """References of one schema, followed. Any: a schema is JSON."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._open: set[str] = set()
        self._closed: set[str] = set()

    def leads_back(self) -> bool:
        return self._within(self._root)

    def _within(self, part: Any) -> bool:
        todo = [part]
        while todo:
            part = todo.pop()
            if isinstance(part, list):
                todo.extend(part)
            elif isinstance(part, dict):
                if any(name in part for name in _OTHER_REFERENCES):
                    return True
                reference = part.get("$ref")
                if isinstance(reference, str) and self._follow(reference):
                    return True
                todo.extend(part.values())
        return False

    def _follow(self, reference: str) -> bool:
        if reference in self._closed:
            return False
        value = followed(self._root, reference)
        if reference in self._open or reference == "#" or value is None:
            return True  # round in a circle, to the root, or to where it cannot be followed
        self._open.add(reference)
        found = self._within(value)
        self._open.remove(reference)
        self._closed.add(reference)
        return found
