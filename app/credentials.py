"""Credentials of a request: a key in `Authorization: Bearer`, or else the cookie of a session.

Knows nothing of whether they are good.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import cookie_parser

COOKIE = "ponder_session"


def bearer(headers: Headers) -> str | None:
    """The key. Other schemes are for others, such as a proxy in front, and count as nothing."""
    scheme, _, text = headers.get("authorization", "").strip().partition(" ")
    return text.strip() if scheme.lower() == "bearer" and text.strip() else None


def session_token(headers: Headers) -> str | None:
    """The token of the cookie, where no key says it already."""
    if bearer(headers) is not None or (sent := headers.get("cookie")) is None:
        return None
    return cookie_parser(sent).get(COOKIE) or None
