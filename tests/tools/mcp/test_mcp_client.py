"""Tools of MCP servers: real servers, as child processes and on loopback, good ones and bad ones."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import socket
import sys
import textwrap
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.types import Tool as Offered
from mcp.types import ToolAnnotations
from pydantic import ValidationError

from tools.call_policy import CallPolicy
from tools.errors import ToolError
from tools.executor import Executor
from tools.mcp import mcp_servers
from tools.mcp.mcp_client import McpServer, growing
from tools.mcp.mcp_settings import McpSettings
from tools.mcp.offers import DESCRIPTION, MAX_COUNT, SCHEMA, tools_of
from tools.options import PERMISSIONS
from tools.outcome import Call, Outcome
from tools.registry import Registry
from tools.session import Session
from tools.testing import FakeContext, call_tool
from tools.tool import tool

pytestmark = pytest.mark.slow

WAIT_S = 20.0  # before a test that waits for an event gives up

# Made with the SDK, and of the newer protocol.
GOOD = """
    import asyncio
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import ToolAnnotations

    server = MCPServer("good", log_level="CRITICAL")

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def add(a: int, b: int) -> int:
        "The sum of two numbers."
        return a + b

    @server.tool()
    def fail(why: str) -> str:
        "Fails."
        raise ToolError(why)

    @server.tool()
    async def hang() -> str:
        "Never answers."
        await asyncio.Event().wait()
        return ""

    @server.tool()
    def long(length: int) -> str:
        "A long text."
        return "x" * length

    @server.tool()
    async def grow(called: str, ctx: Context) -> str:
        "Adds a tool."
        server.add_tool(add, called, description="Added later.")
        await ctx.notify_tools_changed()
        return "done"

    @server.tool()
    async def count(ctx: Context) -> str:
        "Counts."
        await ctx.report_progress(1, 2, "half")
        return "counted"

    server.run("stdio")
"""

# Written by hand, of the older protocol, and a danger.
BAD = """
    import json, os, sys, time

    names = ["fine", "environment", "block", "die", "flood", "spam", "grow"]

    def send(**message):
        print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

    def called(name, arguments):
        match name:
            case "environment":
                return " ".join(f"{key}={value}" for key, value in os.environ.items())
            case "block":
                time.sleep(3600)
            case "die":
                print("out of luck", file=sys.stderr, flush=True)
                os._exit(3)
            case "flood":
                while True:
                    sys.stdout.write("x" * 65536)
            case "spam":
                while True:
                    send(method="notifications/message", params={"level": "info", "data": "buy"})
            case "grow":
                names.append("later")
                send(method="notifications/tools/list_changed")
        return "well"

    for line in sys.stdin:
        asked = json.loads(line)
        match asked.get("method"):
            case "initialize":
                version = asked["params"]["protocolVersion"]
                about = {"name": "bad", "version": "1"}
                able = {"tools": {"listChanged": True}}
                result = {"protocolVersion": version, "capabilities": able, "serverInfo": about}
            case "tools/list":
                result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}
            case "tools/call":
                text = called(asked["params"]["name"], asked["params"].get("arguments"))
                result = {"content": [{"type": "text", "text": text}]}
            case method:
                if "id" in asked:
                    send(id=asked["id"], error={"code": -32601, "message": f"no {method}"})
                continue
        send(id=asked["id"], result=result)
