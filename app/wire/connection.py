"""An HTTP/1.1 connection: parsing, patience with slow clients, headers.

It extends uvicorn's, against clients that are slow on purpose. A request's head has to come within a time from its
first byte, and the first head within the same time from the connection's start. A body has to come at a least rate
while the server reads it, and in chunks that are not all tiny, as each costs time that all share. An answer has to be
read at a least rate. With too many connections, the one that has been idle for longest is closed, so active clients go
on. Every response gets its request's id, and security headers for browsers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import quote

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from app.errors import REQUEST_ID, is_anthropic
from app.observability.logs import HEADER, begin_request
from app.request_body import IGNORED

# An answer that says otherwise is right: the page's own files do.
SECURITY = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


IGNORED_HEADER = "X-Ponder-Ignored-Fields"


class AnswerHeaders:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        id = scope[REQUEST_ID] = begin_request(Headers(scope=scope).get(HEADER))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault(HEADER, id)
                if is_anthropic(scope["path"]):
                    headers["request-id"] = id
                if ignored := scope.get(IGNORED):
                    headers[IGNORED_HEADER] = ", ".join(quote(name, safe="") for name in ignored)
                for name, value in SECURITY.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_headers)


def dated(app: ASGIApp) -> ASGIApp:
    """Write the Date header (RFC 9110, 6.6.1), by which the page tells elapsed time on the server's clock."""

    async def with_date(scope: Scope, receive: Receive, send: Send) -> None:
        async def dated_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                date = (b"date", formatdate(usegmt=True).encode())
                message = {**message, "headers": [*message.get("headers", ()), date]}
            await send(message)

        await app(scope, receive, dated_send if scope["type"] == "http" else send)

    return with_date


HEAD_BYTES = 32 << 10  # of a request's line and headers
FREE_CHUNKS = 1024  # of a body, however small
CHUNK_BYTES = 128  # that the chunks beyond those must have on average


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of a client's time. Rates are bytes a second, over `body_s` and `read_s`."""

    connections: int = 10_000
    head_s: float = 10.0
    body_s: float = 20.0
    body_rate: int = 512
    read_s: float = 60.0  # in which the unread bytes must have become few (64 KiB at most wait)


@dataclass(slots=True)
class _All:
    """State that the connections of one server share."""

    idle: dict[Connection, None] = field(default_factory=dict)  # that wait for a request's head, the longest first
    turned_away: int = 0


class RefusedRequest(h11.RemoteProtocolError):
    """A request that HTTP allows and this server does not; `code` is for programs."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, error_status_hint=400)
        self.code = code


class _Events(h11.Connection):
    """A client's data as events; its two ways to say a body's length, and its chunks, are looked at here."""

    _chunks = _bytes = 0  # of the body

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """
        Raises:
            RefusedRequest: it says its body's length twice (RFC 9112, 6.1: an attempt at request smuggling), or sends
                a body in too many chunks.
        """
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // CHUNK_BYTES:
                raise RefusedRequest(
                    f"The request's body has {self._chunks} chunks for {self._bytes} bytes; accepted: {FREE_CHUNKS} "
                    f"chunks of any size, and more of {CHUNK_BYTES} bytes or longer on average.", "too_many_chunks",
                )  # fmt: skip
        elif isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise RefusedRequest(
                    "The request has both Content-Length and Transfer-Encoding; accepted: one of them.", "invalid_http"
                )
        return event


class Connection(H11Protocol):
    """One connection. `patience` and `everybody` belong to the class that `protocol_of` makes."""

    patience: Patience
    everybody: _All

    def __init__(self, *arguments: Any, **named: Any) -> None:  # uvicorn's, which it may change
        super().__init__(*arguments, **named)
        self.conn = _Events(h11.SERVER, self.config.h11_max_incomplete_event_size or HEAD_BYTES)
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._phase = ""
        self._received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > self.patience.connections and not self._make_room():
            self.everybody.turned_away += 1
            self._refuse(503, "too_many_connections", "The server has as many connections as it may have.")
            return
        self._enter("head")

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter("")
        self._stop_reading()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._end_soon()
        else:
            self._follow()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_soon()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._end_soon()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reading is None:
            self._reading = self.loop.call_later(self.patience.read_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reading()

    def send_400_response(self, msg: str) -> None:
        """Refuses data that is no HTTP, has too long a head, or is refused by `_Events`."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        if status == 431:
            message = f"The request's line and headers are too long; accepted: at most {HEAD_BYTES} bytes."
            self._refuse(431, "headers_too_large", message)
        elif isinstance(error, RefusedRequest):
            self._refuse(400, error.code, str(error))
        else:
            self._refuse(400, "invalid_http", f"This is no HTTP/1.1 request: {error or msg}.")

    # -- phases

    def _follow(self) -> None:
        """Enter the phase of the bytes received so far."""
        if self.transport.is_closing():
            return
        match self.conn.their_state:
            case h11.IDLE:  # without a deadline while uvicorn has one, for a kept-alive connection
                resting = not self.conn.trailing_data[0] and self.timeout_keep_alive_task is not None
                self._enter("idle" if resting else "head")
            case h11.SEND_BODY:
                self._enter("body")
            case _:
                self._enter("asked")

    def _enter(self, phase: str) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self.everybody.idle.pop(self, None)
        if phase in ("head", "idle"):
            self.everybody.idle[self] = None
        if phase == "head":
            self._deadline = self.loop.call_later(self.patience.head_s, self._late)
        elif phase == "body":
            self._look_again()

    def _look_again(self) -> None:
        self._received = 0
        self._deadline = self.loop.call_later(self.patience.body_s, self._slow)

    def _late(self) -> None:
        """The head did not come in time."""
        if not self._received:
            self.transport.close()
            return
        message = f"The request's headers did not come within {self.patience.head_s:g} s."
        self._refuse(408, "request_timeout", message)

    def _slow(self) -> None:
        """Refuses a body that came too slowly since the last look. A server that does not read is no client's fault."""
        least = self.patience.body_rate * self.patience.body_s
        if self._received >= least or self.flow.read_paused or self.conn.they_are_waiting_for_100_continue:
            self._look_again()
            return
        self._refuse(
            408, "request_timeout", f"The request's body came too slowly; accepted: {self.patience.body_rate} bytes a "
            f"second, over {self.patience.body_s:g} s.",
        )  # fmt: skip

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest; whether there was one."""
        for other in self.everybody.idle:
            other._enter("")
            other.transport.abort()
            self.connections.discard(other)
            return True
        return False

    # -- ends

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Say so, where nothing was said yet, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            began = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if began:
                self.transport.abort()
                return
        body = json.dumps(
            {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
        ).encode()
        headers = [
            ("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close"),
            *SECURITY.items(),
        ]  # fmt: skip
        try:
            for event in (
                h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # an answer was sent already
            self.transport.abort()
            return
        self.transport.close()
        self._end_soon()

    def _end_soon(self) -> None:
        """Abort a closed connection with a client that does not read the rest."""
        self._enter("")
        self.loop.call_later(self.patience.head_s, self.transport.abort)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


def protocol_of(patience: Patience, kind: type[Connection] = Connection, **named: object) -> type[Connection]:
    """The connections of one server, for `uvicorn.Config(http=…)`; `named` belongs to the class, as patience does."""
    return type("ServedConnection", (kind,), {"patience": patience, "everybody": _All(), **named})
