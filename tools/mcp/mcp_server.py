"""Our tools as an MCP server, for other programs that call tools: over standard input and output, or HTTP.

Every call goes through the executor, so the rules for our own models apply to theirs. A call that needs a person's
approval is put to the client's person, where the client can ask (elicitation), and refused where it can't. The client
speaks for its person: the answer it reports is believed. Knows nothing of accounts: its user is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp.types import (
    CallToolRequestParams,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequiredResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    ToolAnnotations,
)
from mcp.types import Tool as Shown
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from starlette.types import ASGIApp

from tools.call_policy import Decision, NeedsApproval
from tools.errors import NotAnswered
from tools.executor import Executor
from tools.outcome import Call, CallProgress, Event, Outcome
from tools.session import Session
from tools.tool import Tool

PATH = "/mcp"
WAIT_S = 900.0  # for a person
SESSIONS = 1000  # of HTTP clients: open at once, and with a known taint
IDLE_S = 1800.0
_QUESTION = {
    "type": "object",
    "properties": {"approve": {"type": "boolean", "title": "Run this call", "default": False}},
    "required": ["approve"],
}

Request = ServerRequestContext[Any, Any]


class ToolServer:
    """Serves the executor's tools to clients of one user, each with a taint of its own where it can be identified."""

    def __init__(self, executor: Executor, *, user: str, name: str = "ponder", version: str = "") -> None:
        self._executor = executor
        self._user = user
        self._tainted = OrderedDict[str, set[str]]()
        self.server = Server[Any](
            name, version=version, on_list_tools=self._list, on_call_tool=self._call, get_tool_input_schema=self._schema
        )

    async def stdio(self) -> None:
        """Serves one client over this process's standard input and output, until it is gone."""
        async with stdio_server() as (heard, said):
            await self.server.run(heard, said, self.server.create_initialization_options())

    @asynccontextmanager
    async def http(self, hosts: Sequence[str] | None = None, *, idle_s: float = IDLE_S) -> AsyncIterator[ASGIApp]:
        """An ASGI app that answers at `/mcp` while the context lasts. A session without a request for `idle_s` ends.

        `hosts` are the Host headers it answers to, as in "chat.example.org" or "127.0.0.1:*"; None is this machine's
        own names, and an empty list leaves that check to the app that mounts it.
        """
        security = None if hosts is None else TransportSecuritySettings(
            enable_dns_rebinding_protection=bool(hosts),
            allowed_hosts=list(hosts),
            allowed_origins=[f"{scheme}://{host}" for host in hosts for scheme in ("http", "https")],
        )  # fmt: skip
        app = self.server.streamable_http_app(
            streamable_http_path=PATH, transport_security=security, session_idle_timeout=idle_s, max_sessions=SESSIONS
        )
        async with self.server.session_manager.run():
            yield app

    def _offered(self) -> list[Tool]:
        permitted = self._executor.policy.permitted(self._user, None)
        tools = (tool for tool in self._executor.registry if tool.permission in permitted)
        return sorted(tools, key=lambda tool: tool.name)

    async def _list(self, ctx: Request, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[_shown(tool) for tool in self._offered()])

    def _schema(self, name: str) -> dict[str, Any] | None:
        tool = self._executor.registry.get(name)
        return None if tool is None else tool.parameters

    async def _call(self, ctx: Request, params: CallToolRequestParams) -> CallToolResult | InputRequiredResult:
        approval = _Approval(ctx, params)
        session = Session(
            user=self._user,
            run=f"mcp {uuid.uuid4().hex}",
            approve=approval.ask if approval.possible else None,
            tainted_by=self._taint(ctx),
        )
        call = Call("call-1", params.name, params.arguments or {})
        async with _progress(ctx) as listen:
            (outcome,) = await self._executor.run([call], session, listen)
        return approval.left_open or _answer(outcome)

    def _taint(self, ctx: Request) -> set[str]:
        """Names of the tools with output that the client has read; clients without a session share one set."""
        headers = {} if ctx.request is None else ctx.request.headers
        key = headers.get("mcp-session-id", "")
        tainted = self._tainted.setdefault(key, set())
        self._tainted.move_to_end(key)
        while len(self._tainted) > SESSIONS:
            self._tainted.popitem(last=False)
        return tainted


