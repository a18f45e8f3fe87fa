"""Middleware of every process of a server, before authentication: CSRF and host checks, headers, log context.

A page on the internet can make a visitor's browser send requests to the visitor's own machine, directly (CSRF) or by
pointing a host name of its own at 127.0.0.1 (DNS rebinding). So a loopback server answers only to loopback names, and a
changing request that a browser marks as coming from another origin is refused. A changing request with a session's
cookie must come from this server's own page, and say so.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.auth import session_token
from app.errors import ApiError, note
from app.observability import tracing
from app.wire import AnswerHeaders

if TYPE_CHECKING:
    from fastapi import FastAPI

    from app.config import Settings


_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def is_loopback(host: str) -> bool:
    """127.0.0.0/8, ::1, localhost and its subdomains."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class CsrfGuard:
    """ASGI middleware that refuses foreign `Host` and `Origin` headers with 403."""

    def __init__(self, app: ASGIApp, *, bound: str, allowed_hosts: Iterable[str], cors_origins: Iterable[str]) -> None:
        self.app = app
        self.allowed = {bound.lower(), *(h.lower() for h in allowed_hosts)}
        # Bound to the network, any name may be ours, unless the operator listed the names.
        self.check_host = is_loopback(bound) or bool(tuple(allowed_hosts))
        self.origins = set(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope["method"], Headers(scope=scope))):
            await note(scope, refusal).response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        name = (urlsplit(f"//{host}").hostname or "") if _parses(host) else ""
        if self.check_host and not (is_loopback(name) or name in self.allowed):
            message = (
                f"The host name {host!r} is not one of this server's; "
                "accepted: loopback names, and those given with --allowed-host."
            )
            return ApiError(403, message, code="host_not_allowed", kind="permission_error")
        if method in _SAFE_METHODS:
            return None
        origin, by_cookie = headers.get("origin"), session_token(headers) is not None
        if origin is None:
            if not by_cookie or headers.get("sec-fetch-site") in ("same-origin", "none"):
                return None
            message = (
                "A request that changes something and comes with a cookie needs the header Origin of this server's "
                "page; accepted: that, or an API key as `Authorization: Bearer KEY`."
            )
            return ApiError(403, message, code="origin_not_allowed", kind="permission_error")
        if _parses(origin) and urlsplit(origin).netloc == host:
            return None
        if by_cookie:
            message = (
                f"The page at {origin!r} is not this server's, and cannot use its cookie; accepted: an API key as "
                "`Authorization: Bearer KEY`."
            )
            return ApiError(403, message, code="origin_not_allowed", kind="permission_error")
        if origin in self.origins or "*" in self.origins:
            return None
        message = (
            f"The page at {origin!r} is not this server's; to let it in, start Ponder with --cors-origin {origin}."
        )
        return ApiError(403, message, code="origin_not_allowed", kind="permission_error")


def _parses(value: str) -> bool:
    try:
        _ = urlsplit(value if "//" in value else f"//{value}").hostname
    except ValueError:
        return False
    return True


def add_middleware(app: FastAPI, settings: Settings) -> None:
    """Add it: the outermost last, as Starlette has it."""
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(
        CsrfGuard, bound=settings.host, allowed_hosts=settings.allowed_hosts, cors_origins=settings.cors_origins
    )
    app.add_middleware(tracing.Traced)
    app.add_middleware(AnswerHeaders)