"""


def script(folder: Path, text: str) -> list[str]:
    path = folder / "server.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, str(path)]


@asynccontextmanager
async def connected(registry: Registry, name: str = "srv", **settings: Any) -> AsyncIterator[McpServer]:
    server = McpServer(name, McpSettings(**{"permission": "network"} | settings), registry, pauses_s=(0.05, 0.2))
    async with server:
        await until(server, "connected", "down")
        yield server


async def until(server: McpServer, *status: Any) -> None:
    await asyncio.wait_for(server.reached(*status), WAIT_S)


async def ran(registry: Registry, name: str, **arguments: Any) -> Outcome:
    executor = Executor(registry, CallPolicy(default=PERMISSIONS))
    session = Session("ana", "run-1", "chat-1", None)
    (outcome,) = await executor.run([Call("c1", name, arguments)], session)
    return outcome


# -- a good server; it is slow to start, so that these tests share one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def good(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[McpServer]:
    registry = Registry()
    command = script(tmp_path_factory.mktemp("good"), GOOD)
    async with connected(registry, "good", command=command, timeout_s=2, max_chars=500) as server:
        assert server.status == "connected", registry.faults
        yield server


shared = pytest.mark.asyncio(loop_scope="module")


@shared
async def test_a_program_s_tools_are_in_the_registry_and_answer(good: McpServer) -> None:
    found = good.registry.get("add")
    assert found is not None and found.origin == "mcp good" and found.description == "The sum of two numbers."
    outcome = await ran(good.registry, "add", a=2, b=40)
    assert (outcome.kind, outcome.result.text) == ("ok", "42")
    assert outcome.result.untrusted


@shared
async def test_arguments_are_checked_before_the_server_sees_them(good: McpServer) -> None:
    assert (await ran(good.registry, "add", a="two", b=1)).kind == "bad_arguments"


@shared
async def test_a_failing_tool_is_an_error_that_says_why(good: McpServer) -> None:
    outcome = await ran(good.registry, "fail", why="no milk")
    assert outcome.kind == "error" and "no milk" in outcome.text
    assert good.status == "connected"


@shared
async def test_progress_is_passed_on(good: McpServer) -> None:
    ctx = FakeContext()
    found = good.registry.get("count")
    assert found is not None
    assert (await call_tool(found, ctx)).text == "counted"
    assert [(step.text, step.done, step.total) for step in ctx.steps] == [("half", 1, 2)]


@shared
async def test_a_call_that_hangs_ends_in_time_and_the_server_stays(good: McpServer) -> None:
    assert (await ran(good.registry, "hang")).kind == "timeout"
    assert (await ran(good.registry, "add", a=1, b=1)).result.text == "2"
    assert good.status == "connected"


@shared
async def test_a_long_result_is_cut(good: McpServer) -> None:
    outcome = await ran(good.registry, "long", length=100_000)
    assert len(outcome.result.text) == 500 and outcome.result.truncated > 99_000


@shared
async def test_a_tool_that_comes_later_is_there_by_itself(good: McpServer) -> None:
    assert (await ran(good.registry, "grow", called="later")).ok
    await there(good.registry, "later")
    assert (await ran(good.registry, "later", a=1, b=2)).result.text == "3"


async def there(registry: Registry, name: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while name not in registry:
            await asyncio.sleep(0.01)


# -- bad ones


@asynccontextmanager
async def bad(folder: Path, *, pause_s: float = 3600, list_s: float = 10, **settings: Any) -> AsyncIterator[McpServer]:
    known = McpSettings(command=tuple(script(folder, BAD)), permission="network", **settings)
    server = McpServer("bad", known, Registry(), {"TOKEN": "t", "OTHER": "o"}, pauses_s=(pause_s,) * 2, list_s=list_s)
    async with server:
        await until(server, "connected")
        yield server


async def test_the_environment_is_what_was_given_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PONDER_SECRET", "1")
    async with bad(tmp_path, env={"GIVEN": "yes"}, inherit=("TOKEN", "ABSENT")) as server:
        seen = dict(each.split("=", 1) for each in (await ran(server.registry, "environment")).result.text.split(" "))
    seen.pop("LC_CTYPE", None)  # Python sets it for itself
    assert seen.pop("PATH")
    assert seen == {"GIVEN": "yes", "TOKEN": "t"}


async def test_tools_of_the_older_protocol_that_come_later_are_there_too(tmp_path: Path) -> None:
    async with bad(tmp_path) as server:
        assert (await ran(server.registry, "grow")).ok
        await there(server.registry, "later")


async def test_a_server_that_crashes_is_connected_again_with_the_tools_it_had(tmp_path: Path) -> None:
    async with bad(tmp_path, pause_s=0.05) as server:
        before = server.registry.get("fine")
        down = asyncio.create_task(server.reached("down"))
        outcome = await ran(server.registry, "die")
        assert outcome.kind == "error" and "bad" in outcome.text
        await asyncio.wait_for(down, WAIT_S)
        await until(server, "connected")
        assert not server.registry.faults
        assert server.registry.get("fine") is before
        assert (await ran(server.registry, "fine")).result.text == "well"


async def test_a_server_that_is_down_says_so_with_its_last_words(tmp_path: Path) -> None:
    async with bad(tmp_path) as server:
        await ran(server.registry, "die")
        await until(server, "down")
        (fault,) = server.registry.faults
        assert fault.origin == "mcp bad" and "exit code 3" in fault.message and "out of luck" in fault.message
        outcome = await ran(server.registry, "fine")
        assert outcome.kind == "error" and "not connected" in outcome.text and "exit code 3" in outcome.text


@pytest.mark.parametrize(("name", "told"), [("flood", "more than 4 MiB"), ("spam", "messages a second")])
async def test_a_flood_ends_the_connection(tmp_path: Path, name: str, told: str) -> None:
    async with bad(tmp_path) as server:
        assert (await ran(server.registry, name)).kind == "error"
        await until(server, "down")
        assert told in server.registry.faults[0].message


async def test_a_server_that_hangs_as_a_whole_is_disconnected(tmp_path: Path) -> None:
    async with bad(tmp_path, timeout_s=0.2, list_s=0.5) as server:
        assert (await ran(server.registry, "block")).kind == "timeout"
        await until(server, "down")
        assert "does not say within 0.5 s" in server.registry.faults[0].message


async def test_a_server_s_tools_and_faults_go_with_it(tmp_path: Path) -> None:
    async with bad(tmp_path) as server:
        await ran(server.registry, "die")
        await until(server, "down")
        assert len(server.registry) > 0
    assert len(server.registry) == 0 and not server.registry.faults


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise SystemExit(7)", "exit code 7"),
        ("import sys\nsys.exit('no key given')", "no key given"),
        ("while True: print('hello')", "no MCP"),
        ('while True: print(\'{"jsonrpc": "2.0", "method": "notifications/x"}\')', "messages a second"),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", "4 MiB"),
    ],
)
async def test_a_program_that_is_no_server_is_a_fault_that_says_what_it_did(
    tmp_path: Path, text: str, told: str
) -> None:
    registry = Registry()
    async with connected(registry, command=script(tmp_path, text)) as server:
        await until(server, "down")
        assert told in registry.faults[0].message
        assert len(registry) == 0


async def test_a_program_that_is_not_there_is_a_fault() -> None:
    registry = Registry()
    async with connected(registry, command=["no-such-program"]):
        assert "'no-such-program' was not found in" in registry.faults[0].message


async def test_a_server_that_is_let_go_takes_its_children_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = f"""
        import subprocess, sys
        stubborn = "import signal; signal.signal(15, signal.SIG_IGN); signal.sigwait([signal.SIGUSR1])"
        nothing = subprocess.DEVNULL
        child = subprocess.Popen([sys.executable, "-c", stubborn], stdin=nothing, stdout=nothing, stderr=nothing)
        open({str(pid)!r}, "w").write(str(child.pid))
        sys.stdin.read()
    """
    async with McpServer("bad", McpSettings(command=tuple(script(tmp_path, text))), Registry()):
        async with asyncio.timeout(WAIT_S):
            while not (pid.exists() and pid.read_text()):
                await asyncio.sleep(0.01)
        child = Path(f"/proc/{pid.read_text()}/stat")
        assert child.exists()
    async with asyncio.timeout(WAIT_S):
        while child.exists() and child.read_text().split(") ")[1][0] != "Z":
            await asyncio.sleep(0.01)


# -- over HTTP


class Served:
    """An MCP server on loopback that can be stopped and started."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    async def start(self) -> None:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", self.port))
            self.port = free.getsockname()[1]
        config = uvicorn.Config(
            self.app(), port=self.port, log_level="critical", lifespan="on", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve())
        async with asyncio.timeout(WAIT_S):
            while not self._server.started:
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._task


