"""References within a JSON schema, followed: RFC 6901 pointers behind a `#`. Knows nothing of their use."""

from __future__ import annotations

from typing import Any


def followed(root: Any, reference: str) -> Any:
    """What `#` or `#/…` stands for in `root`; None for what is not there, an anchor, or another document.

    Any: a schema is JSON.
    """
    start, *names = reference.split("/")
    if start != "#":
        return None
    value = root
    for name in (name.replace("~1", "/").replace("~0", "~") for name in names):
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value
