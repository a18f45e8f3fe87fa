"""Scopes of keys: each route is in at most one, and some routes count towards limits.

A path that is in no scope is for keys of every scope. A test holds the table to the routes that there are.
Knows nothing of keys.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

Scope = Literal["chat", "v1", "sequences", "documents", "tools", "metrics", "operator"]

SCOPES: tuple[Scope, ...] = get_args(Scope)

# The first that fits, by how a path begins.
_BEGINNINGS: tuple[tuple[str, Scope], ...] = (
    ("/v1", "v1"),
    ("/api/operator", "operator"),
    ("/api/sequences", "sequences"),
    ("/api/(documents|collections|invitations|jobs|search)", "documents"),
    ("/api/(notes|permissions|tools)", "tools"),
    ("/api/chats/[^/]+/permissions", "tools"),
    ("/mcp", "tools"),
    ("/api/(chats|folders|runs|server|strategies)", "chat"),
    ("/metrics", "metrics"),
)
_TABLE = tuple((re.compile(rf"{pattern}(/|$)"), scope) for pattern, scope in _BEGINNINGS)

_METERED = re.compile(
    r"/v1/(chat/completions|completions|responses|embeddings)/?"
    r"|/api/(chats/[^/]+/runs|search|sequences|sequences/[^/]+/(generate|score))/?"
)


def scope_of(path: str) -> Scope | None:
    return next((scope for pattern, scope in _TABLE if pattern.match(path)), None)


def is_metered(method: str, path: str) -> bool:
    """Tells whether a request makes a model work, and so counts towards limits."""
    return method == "POST" and _METERED.fullmatch(path) is not None