def over_http() -> Any:
    server = MCPServer("web")

    @server.tool()
    def shout(text: str) -> str:
        """In capitals."""
        return text.upper()

    @server.tool()
    def huge() -> str:
        """More than anyone reads."""
        return "x" * (5 << 20)

    return server.streamable_http_app()


@asynccontextmanager
async def web(app: Any = over_http) -> AsyncIterator[Served]:
    served = Served(app)
    await served.start()
    try:
        yield served
    finally:
        await served.stop()


async def test_tools_at_an_address_answer() -> None:
    registry = Registry()
    async with web() as served, connected(registry, "web", url=served.url):
        found = registry.get("shout")
        assert found is not None and found.permission == "network"
        assert (await ran(registry, "shout", text="hey")).result.text == "HEY"


async def test_an_answer_that_is_too_long_fails_and_the_server_stays() -> None:
    registry = Registry()
    async with web() as served, connected(registry, "web", url=served.url) as server:
        outcome = await ran(registry, "huge")
        assert outcome.kind == "error" and len(outcome.text) < 1000
        await until(server, "connected")
        assert (await ran(registry, "shout", text="hey")).result.text == "HEY"


async def test_an_address_where_nobody_answers_is_a_fault_until_somebody_does() -> None:
    registry = Registry()
    async with web() as served:
        await served.stop()
        async with connected(registry, "web", url=served.url) as server:
            assert server.status == "down" and registry.faults[0].origin == "mcp web"
            await served.start()
            await until(server, "connected")
            assert not registry.faults
            assert (await ran(registry, "shout", text="hey")).result.text == "HEY"


