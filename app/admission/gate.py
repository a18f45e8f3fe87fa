"""The gate before the routes that cost something: a request is refused there before its body is read.

What is left of a key's limits is told in the headers of every answer, in OpenAI's words, and so is what was made less.
Knows nothing of why.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.admission.admission import Admission
from app.admission.rates import Window
from app.admission.ticket import Ticket
from app.auth import LOCAL, WHO, Who
from app.errors import ApiError, note
from app.scopes import is_metered

REDUCED = "X-Ponder-Reduced"


class AdmissionGate:
    """ASGI middleware: 429, or a ticket for what is answered inside."""

    def __init__(self, app: ASGIApp, *, admission: Callable[[], Admission]) -> None:
        self.app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_metered(scope["method"], scope["path"]):
            await self.app(scope, receive, send)
            return
        admission = self._admission()
        who: Who = scope.get(WHO, LOCAL)

        def windows() -> list[Window]:
            return admission.windows(who)

        try:
            ticket = admission.begin(who, strict=is_strict(Headers(scope=scope)))
        except ApiError as refusal:
            await note(scope, refusal).response()(scope, receive, _telling(send, windows))
            return
        await answered(self.app, ticket, windows, scope, receive, send)


async def answered(
    app: ASGIApp, ticket: Ticket, windows: Callable[[], list[Window]], scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a request that was let in, and tell how its key's limits stand."""
    ticket.use()
    try:
        await app(scope, receive, _telling(send, windows, ticket))
    finally:
        ticket.leave()


def _telling(send: Send, windows: Callable[[], list[Window]], ticket: Ticket | None = None) -> Send:
    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            out = MutableHeaders(scope=message)
            for window in windows():
                out[f"x-ratelimit-limit-{window.what}"] = str(window.limit)
                out[f"x-ratelimit-remaining-{window.what}"] = str(window.remaining)
                out[f"x-ratelimit-reset-{window.what}"] = duration(window.reset_s)
            if ticket is not None and ticket.cut:
                out[REDUCED] = ", ".join(f'{what}="{value}"' for what, value in ticket.cut.items())
        await send(message)

    return told


def duration(seconds: float) -> str:
    """As OpenAI writes it: `350ms`, `12s`, `6m0s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def is_strict(headers: Headers) -> bool:
    """Tells whether the client prefers a refusal to less than it asks for (RFC 7240, 4.4)."""
    given = [part.strip().lower() for value in headers.getlist("prefer") for part in value.split(",")]
    return "handling=strict" in given
