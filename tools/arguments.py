"""Arguments as data: one way of writing them, and a hash that stands for exactly them.

Approvals and the journal are bound to the hash, so two calls are the same if and only if their canonical JSON is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def canonical(arguments: Mapping[str, Any]) -> str:
    """JSON with sorted keys and no white space.

    Raises:
        ValueError: they are not JSON: a number that is none, a value of another type, nesting without end.
    """
    try:
        return json.dumps(dict(arguments), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"they are not JSON: {error}") from None


def parsed(arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """A copy of the arguments, which nobody else can change; a string is read as JSON.

    Raises:
        ValueError: they are not a JSON object.
    """
    text = arguments if isinstance(arguments, str) else canonical(arguments)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("they are nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"they must be a JSON object, and are {text[:60]}")
    canonical(value)  # `NaN` is read by Python's parser, and is no JSON
    return value


def fingerprint(name: str, arguments: Mapping[str, Any], origin: str = "") -> str:
    """SHA-256 in hex of the tool, where it comes from, and the arguments."""
    told = json.dumps([origin, name, canonical(arguments)], ensure_ascii=False)
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()


def preview(name: str, arguments: Mapping[str, Any], limit: int = 4000) -> str:
    """The call as a person reads it before approving. Characters that do not show, or turn text around, are escaped."""
    written = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in f"{name}({written})")
    hidden = len(text) - limit
    return text if hidden <= 0 else f"{text[:limit]}… ({hidden} more characters are not shown)"
