"""Client of an MCP server that keeps the server's tools in the registry.

One task owns the connection. Whenever the server's list of tools may have changed, or a call went wrong, the list is
asked for: a server that does not answer that in time is disconnected. The reason for a lost connection is a fault of
the tools' origin; its tools stay, say so when they are called, and the server is tried again, after longer and longer
pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Literal

from mcp import Client
from mcp.client import IncomingMessage, Transport
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp.types import CallToolResult, Implementation, ToolListChangedNotification
from mcp.types import Tool as Offered
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel

from tools.context import AppView, Context
from tools.errors import ToolError
from tools.mcp.apps import AppLinks, document_of, extension, file_name, links_of
from tools.mcp.mcp_settings import McpSettings, check_name
from tools.mcp.offers import MAX_COUNT, content_of, files_of, tools_of
from tools.mcp.transports import ServerFault, StdioTransport, described, http_transport
from tools.registry import Registry
from tools.result import shorten, strict_json
from tools.tool import Tool

log = logging.getLogger("ponder")

CONNECT_S = 30.0  # to start and introduce itself: some programs are fetched first
LIST_S = 10.0  # to answer a listing of its tools
LOOK_S = 0.2  # between two listings
SLACK_S = 5.0  # beyond a call's own time, which the executor keeps
STEP_S = 0.1  # between two reports of progress that are passed on
APP_S = 5.0  # to send an app's document, after a call
APP_RESULT = 1 << 20  # characters of a result as JSON that an app is given
_US = Implementation(name="ponder", version="1")

Status = Literal["connecting", "connected", "down"]


class McpServer:
    """One server as an origin of tools. `pauses_s`: the first and the longest pause before it is tried again."""

    def __init__(
        self,
        name: str,
        settings: McpSettings,
        registry: Registry,
        environment: Mapping[str, str] | None = None,
        *,
        pauses_s: tuple[float, float] = (0.5, 60.0),
        list_s: float = LIST_S,
    ) -> None:
        """`environment` is where the settings' `inherit` is looked up.

        Raises:
            ValueError: the name can't stand before a tool's name.
        """
        self.name = check_name(name)
        self.settings = settings
        self.origin = f"mcp {name}"
        self.status: Status = "connecting"
        self.registry = registry
        self._environment = environment or {}
        self._pauses_s = pauses_s
        self._list_s = list_s
        self._changed = asyncio.Condition()
        self._client: Client | None = None
        self._why = "it has not answered yet"
        self._again_at = 0.0
        self._look = asyncio.Event()
        self._ended = asyncio.Queue[str]()
        self._offered = list[Offered]()
        self._tools = tuple[Tool, ...]()
        self._refused = tuple[str, ...]()
        self._links = AppLinks({}, frozenset(), frozenset(), ())
        self._by_their_name: Mapping[str, Tool] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> McpServer:
        """Begins to connect; does not wait."""
        self._task = asyncio.create_task(self._keep(), name=self.origin)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        self.registry.remove(self.origin)

    async def reached(self, *wanted: Status) -> None:
        """Waits until it has one of these statuses."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.status in wanted)

    async def call(self, tool: str, ctx: Context, arguments: dict[str, Any]) -> Any:
        """Returns the answer of the server's tool: a text, or any JSON value.

        Raises:
            ToolError: it is not connected, answered with an error, or did not answer as the protocol has it.
        """
        result = await self._called(tool, ctx, arguments)
        if result.is_error:
            raise ToolError(_error_text(result))
        for name, content in files_of(result):
            ctx.attach(name, content)
        if (uri := self._links.uris.get(tool)) is not None and ctx.keeps_files:
            await self._attach_app(uri, tool, ctx, arguments, result)
        return content_of(result)

    def app_tool(self, name: str) -> Tool | None:
        """Returns the tool that the server names so, as its apps call it: the result is a `CallToolResult` as JSON.

        Approvals of the tool hold for it. None where there is none that apps may call.
        """
        found = self._by_their_name.get(name)
        if found is None or name not in self._links.callable:
            return None

        async def run(ctx: Context, arguments: dict[str, Any]) -> Any:
            return _json_of(await self._called(name, ctx, arguments))

        return replace(found, _run=run)

    def resource_tool(self) -> Tool:
        """Returns a tool that reads the server's resources for its apps: the result is a `ReadResourceResult` as JSON.

        Its class is that of a tool that only reads: the permission of an operator, or "network".
        """

        async def run(ctx: Context, arguments: dict[str, Any]) -> Any:
            try:
                return _json_of(await self._connected().read_resource(arguments["uri"]))
            except ToolError:
                raise
            except Exception as error:
                self._look.set()
                why = f"did not give {arguments['uri']!r:.200}: {described(error)}"
                raise ToolError(f"The MCP server {self.name} {why}") from None

        settings = self.settings
        return Tool.from_schema(
            f"{self.name}_read_resource", f"Reads a resource of the MCP server {self.name}.", _A_URI, run,
            origin=self.origin, permission=settings.permission or "network", timeout=settings.timeout_s,
            approval=settings.approval or "never", idempotent=True,
        )  # fmt: skip

    def _connected(self) -> Client:
        """
        Raises:
            ToolError: it is not connected.
        """
        client = self._client
        if client is None:
            wait_s = max(self._again_at - time.monotonic(), 0)
            soon = f"it is tried again in {wait_s:.0f} s" if self.status == "down" else "it is being connected"
            raise ToolError(f"The MCP server {self.name} is not connected ({self._why}); {soon}.")
        return client

    async def _called(self, tool: str, ctx: Context, arguments: dict[str, Any]) -> CallToolResult:
        """
        Raises:
            ToolError: it is not connected, or did not answer as the protocol has it.
        """
        client = self._connected()
        try:
            return await client.call_tool(
                tool, arguments, self.settings.timeout_s + SLACK_S, progress_callback=_Progress(ctx)
            )
        except asyncio.CancelledError:
            self._look.set()  # its time was over, or nobody wants it any more: does the server still answer?
            raise
        except Exception as error:
            self._look.set()
            raise ToolError(f"The MCP server {self.name} did not give a result: {described(error)}") from None

    async def _attach_app(
        self, uri: str, tool: str, ctx: Context, arguments: dict[str, Any], result: CallToolResult
    ) -> None:
        """Attaches the document that shows the result, or a sentence that says why it is not shown."""
        try:
            shown = _json_of(result)
            if (length := len(json.dumps(shown, ensure_ascii=False))) > APP_RESULT:
                raise ToolError(f"the result has {length} characters as JSON; accepted: {APP_RESULT}.")
            async with asyncio.timeout(APP_S):
                read = await self._connected().read_resource(uri)
            content, domains, permissions = document_of(read, uri)
            app = AppView(self.name, tool, uri, arguments, shown, domains, permissions)
            ctx.attach(file_name(uri), content, app)
        except TimeoutError:
            ctx.refused.append(f"The app {uri!r:.200} is not shown: the server did not send it within {APP_S:g} s.")
        except Exception as error:  # the result is there all the same
            ctx.refused.append(f"The app {uri!r:.200} is not shown: {shorten(described(error), 500)[0]}")

    async def _keep(self) -> None:
        pauses, failures = growing(*self._pauses_s), 0
        while True:
            began = time.monotonic()
            try:
                why = await self._live()
            except Exception as error:
                why = described(error)
                with contextlib.suppress(asyncio.QueueEmpty):  # the transport's reason says more
                    why = self._ended.get_nowait()
            if time.monotonic() - began > self._pauses_s[1]:
                pauses, failures = growing(*self._pauses_s), 0  # it was well for a while
            pause = next(pauses)
            failures += 1
            if failures == 1:
                log.warning("The MCP server %s is not connected: %s; it is tried again.", self.name, why)
            elif failures.bit_count() == 1:  # ever more rarely, while it stays so
                log.warning("The MCP server %s is not connected after %d attempts: %s", self.name, failures, why)
            self._why, self._again_at = why, time.monotonic() + pause
            self.registry.fail(self.origin, f"{why}; it is tried again.")
            await self._now("down")
            await asyncio.sleep(pause)

    async def _live(self) -> str:
        """One connection, from its beginning to its end; returns or raises why it ended."""
        self._ended = asyncio.Queue[str]()
        self._look.clear()
        async with AsyncExitStack() as stack:
            client = Client(
                self._transport(), read_timeout_seconds=CONNECT_S, message_handler=self._heard, cache=None,
                client_info=_US, extensions=[extension()],
            )  # fmt: skip
            async with asyncio.timeout(CONNECT_S):
                await stack.enter_async_context(client)
            await self._take(await self._listing(client, CONNECT_S))
            self._client = client
            await self._now("connected")
            following = asyncio.create_task(self._follow(client))
            try:
                return await self._watch(client)
            finally:
                self._client, self._why = None, "its connection ended"
                following.cancel()

    async def _watch(self, client: Client) -> str:
        ended = asyncio.create_task(self._ended.get())
        try:
            while True:
                looking = asyncio.create_task(self._look.wait())
                await asyncio.wait({ended, looking}, return_when=asyncio.FIRST_COMPLETED)
                looking.cancel()
                if ended.done():
                    return ended.result()
                self._look.clear()
                await self._take(await self._listing(client, self._list_s))
                await asyncio.wait({ended}, timeout=LOOK_S)
        finally:
            ended.cancel()

    async def _follow(self, client: Client) -> None:
        """Hears of changes as the newer protocol has it: by a subscription. In the older one they come unasked."""
        said = client.server_capabilities.tools
        if client.protocol_version not in MODERN_PROTOCOL_VERSIONS or said is None or not said.list_changed:
            return
        while True:
            with contextlib.suppress(SubscriptionLost, MCPError, TimeoutError):
                async with client.listen(tools_list_changed=True) as events:
                    self._look.set()  # for changes before it listened
                    async for _ in events:
                        self._look.set()
            self._look.set()
            await asyncio.sleep(self._pauses_s[0])

    async def _heard(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._look.set()

    async def _listing(self, client: Client, within_s: float) -> list[Offered]:
        """
        Raises:
            ServerFault: it does not answer in time.
        """
        offered, cursor = list[Offered](), None
        try:
            async with asyncio.timeout(within_s):
                while len(offered) <= MAX_COUNT:
                    page = await client.list_tools(cursor=cursor)
                    offered += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        break
        except TimeoutError:
            raise ServerFault(f"it does not say within {within_s:g} s what it offers") from None
        return offered

    async def _take(self, offered: list[Offered]) -> None:
        """Puts its tools into the registry; an unchanged tool stays the same, and so do its approvals."""
        if offered == self._offered and self.status == "connected":
            return
        if offered != self._offered:
            taken = {tool.name for tool in self.registry if tool.origin != self.origin}
            made = tools_of(offered, self.settings, self.name, self.origin, taken, self.call)
            self._links = links_of(offered)
            hidden = {id(tool) for theirs, tool in made.by_their_name.items() if theirs in self._links.hidden}
            self._tools = tuple(tool for tool in made.tools if id(tool) not in hidden)
            self._offered, self._by_their_name = offered, made.by_their_name
            self._refused = (*made.refused, *self._links.refused)
        self.registry.replace(self.origin, self._tools)
        if self._refused:
            self.registry.fail(self.origin, " ".join(self._refused))

    async def _now(self, status: Status) -> None:
        async with self._changed:
            self.status = status
            self._changed.notify_all()

    def _transport(self) -> Transport:
        settings = self.settings
        if settings.url is not None:
            return http_transport(settings.url, settings.headers)
        assert settings.command is not None
        inherited = {name: self._environment[name] for name in settings.inherit if name in self._environment}
        return StdioTransport(settings.command, {**inherited, **settings.env}, settings.cwd, self._ended.put_nowait)


_A_URI = {
    "type": "object",
    "properties": {"uri": {"type": "string", "minLength": 1, "maxLength": 2048}},
    "required": ["uri"],
    "additionalProperties": False,
}


def _json_of(result: BaseModel) -> dict[str, Any]:
    """Returns a result of the protocol as it is on the wire."""
    value: dict[str, Any] = strict_json(result.model_dump(mode="json", by_alias=True, exclude_none=True))
    return value


def growing(first_s: float, longest_s: float) -> Iterator[float]:
    """Pauses, each twice the one before, up to the longest."""
    pause = first_s
    while True:
        yield pause
        pause = min(2 * pause, longest_s)


class _Progress:
    """Passes a call's progress on, though no more of it than a person can read."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._next = 0.0

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + STEP_S
            self._ctx.progress(shorten(message or "", 200)[0], progress, total)


def _error_text(result: CallToolResult) -> str:
    content = content_of(result)
    return content if isinstance(content, str) and content else f"it failed, and said {content!r:.200}"
