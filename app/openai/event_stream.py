"""Replies of `/v1`: server-sent events, encoded once, or one object; errors have a status while that is still possible.

The response starts with its first event, so an error before the first token (a full queue, a bad span) is still a
proper HTTP error. A slow start, or a pause, is bridged by comment pings. Knows nothing of the events' content.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from app.connections import disconnected, finish, while_connected
from app.errors import ApiError, from_exception, note

PING_S = 15.0
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}


def text_json(text: str) -> bytes:
    """A JSON string, in UTF-8."""
    return json.dumps(text, ensure_ascii=False).encode()


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """A response made of events. The generator is closed as soon as the client leaves or the stream ends."""

    ping, done, media = b": ping\n\n", DONE, "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, explain: Callable[[BaseException], ApiError] = from_exception
    ) -> None:
        super().__init__(status_code=200, headers=STREAM_HEADERS, media_type=self.media)
        self.raw_headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        self._events = events
        self._explain = explain
        self._started = False
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(scope, receive, send))
        gone = asyncio.create_task(disconnected(receive))
        ping = asyncio.create_task(self._ping(send))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await finish(work, gone, ping)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    await self._write(send, data)
        except Exception as error:
            refusal = note(scope, self._explain(error))
            if not self._started:
                async with self._lock:
                    self._started = True
                    await refusal.response()(scope, receive, send)
                return
            await self._write(send, self.failed(refusal))
        if self.done:
            await self._write(send, self.done)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def failed(self, refusal: ApiError) -> bytes:
        """The event of an error that came after the first event."""
        return event(refusal.body())

    async def _write(self, send: Send, data: bytes) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(PING_S)
            if self.ping:
                await self._write(send, self.ping)


class ReplyJob(Protocol):
    """A checked request, which is answered once: as chunks of a stream or whole."""

    def chunks(self) -> AsyncGenerator[bytes, None]: ...

    async def whole(self) -> Any: ...  # JSON


async def reply(request: Request, job: ReplyJob, stream: type[EventStream] | None, param: str) -> Response:
    """The job's answer as `stream`, or as one JSON object where that is None. `param` is the field that has the prompt.

    Raises:
        ApiError: the whole answer failed, or the client left.
    """

    def explain(error: BaseException) -> ApiError:
        return from_exception(error, param=param)

    if stream is not None:
        return stream(job.chunks(), explain=explain)
    try:
        return JSONResponse(await while_connected(request, job.whole()))
    except Exception as error:
        raise explain(error) from error
