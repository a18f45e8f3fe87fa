"""The server's tools at `/mcp`, used by the SDK's own client in both protocols, against the real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import Client
from mcp.client import ClientRequestContext
from mcp.types import CallToolResult, ElicitRequestParams, ElicitResult, TextContent

from tests.app.conftest import Server, serving

pytestmark = pytest.mark.slow

MODES = ["legacy", "auto"]
ROOT = Path(__file__).resolve().parents[3]
PLUGIN = '''
import asyncio
from pathlib import Path

from ponder import Context, ToolError, tool


@tool(permission="none")
def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


@tool(permission="write")
def write_line(text: str) -> str:
    """Write a line to the log."""
    with (Path(__file__).parent / "log.txt").open("a") as log:
        log.write(text + "\\n")
    return "written"


@tool(permission="none", timeout=0.2)
async def hang(ctx: Context) -> str:
    """Come half the way."""
    ctx.progress("half", 1, 2)
    await asyncio.Event().wait()


@tool(permission="none")
def broken() -> str:
    """Always fail."""
    raise ToolError("the pump is off")
'''


@pytest.fixture
def plugins(server: Server, http: httpx.Client) -> Iterator[Path]:
    """The plugins' folder, with one in it that the server has loaded."""
    folder = server.data / "plugins"
    folder.mkdir(exist_ok=True)
    (folder / "mcp_tools.py").write_text(PLUGIN)
    until_offered(server, http, "double")
    yield folder
    for each in folder.iterdir():
        if each.is_file():
            each.unlink()
    server.until(lambda _: not any(t["origin"].startswith("plugin") for t in http.get("/api/tools").json()["tools"]))


def until_offered(server: Server, http: httpx.Client, name: str) -> None:
    server.until(lambda _: any(tool["name"] == name for tool in http.get("/api/tools").json()["tools"]))


class Person:
    """Person in front of the client, who answers what it asks."""

    def __init__(self, approve: bool) -> None:
        self.asked = list[str]()
        self._answer = ElicitResult(action="accept", content={"approve": approve})

    async def __call__(self, ctx: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        self.asked.append(params.message)
        return self._answer


def client(server: Server, mode: str, **more: Any) -> Client:
    return Client(f"{server.url}/mcp", mode=mode, **more)


def text_of(result: CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text


@pytest.mark.parametrize("mode", MODES)
async def test_what_a_client_calls_is_run(server: Server, plugins: Path, mode: str) -> None:
    async with client(server, mode) as ana:
        names = {each.name for each in (await ana.list_tools()).tools}
        assert {"calculator", "double", "write_line"} <= names
        assert text_of(await ana.call_tool("double", {"number": 21})) == "42"
        assert text_of(await ana.call_tool("calculator", {"expression": "0.1 + 0.2"})) == "0.3"


@pytest.mark.parametrize("mode", MODES)
async def test_what_goes_wrong_is_said(server: Server, plugins: Path, mode: str) -> None:
    async with client(server, mode) as ana:
        for name, arguments, said in (
            ("broken", {}, "the pump is off"),
            ("hang", {}, "longer than its 0.2 s and was stopped"),
            ("double", {"number": "many"}, "number"),
            ("duoble", {}, "did you mean double?"),
        ):
            result = await ana.call_tool(name, arguments)
            assert result.is_error and said in text_of(result), name


@pytest.mark.parametrize("mode", MODES)
async def test_progress_reaches_the_client(server: Server, plugins: Path, mode: str) -> None:
    heard = list[tuple[float, float | None, str | None]]()

    async def listen(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, total, message))

    async with client(server, mode) as ana:
        await ana.call_tool("hang", {}, progress_callback=listen)
    assert heard == [(1, 2, "half")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("approve", [True, False])
async def test_what_needs_approval_is_asked_of_the_clients_person(
    server: Server, plugins: Path, mode: str, approve: bool
) -> None:
    person = Person(approve)
    async with client(server, mode, elicitation_callback=person) as ana:
        result = await ana.call_tool("write_line", {"text": "milk"})
    assert result.is_error is not approve and (plugins / "log.txt").exists() is approve
    assert len(person.asked) == 1 and 'write_line(text="milk")' in person.asked[0]


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_cannot_ask_is_refused_with_the_reason(server: Server, plugins: Path, mode: str) -> None:
    async with client(server, mode) as ana:
        result = await ana.call_tool("write_line", {"text": "milk"})
    assert result.is_error and "nobody can be asked here" in text_of(result)
    assert not (plugins / "log.txt").exists()


@pytest.mark.parametrize("mode", MODES)
async def test_a_plugin_that_comes_later_is_offered_to_a_client_that_is_there(
    server: Server, plugins: Path, http: httpx.Client, mode: str
) -> None:
    async with client(server, mode) as ana:
        assert "triple" not in {each.name for each in (await ana.list_tools()).tools}
        (plugins / "later.py").write_text(PLUGIN.replace("def double", "def triple").replace("2 *", "3 *"))
        until_offered(server, http, "triple")
        assert "triple" in {each.name for each in (await ana.list_tools(cache_mode="bypass")).tools}
        assert text_of(await ana.call_tool("triple", {"number": 14})) == "42"


async def test_what_the_user_may_not_do_is_neither_offered_nor_run(
    server: Server, plugins: Path, http: httpx.Client
) -> None:
    assert http.put("/api/permissions", json={"classes": ["none"]}).status_code == 200
    try:
        async with client(server, "legacy", elicitation_callback=Person(True)) as ana:
            names = {each.name for each in (await ana.list_tools()).tools}
            assert "double" in names and "write_line" not in names and "http_fetch" not in names
            assert "not granted" in text_of(await ana.call_tool("write_line", {"text": "milk"}))
    finally:
        assert http.delete("/api/permissions").status_code == 204
    assert not (plugins / "log.txt").exists()


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}], ids=["host", "origin"]
)
def test_a_page_of_somebody_else_reaches_nothing(http: httpx.Client, headers: dict[str, str]) -> None:
    reply = http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, headers=headers)
    assert reply.status_code == 403 and "error" in reply.json()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"jsonrpc": "2.0"}', b"[" * 100_000, b"x" * (5 << 20)])
def test_what_is_no_mcp_is_refused_and_the_server_stays(http: httpx.Client, body: bytes) -> None:
    accepts = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    assert http.post("/mcp", content=body, headers=accepts).status_code in (400, 413)
    assert http.get("/health").status_code == 200


def test_a_session_without_a_request_ends(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(
        "mcp.server.streamable_http_manager.logger.info", lambda said: ended.set() if "idle timeout" in said else None
    )
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "ana", "version": "1"}}
    opening = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    accepts = {"Accept": "application/json, text/event-stream"}
    with serving(model, tmp_path, mcp_idle_s=0.5) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        opened = http.post("/mcp", json=opening, headers=accepts)
        session = {**accepts, "Mcp-Session-Id": opened.headers["mcp-session-id"]}
        assert opened.status_code == 200
        assert ended.wait(20)
        assert http.post("/mcp", json=listing, headers=session).status_code == 404


async def test_a_server_that_is_told_to_stop_ends_while_a_client_is_connected(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app.cli", "serve", "--model", str(model), "--port", "0", "--data-dir"]
    with subprocess.Popen(
        [*command, str(tmp_path / "data")], stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            async with Client(f"{url}/mcp", mode="legacy") as ana:
                assert text_of(await ana.call_tool("calculator", {"expression": "6 * 7"})) == "42"
                process.send_signal(signal.SIGTERM)  # while the client keeps its stream open
                assert process.wait(20) == 0
        finally:
            process.kill()
