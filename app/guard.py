"""Who may talk to a server that has no passwords yet: nobody through somebody else's web page.

A page on the internet can make a visitor's browser send requests to the visitor's own machine, directly (CSRF) or by
pointing a host name of its own at 127.0.0.1 (DNS rebinding). So a loopback server answers only to loopback names, and
a changing request that a browser marks as coming from another origin is refused. Knows nothing of routes.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import ApiError
from app.loopback import is_loopback

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """ASGI middleware that refuses foreign `Host` and `Origin` headers with 403."""

    def __init__(self, app: ASGIApp, *, bound: str, allowed_hosts: Iterable[str], cors_origins: Iterable[str]) -> None:
        self.app = app
        self.allowed = {bound.lower(), *(h.lower() for h in allowed_hosts)}
        # Bound to the network, any name may be ours, unless the operator listed the names.
        self.check_host = is_loopback(bound) or bool(tuple(allowed_hosts))
        self.origins = set(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope["method"], Headers(scope=scope))):
            await refusal.response()(scope, receive, send)
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
        origin = headers.get("origin")
        if method in _SAFE_METHODS or origin is None or origin in self.origins or "*" in self.origins:
            return None
        if _parses(origin) and urlsplit(origin).netloc == host:
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
