"""An MCP server at an address (streamable HTTP), with a limit on what one answer may bring.

Compressed answers are not asked for and not read: what is counted is what there is to hold. Nothing is taken from the
environment, neither proxies nor credentials; redirects are followed within the address's own origin only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

LONGEST = 4 << 20  # bytes of one message
LONGEST_STREAM = 16 << 20  # bytes of one answer, which may be a stream of messages
CONNECT_S = 10.0


@asynccontextmanager
async def http_transport(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:  # the SDK's two streams
    # No timeout for reading: a stream of events may be silent for hours, and calls have timeouts of their own.
    client = httpx2.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(CONNECT_S, read=None),
        trust_env=False,
        transport=_Capped(),
    )
    async with client, streamable_http_client(url, http_client=client, max_sse_event_size=LONGEST) as streams:
        yield streams


class _Capped(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.stream.aclose()
            raise httpx2.DecodingError("it compresses its answer, which was not asked for", request=request)
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = _CappedStream(response.stream, LONGEST_STREAM if events else LONGEST)
        return response


class _CappedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, limit: int) -> None:
        self._inner = inner
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for chunk in self._inner:
            read += len(chunk)
            if read > self._limit:
                raise httpx2.StreamError(f"its answer is longer than {self._limit >> 20} MiB")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()