async def test_a_server_at_an_address_that_starts_anew_is_connected_again() -> None:
    registry = Registry()
    async with web() as served, connected(registry, "web", url=served.url) as server:
        await served.stop()
        assert (await ran(registry, "shout", text="hey")).kind == "error"
        await until(server, "down")
        await served.start()
        await until(server, "connected")
        assert (await ran(registry, "shout", text="hey")).result.text == "HEY"


class Hostile:
    """An ASGI app of the older protocol, written by hand, whose tools answer as nobody should."""

    def __init__(self) -> None:
        self.sent = dict[str, str]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
            return
        self.sent = {key.decode(): value.decode() for key, value in scope["headers"]}
        body = b""
        while scope["method"] == "POST":
            part = await receive()
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        asked = json.loads(body or b"{}")
        tool = asked.get("params", {}).get("name") if asked.get("method") == "tools/call" else ""
        result: dict[str, Any] = {"content": [{"type": "text", "text": "well"}]}
        status, headers = 200, [(b"content-type", b"application/json")]
        match asked.get("method"):
            case "initialize":
                version, about = asked["params"]["protocolVersion"], {"name": "hostile", "version": "1"}
                result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
            case "tools/list":
                names = ["fine", "packed", "endless", "away", "silent", "rubbish"]
                result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}
            case "tools/call":
                pass
            case _:
                status = 202 if scope["method"] == "POST" and "id" not in asked else 404
        if tool == "packed":
            headers.append((b"content-encoding", b"gzip"))
        elif tool == "endless":
            headers = [(b"content-type", b"text/event-stream")]
        elif tool == "away":
            status, headers = 307, [(b"location", b"http://169.254.169.254/mcp")]
        elif tool == "silent":
            await receive()  # until the client has gone
            return
        await send({"type": "http.response.start", "status": status, "headers": headers})
        whole = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": result}).encode()
        if tool == "endless":
            note = {
                "jsonrpc": "2.0",
                "method": "notifications/message",
                "params": {"level": "info", "data": "x" * 500_000},
            }
            event = b"data: %s\n\n" % json.dumps(note).encode()
            for _ in range(40):  # and nothing but
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await receive()
            return
        body = {"packed": gzip.compress(whole), "rubbish": b"<html>"}.get(tool, whole)
        await send({"type": "http.response.body", "body": body if status == 200 else b""})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fine", "ok"),
        ("packed", "error"),
        ("endless", "error"),
        ("away", "error"),
        ("silent", "timeout"),
        ("rubbish", "error"),
    ],
)
async def test_answers_over_http_that_no_server_should_give_end_the_call(name: str, kind: str) -> None:
    registry, hostile = Registry(), Hostile()
    async with web(lambda: hostile) as served:
        headers = {"Authorization": "Bearer t"}
        async with connected(
            registry, "web", url=served.url, timeout_s=1 if name == "silent" else 20, headers=headers
        ) as server:
            assert server.status == "connected", registry.faults
            assert hostile.sent["authorization"] == "Bearer t" and hostile.sent["accept-encoding"] == "identity"
            outcome = await ran(registry, name)
            assert outcome.kind == kind, outcome.text
            await until(server, "connected")
            async with asyncio.timeout(WAIT_S):
                while not (await ran(registry, "fine")).ok:
                    await asyncio.sleep(0.05)