@dataclass(slots=True)
class _Approval:
    """One call's way to the client's person.

    In the older protocol the question is asked while the call waits. In the newer one the call ends with the question,
    and is made again with the answer: `left_open` is that question, and the answer counts for these arguments alone.
    """

    ctx: Request
    params: CallToolRequestParams
    left_open: InputRequiredResult | None = field(default=None, init=False)

    @property
    def possible(self) -> bool:
        can = self.ctx.session.client_capabilities
        return can is not None and can.elicitation is not None

    async def ask(self, asked: NeedsApproval) -> Decision:
        """
        Raises:
            NotAnswered: nobody answered, or not yet.
        """
        form = ElicitRequestFormParams(message=f"{asked.reason}\n\n{asked.preview}", requested_schema=_QUESTION)
        if self.ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            return _decision(await self._asked(form), asked)
        answer = (self.params.input_responses or {}).get("approval")
        if isinstance(answer, ElicitResult) and self.params.request_state == asked.arguments_hash:
            return _decision(answer, asked)
        self.left_open = InputRequiredResult(
            input_requests={"approval": ElicitRequest(params=form)}, request_state=asked.arguments_hash
        )
        raise NotAnswered("the client was asked to ask")

    async def _asked(self, form: ElicitRequestFormParams) -> ElicitResult:
        session, request = self.ctx.session, self.ctx.request_id
        try:
            async with asyncio.timeout(WAIT_S):
                return await session.elicit_form(form.message, form.requested_schema, related_request_id=request)
        except TimeoutError:
            raise NotAnswered("nobody answered in time.") from None
        except (MCPError, ValueError) as error:
            raise NotAnswered(f"the client could not ask ({error}).") from None


def _decision(answer: ElicitResult, asked: NeedsApproval) -> Decision:
    approved = answer.action == "accept" and (answer.content or {}).get("approve") is True
    return Decision("once" if approved else "no", asked.arguments_hash)


def _shown(tool: Tool) -> Shown:
    reads = tool.permission in ("none", "read")
    hints = ToolAnnotations(
        read_only_hint=reads,
        destructive_hint=None if reads else tool.permission in ("write", "execute"),
        idempotent_hint=tool.idempotent,
        open_world_hint=tool.permission in ("network", "execute"),
    )
    return Shown(name=tool.name, description=tool.description, input_schema=tool.parameters, annotations=hints)


def _answer(outcome: Outcome) -> CallToolResult:
    """The result's text; its value too where that is more than the text, and nothing of it was cut."""
    result = outcome.result
    prefix = "Call again, as the tool says: " if outcome.kind == "retry" else ""
    content = [TextContent(text=prefix + result.text)]
    if not outcome.ok or result.truncated or result.value is None or isinstance(result.value, str):
        return CallToolResult(content=[*content], is_error=not outcome.ok)
    # Older clients take objects alone.
    value = result.value if isinstance(result.value, dict) else {"result": result.value}
    return CallToolResult(content=[*content], structured_content=value)


@asynccontextmanager
async def _progress(ctx: Request) -> AsyncIterator[Any]:
    """A listener to the executor's events that passes progress on to the client, in order."""
    steps = asyncio.Queue[CallProgress]()

    def listen(event: Event) -> None:
        if isinstance(event, CallProgress):
            steps.put_nowait(event)

    async def passing_on() -> None:
        for number in itertools.count(1):
            step = (await steps.get()).step
            with contextlib.suppress(Exception):  # a client that has gone hears nothing
                # It must grow from one report to the next, and not every tool counts.
                done = number if step.done is None else step.done
                await ctx.session.report_progress(done, step.total, step.text)
            steps.task_done()

    task = asyncio.create_task(passing_on())
    try:
        yield listen
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await steps.join()
    finally:
        task.cancel()
