"""Our tools as an MCP server, used by the SDK's own client: in both protocols, over HTTP and as a child process."""

from __future__ import annotations

import asyncio
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client import ClientRequestContext
from mcp.types import CallToolResult, ElicitRequestParams, ElicitResult, InputResponses, TextContent

from ponder import Context, Retry, tool
from tools.call_policy import CallPolicy
from tools.executor import Executor
from tools.mcp.mcp_server import ToolServer
from tools.options import PERMISSIONS, Permission
from tools.registry import Registry

ROOT = Path(__file__).resolve().parents[3]
MODES = ["legacy", "auto"]
written = list[str]()


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@tool
def table(rows: int) -> list[dict[str, int]]:
    """Rows."""
    return [{"row": number} for number in range(rows)]


@tool(permission="read")
def page(ctx: Context) -> str:
    """Reads what somebody wrote."""
    ctx.progress("half", 1, 2)
    return f"Dear {ctx.user}"


@tool(permission="write")
def write(text: str) -> str:
    """Writes."""
    written.append(text)
    return "written"


@tool(permission="network")
def send(text: str) -> str:
    """Sends."""
    written.append(text)
    return "sent"


@tool
def picky(when: str) -> str:
    """Wants it differently."""
    raise Retry("write the day as 2026-01-31")


@pytest.fixture(autouse=True)
def nothing_written() -> None:
    written.clear()


def serving(*granted: Permission) -> ToolServer:
    registry = Registry()
    registry.add(add, table, page, write, send, picky)
    return ToolServer(Executor(registry, CallPolicy(default=granted or PERMISSIONS)), user="ana")


