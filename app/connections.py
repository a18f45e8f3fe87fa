"""Notices clients that disconnect, and drains connections before the server ends.

A closed connection cancels its work, which closes the work's sequences: `/v1` promises that an answer that nobody reads
costs nothing. A server that is to stop refuses new work and finishes what it has begun. It still accepts reads, and
requests that a run under way may need: an approval, a cancel.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import ApiError, note

T = TypeVar("T")


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T], read: asyncio.Event | None = None) -> T:
    """The result of `work`, which is cancelled if the client leaves first. `read` is set once `work` has read the body,
    where it was not before.

    Raises:
        ApiError: the client left (it will not read this, but the log may).
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request, read))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "The client closed the connection.", code="client_closed")
    finally:
        await finish(task, gone)


async def _gone(request: Request, read: asyncio.Event | None) -> None:
    if read is not None:
        await read.wait()
    await disconnected(request.receive)


async def finish(*tasks: asyncio.Future[Any]) -> None:
    """Cancel running tasks and wait until their clean-up is done."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_HARMLESS = {"GET", "HEAD", "OPTIONS", "DELETE"}
_LOOK_S = 0.05
_RETRY_AFTER_S = 5  # until another server has taken over, as a rule


class Drain:
    """Shutdown state: whether the server is to stop, and how many requests under way change something."""

    def __init__(self) -> None:
        self.begun = False
        self.working = 0

    def begin(self) -> None:
        """Refuse new work from now on."""
        self.begun = True

    async def wait(self, others: Callable[[], int], limit_s: float, hurry: asyncio.Event) -> bool:
        """Refuse new work from now on, and wait until nothing runs: no request, and nothing that `others` counts.

        False where `limit_s` seconds or `hurry` came before.
        """
        self.begin()
        until = time.monotonic() + limit_s
        while self.working or others():
            if time.monotonic() >= until or hurry.is_set():
                return False
            await asyncio.sleep(_LOOK_S)
        return True


class DrainMiddleware:
    """The middleware that counts and refuses."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app = app
        self.drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _HARMLESS:
            await self.app(scope, receive, send)
            return
        if self.drain.begun and not scope["path"].startswith("/api/runs/"):
            message = "The server is stopping and takes on nothing new; try again shortly."
            retry = {"Retry-After": str(_RETRY_AFTER_S)}
            refusal = ApiError(503, message, code="draining", kind="server_error", headers=retry)
            await note(scope, refusal).response()(scope, receive, send)
            return
        self.drain.working += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.drain.working -= 1