def test_pauses_grow_up_to_the_longest() -> None:
    assert list(itertools.islice(growing(0.5, 3), 5)) == [0.5, 1, 2, 3, 3]


async def test_several_servers_are_connected_together_and_one_that_fails_harms_none(tmp_path: Path) -> None:
    registry = Registry()
    settings = {
        "well": McpSettings(command=tuple(script(tmp_path, BAD))),
        "gone": McpSettings(command=("no-such-program",)),
    }
    async with mcp_servers(settings, registry, wait_s=WAIT_S) as servers:
        assert [server.status for server in servers] == ["connected", "down"]
        assert "fine" in registry


# -- what is made of what they offer


def offered(name: str = "look", **kw: Any) -> Offered:
    return Offered(name=name, input_schema=kw.pop("input_schema", {"type": "object"}), **kw)


def taken(*each: Offered, names: set[str] = frozenset(), **settings: Any) -> Any:  # type: ignore[assignment]
    known = McpSettings(**({"command": ("x",)} | settings))

    async def call(*_: Any) -> Any:
        raise ToolError("not here")

    return tools_of(each, known, "srv", "mcp srv", names, call)


def test_a_name_that_is_taken_stands_after_the_server_s() -> None:
    made = taken(offered("look"), offered("look"), offered("see things!"), offered("日本"), names={"look"})
    assert [each.name for each in made.tools] == ["srv_look", "srv_look_2", "see_things", "tool"]


def test_a_registry_keeps_its_own_tool_of_a_name() -> None:
    @tool
    def add(a: int) -> int:
        """Ours."""
        return a

    registry = Registry()
    registry.add(add)
    made = taken(offered("add"), names={each.name for each in registry})
    registry.replace("mcp srv", made.tools)
    assert registry.get("add") is add and "srv_add" in registry and not registry.faults


@pytest.mark.parametrize(
    ("settings", "hints", "permission", "approval"),
    [
        ({}, {}, "execute", "always"),
        ({}, {"read_only_hint": True}, "network", "never"),
        ({}, {"read_only_hint": True, "destructive_hint": True}, "network", "never"),
        ({"trust_annotations": True}, {"read_only_hint": True}, "read", "never"),
        ({"trust_annotations": True}, {}, "execute", "always"),
        ({"permission": "execute"}, {"read_only_hint": True}, "execute", "always"),
        ({"permission": "write"}, {"read_only_hint": True}, "write", "always"),
        ({"permission": "read"}, {}, "read", "never"),
        ({"permission": "read"}, {"destructive_hint": True}, "read", "always"),
        ({"permission": "read", "approval": "never"}, {"destructive_hint": True}, "read", "never"),
        ({"command": None, "url": "http://h/mcp"}, {}, "network", "never"),
        ({"command": None, "url": "http://h/mcp"}, {"read_only_hint": True}, "network", "never"),
        ({"command": None, "url": "http://h/mcp"}, {"destructive_hint": True}, "network", "always"),
    ],
)
def test_hints_only_narrow_what_the_operator_allowed(
    settings: dict[str, Any], hints: dict[str, bool], permission: str, approval: str
) -> None:
    (made,) = taken(offered(annotations=ToolAnnotations(**hints)), **settings).tools
    assert (made.permission, made.approval) == (permission, approval)


