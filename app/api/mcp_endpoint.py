"""The server's tools as an MCP server at `/mcp`, for other programs on the same port.

Each user has one of their own, so that nobody comes upon another's session. It is opened by its first request, for the
protocol's SDK takes a second to import, and ends with the server: clients keep streams open that would delay its end.
Foreign hosts and origins, and anonymous requests, are refused before anything comes here. Knows nothing of tools: those
that are there at the moment of a request are offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.auth import LOCAL, WHO
from app.errors import stopping
from app.state import State

PATH = "/mcp"


class McpEndpoint:
    """An ASGI app. `close` it with the server; the state's `ending` closes it too."""

    def __init__(self, state: State, version: str) -> None:
        self._state = state
        self._version = version
        self._opened: dict[str, asyncio.Future[ASGIApp]] = {}  # by user
        self._holding: list[asyncio.Task[None]] = []

    def route(self) -> Route:
        return Route(PATH, endpoint=self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._state.ending.is_set():
            await stopping().response()(scope, receive, send)
            return
        user = scope.get(WHO, LOCAL).id
        if user not in self._opened:
            self._opened[user] = asyncio.get_running_loop().create_future()
            self._holding.append(asyncio.create_task(self._hold(user, self._opened[user]), name="mcp"))
        app = await asyncio.shield(self._opened[user])
        await app(scope, receive, send)

    async def close(self) -> None:
        for task in self._holding:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _hold(self, user: str, opened: asyncio.Future[ASGIApp]) -> None:
        """One task opens and closes it, as the SDK's task groups need."""
        try:
            await asyncio.to_thread(importlib.import_module, "tools.mcp.mcp_server")
            from tools.mcp.mcp_server import ToolServer

            server = ToolServer(self._state.tool_service.executor, user=user, version=self._version)
            async with server.http([], idle_s=self._state.settings.mcp_idle_s) as app:
                opened.set_result(app)
                await self._state.ending.wait()
        finally:
            if not opened.done():
                opened.set_exception(stopping())