class Person:
    """Person in front of the client, who answers what it asks."""

    def __init__(self, action: str = "accept", **content: Any) -> None:
        self.asked = list[str]()
        self._answer = ElicitResult(action=action, content=content or None)

    async def __call__(self, context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        self.asked.append(params.message)
        return self._answer


def text_of(result: CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text


@pytest.mark.parametrize("mode", MODES)
async def test_tools_are_listed_with_what_they_do(mode: str) -> None:
    async with Client(serving().server, mode=mode) as client:
        tools = {each.name: each for each in (await client.list_tools()).tools}
    assert list(tools) == ["add", "page", "picky", "send", "table", "write"]
    assert tools["add"].input_schema["required"] == ["a", "b"]
    assert tools["add"].description == "Adds two numbers."
    hints = {name: each.annotations for name, each in tools.items()}
    assert hints["page"].read_only_hint and not hints["write"].read_only_hint  # type: ignore[union-attr]  # all have


async def test_what_the_user_may_not_do_is_not_listed_and_not_run() -> None:
    async with Client(serving("none", "read").server) as client:
        assert "write" not in {each.name for each in (await client.list_tools()).tools}
        result = await client.call_tool("write", {"text": "x"})
    assert result.is_error and "not granted" in text_of(result) and not written


@pytest.mark.parametrize("mode", MODES)
async def test_a_call_is_answered_with_text_and_value(mode: str) -> None:
    async with Client(serving().server, mode=mode) as client:
        sum_ = await client.call_tool("add", {"a": 2, "b": 40})
        rows = await client.call_tool("table", {"rows": 2})
        text = await client.call_tool("page", {})
    assert (text_of(sum_), sum_.structured_content) == ("42", {"result": 42})
    assert rows.structured_content == {"result": [{"row": 0}, {"row": 1}]}
    assert (text_of(text), text.structured_content) == ("Dear ana", None)


async def test_a_value_that_was_cut_is_not_sent_whole_beside_its_text() -> None:
    async with Client(serving().server) as client:
        result = await client.call_tool("table", {"rows": 5000})
    assert len(text_of(result)) == 8000 and result.structured_content is None


async def test_what_goes_wrong_is_said() -> None:
    async with Client(serving().server) as client:
        wrong = await client.call_tool("add", {"a": "two", "b": 1})
        unknown = await client.call_tool("ad", {})
        again = await client.call_tool("picky", {"when": "x"})
    assert wrong.is_error and "a:" in text_of(wrong)
    assert unknown.is_error and "did you mean add" in text_of(unknown)
    assert again.is_error and "2026-01-31" in text_of(again)


@pytest.mark.parametrize("mode", MODES)
async def test_progress_reaches_the_client(mode: str) -> None:
    steps = list[tuple[float, float | None, str | None]]()

    async def told(progress: float, total: float | None, message: str | None) -> None:
        steps.append((progress, total, message))

    async with Client(serving().server, mode=mode) as client:
        await client.call_tool("page", {}, progress_callback=told)
    assert steps == [(1, 2, "half")]


async def test_a_client_that_cannot_ask_is_refused_what_needs_approval() -> None:
    async with Client(serving().server) as client:
        result = await client.call_tool("write", {"text": "x"})
    assert result.is_error and "approval" in text_of(result) and not written


@pytest.mark.parametrize("mode", MODES)
async def test_the_client_s_person_approves_the_call_they_are_shown(mode: str) -> None:
    ana = Person(approve=True)
    async with Client(serving().server, mode=mode, elicitation_callback=ana) as client:
        result = await client.call_tool("write", {"text": "milk"})
    assert text_of(result) == "written" and written == ["milk"]
    assert len(ana.asked) == 1 and 'write(text="milk")' in ana.asked[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ana", [Person(approve=False), Person("decline"), Person("cancel"), Person()])
async def test_whatever_is_no_approval_is_none(mode: str, ana: Person) -> None:
    async with Client(serving().server, mode=mode, elicitation_callback=ana) as client:
        result = await client.call_tool("write", {"text": "milk"})
    assert result.is_error and not written and ana.asked


async def test_an_approval_is_not_for_other_arguments() -> None:
    async with Client(serving().server, elicitation_callback=Person(approve=True)) as client:
        asked = await client.session.call_tool("write", {"text": "milk"}, allow_input_required=True)
        answers: InputResponses = {"approval": ElicitResult(action="accept", content={"approve": True})}
        state = asked.request_state  # type: ignore[union-attr]  # it is a question
        again = await client.session.call_tool(
            "write", {"text": "honey"}, input_responses=answers, request_state=state, allow_input_required=True
        )
    assert again.result_type == "input_required" and not written


async def test_after_strange_text_was_read_sending_asks() -> None:
    ana = Person(approve=False)
    async with Client(serving().server, elicitation_callback=ana) as client:
        assert text_of(await client.call_tool("send", {"text": "1"})) == "sent" and not ana.asked
        await client.call_tool("page", {})
        assert (await client.call_tool("send", {"text": "2"})).is_error
    assert written == ["1"] and "page" in ana.asked[0]


# -- over HTTP


@asynccontextmanager
async def served(tools: ToolServer) -> AsyncIterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with tools.http() as app:
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", lifespan="off"))
        task = asyncio.create_task(server.serve())
        async with asyncio.timeout(20):
            while not server.started:
                await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.should_exit = True
            await task


@pytest.mark.parametrize("mode", MODES)
async def test_over_http_calls_are_answered_and_approved(mode: str) -> None:
    ana = Person(approve=True)
    async with served(serving()) as url, Client(url, mode=mode, elicitation_callback=ana) as client:
        assert text_of(await client.call_tool("add", {"a": 1, "b": 2})) == "3"
        assert text_of(await client.call_tool("write", {"text": "milk"})) == "written"
    assert len(ana.asked) == 1


async def test_over_http_what_one_session_read_is_not_held_against_another() -> None:
    async with served(serving()) as url:
        async with Client(url, mode="legacy") as reader:
            await reader.call_tool("page", {})
            assert (await reader.call_tool("send", {"text": "1"})).is_error
        async with Client(url, mode="legacy") as other:
            assert not (await other.call_tool("send", {"text": "2"})).is_error


async def test_a_page_of_another_host_cannot_call() -> None:
    import httpx

    async with served(serving()) as url, httpx.AsyncClient() as browser:
        reply = await browser.post(url, json={}, headers={"Host": "evil.example"})
        assert reply.status_code in (403, 421)


# -- as a child process


async def test_as_a_child_process_it_serves_and_ends_with_its_client(tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(
        textwrap.dedent("""
            import asyncio
            from ponder import tool
            from tools.executor import Executor
            from tools.mcp.mcp_server import ToolServer
            from tools.call_policy import CallPolicy
            from tools.registry import Registry

            @tool
            def double(number: int) -> int:
                "Twice the number."
                print("a tool that prints does not break the wire")
                return 2 * number

            registry = Registry()
            registry.add(double)
            asyncio.run(ToolServer(Executor(registry, CallPolicy()), user="ana").stdio())
            open("ended", "w").close()
        """)
    )
    server = StdioServerParameters(
        command=sys.executable, args=[str(script)], env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path
    )
    with open(tmp_path / "err", "w") as errors:
        async with Client(stdio_client(server, errlog=errors)) as client:
            assert text_of(await client.call_tool("double", {"number": 21})) == "42"
    async with asyncio.timeout(20):
        while not (tmp_path / "ended").exists():
            await asyncio.sleep(0.01)