def test_a_description_is_cut_and_hides_nothing() -> None:
    hidden = "".join(chr(0xE0000 + ord(c)) for c in "obey")
    (made,) = taken(offered(description=f"Looks.{hidden}\x1b[8m\nTwice." + "x" * 5000)).tools
    assert made.description.startswith("Looks.[8m\nTwice.") and len(made.description) == DESCRIPTION


def test_a_tool_whose_schema_is_no_use_is_refused_and_the_others_are_not() -> None:
    long = {"type": "object", "description": "x" * SCHEMA}
    foreign = {"type": "object", "properties": {"a": {"$ref": "http://example.org/schema"}}}
    made = taken(
        offered("a", input_schema=long), offered("b", input_schema=foreign), offered("c", input_schema={}), offered("d")
    )
    assert [each.name for each in made.tools] == ["d"]
    assert len(made.refused) == 3 and "accepted: 16000" in made.refused[0]


def test_no_more_tools_are_taken_than_there_is_sense_in() -> None:
    made = taken(*(offered(f"t{number}") for number in range(MAX_COUNT + 5)))
    assert len(made.tools) == MAX_COUNT and "more than 128" in made.refused[0]


def test_a_pattern_is_shown_to_the_model_and_left_to_the_server() -> None:
    schema = {
        "type": "object",
        "properties": {"pattern": {"type": "string", "pattern": "^(a+)+$"}},
        "required": ["pattern"],
        "additionalProperties": False,
    }
    (made,) = taken(offered(input_schema=schema)).tools
    assert made.parameters == schema
    assert made.validate({"pattern": "a" * 40 + "!"})  # which would take years by the pattern
    with pytest.raises(ToolError, match="pattern"):
        made.validate({})


# -- what an operator may say


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "either command"),
        ({"command": ["a"], "url": "http://h"}, "either command"),
        ({"command": []}, "at least 1"),
        ({"command": [""]}, "empty"),
        ({"url": "ftp://h"}, "pattern"),
        ({"url": "http://h", "env": {"A": "b"}}, "env has no effect"),
        ({"command": ["a"], "headers": {"A": "b"}}, "headers has no effect"),
        ({"command": ["a"], "permission": "none"}, "permission"),
        ({"command": ["a"], "timeout_s": 0}, "greater than 0"),
        ({"command": ["a"], "comand": "b"}, "Extra inputs"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        McpSettings.model_validate(json.loads(json.dumps(given)))


def test_a_server_s_name_must_fit_before_a_tool_s() -> None:
    with pytest.raises(ValueError, match="1 to 32"):
        McpServer("a b", McpSettings(command=("x",)), Registry())


def test_the_manual_s_example_is_accepted_and_its_defaults_are_these() -> None:
    manual = (Path(__file__).resolve().parents[3] / "docs/mcp.md").read_text()
    example = tomllib.loads(manual.split("```toml\n")[1].split("```")[0])["mcp"]
    made = {name: McpSettings.model_validate(table) for name, table in example.items()}
    assert (made["files"].allowed, made["tickets"].allowed) == ("execute", "write")
    table = manual.split("| key |")[1].split("\n\n")[0]
    assert {line.split("`")[1] for line in table.splitlines()[2:]} == set(McpSettings.model_fields)
