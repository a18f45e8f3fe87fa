"""Requests that a worker answers itself: those that need the engines, and nothing that is kept."""

from __future__ import annotations

import re

_OWN = re.compile(rb"(POST /v1/(chat/)?completions|GET /v1/models(/[^ ?]+)?)(\?[^ ]*)? HTTP/1\.1\r?\n")


def is_own(data: bytes) -> bool:
    """Tells whether a request that begins with these bytes is a worker's: its whole first line must be there."""
    return _OWN.match(data) is not None
