"""Connections to MCP servers: real ones, as child processes and on loopback, good ones and bad ones."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.tools.mcp.sample_servers import BAD, GOOD, WAIT_S, Hostile, script, web
from tools.call_policy import CallPolicy
from tools.executor import Executor
from tools.mcp import mcp_servers
from tools.mcp.mcp_client import McpServer, growing
from tools.mcp.mcp_settings import McpSettings
from tools.options import PERMISSIONS
from tools.outcome import Call, Outcome
from tools.registry import Registry
from tools.session import Session
from tools.testing import FakeContext, call_tool

pytestmark = pytest.mark.slow


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


async def test_a_server_that_stays_away_is_logged_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    server = McpServer("gone", McpSettings(command=["/nowhere/server"]), Registry(), pauses_s=(0.001, 0.001))
    attempts = 0
    real = server._live

    async def counted() -> str:
        nonlocal attempts
        attempts += 1
        return await real()

    server._live = counted  # type: ignore[method-assign]  # to count what is tried
    async with server:
        while attempts <= 20:
            await asyncio.sleep(0.01)
    said = [record.getMessage() for record in caplog.records if "The MCP server gone" in record.getMessage()]
    assert "is not connected: " in said[0]
    assert [line.split(" attempts")[0].rsplit(" ", 1)[1] for line in said[1:5]] == ["2", "4", "8", "16"]
    assert len(said) <= 6
