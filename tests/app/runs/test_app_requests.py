"""Requests of MCP apps to their own server, a real one: what runs, what asks a person, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.runs import app_requests
from tests.app.chatting import new_chat
from tests.app.conftest import Server, serving
from tests.app.library import error
from tests.tools.mcp.sample_servers import APP, script
from tools.context import APP_TYPE, AppView, FileContent
from tools.limits import Rate

pytestmark = pytest.mark.slow

RESULT: dict[str, Any] = {"content": [{"type": "text", "text": "12:00"}], "structuredContent": {"hour": 12}}


@pytest.fixture(scope="module")
def clock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = script(tmp_path_factory.mktemp("clock"), APP)
    with serving(model, tmp_path_factory.mktemp("apps"), mcp={"clock": {"command": command}}) as server:
        server.until(lambda _: "clock" in {tool.name for tool in server.app.state.ponder.tool_service.registry})
        yield server


@pytest.fixture
def chatting(clock: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=clock.url, timeout=30) as http:
        yield http
        http.delete("/api/permissions")


def app_of(server: Server, http: httpx.Client, of: str = "clock") -> str:
    """The address of an app that a call made."""
    view = AppView(of, "clock", "ui://clock/app.html", {"zone": "Ulm"}, RESULT, ("https://a.example",), ("camera",))
    file = FileContent("app.html", b"<p>noon</p>", view)
    store = server.app.state.ponder.store.artifacts
    (made,) = server.on_loop(store.keep(new_chat(http), "run_1", "call_1", [file])).kept
    assert made.media_type == APP_TYPE
    return f"/api/artifacts/{made.id}/app"


def asked(http: httpx.Client, app: str, method: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
    reply = http.post(app, json={"method": method, "params": params, **more})
    assert reply.status_code == 200, reply.text
    (said,) = [(name, value) for name, value in reply.json().items() if value is not None]
    return {"kind": said[0], **said[1]}


def test_an_app_is_shown_with_the_call_that_made_it(clock: Server, chatting: httpx.Client) -> None:
    app = app_of(clock, chatting)
    assert chatting.get(app).json() == {
        "server": "clock", "tool": "clock", "uri": "ui://clock/app.html", "arguments": {"zone": "Ulm"},
        "result": RESULT, "domains": ["https://a.example"], "permissions": ["camera"], "connected": True,
    }  # fmt: skip
    framed = chatting.get(app.removesuffix("/app") + "/preview", headers={"Sec-Fetch-Dest": "iframe"})
    assert framed.content == b"<p>noon</p>" and framed.headers["content-type"] == "text/html; charset=utf-8"
    policy = framed.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts; ") and "default-src 'none'" in policy and "a.example" not in policy
    assert "allow-scripts" not in chatting.get(app.removesuffix("/app") + "/preview").headers["content-security-policy"]


def test_each_call_has_an_app_of_its_own_though_the_document_is_the_same(clock: Server, chatting: httpx.Client) -> None:
    chat = new_chat(chatting)
    store = clock.app.state.ponder.store.artifacts
    for hour in (1, 2):
        view = AppView("clock", "clock", "ui://clock/app.html", {}, {"structuredContent": {"hour": hour}})
        clock.on_loop(store.keep(chat, "run_1", f"call_{hour}", [FileContent("app.html", b"<p>", view)]))
    found = chatting.get(f"/api/chats/{chat}/artifacts").json()["artifacts"]
    hours = [chatting.get(f"/api/artifacts/{each['id']}/app").json()["result"] for each in found]
    assert hours == [{"structuredContent": {"hour": 1}}, {"structuredContent": {"hour": 2}}]


def test_a_call_that_only_reads_runs_and_its_result_is_the_servers(clock: Server, chatting: httpx.Client) -> None:
    app = app_of(clock, chatting)
    said = asked(chatting, app, "tools/call", {"name": "tick"})
    assert said["kind"] == "result" and said["content"] == [{"type": "text", "text": "tock"}]
    whole = asked(chatting, app, "tools/call", {"name": "clock", "arguments": {"zone": "Bonn"}})
    assert whole["structuredContent"] == {"zone": "Bonn", "hour": 12} and whole["_meta"]["exact"] is True
    read = asked(chatting, app, "resources/read", {"uri": "clock://zones"})
    assert read["contents"][0]["text"] == "Bonn, Ulm"


def test_a_call_that_asks_runs_once_a_person_has_decided(clock: Server, chatting: httpx.Client) -> None:
    app, wind = app_of(clock, chatting), {"name": "wind", "arguments": {"turns": 3}}
    wanted = asked(chatting, app, "tools/call", wind)
    assert wanted["kind"] == "approval" and (wanted["name"], wanted["preview"]) == ("wind", "wind(turns=3)")
    decided = {"decision": "once", "arguments_hash": wanted["arguments_hash"]}
    assert asked(chatting, app, "tools/call", wind, **decided)["content"][0]["text"] == "wound 3"
    assert asked(chatting, app, "tools/call", wind)["kind"] == "approval"  # it was for once
    no = asked(chatting, app, "tools/call", wind, **{**decided, "decision": "no"})
    assert no["kind"] == "error" and "declined" in no["message"]
    another = {"name": "wind", "arguments": {"turns": 4}}
    swapped = asked(chatting, app, "tools/call", another, **decided)
    assert swapped["kind"] == "error" and "given for another call" in swapped["message"]


def test_a_lasting_answer_holds_for_the_app_and_can_be_taken_back(clock: Server, chatting: httpx.Client) -> None:
    app, wind = app_of(clock, chatting), {"name": "wind", "arguments": {"turns": 9}}
    digest = asked(chatting, app, "tools/call", wind)["arguments_hash"]
    asked(chatting, app, "tools/call", wind, decision="always", scope="tool", arguments_hash=digest)
    other = {"name": "wind", "arguments": {"turns": 10}}
    assert asked(chatting, app, "tools/call", other)["kind"] == "result"
    (kept,) = chatting.get("/api/permissions").json()["remembered"]
    assert (kept["tool"], kept["allow"]) == ("wind", True)
    chatting.delete(f"/api/permissions/{kept['id']}")
    assert asked(chatting, app, "tools/call", other)["kind"] == "approval"


def test_a_class_that_is_not_granted_is_denied_to_apps_too(clock: Server, chatting: httpx.Client) -> None:
    app = app_of(clock, chatting)
    chatting.put("/api/permissions", json={"classes": ["none", "read"]})
    for method, params in (("tools/call", {"name": "tick"}), ("resources/read", {"uri": "clock://zones"})):
        said = asked(chatting, app, method, params)
        assert said["kind"] == "error" and "'network', which is not granted" in said["message"]


@pytest.mark.parametrize(
    ("method", "params", "code", "message"),
    [
        ("tools/call", {"name": "alarm"}, -32602, "no tool 'alarm' that apps may call"),  # for the model alone
        ("tools/call", {"name": "python", "arguments": {"code": "1"}}, -32602, "no tool 'python'"),
        ("tools/call", {"name": "calculate"}, -32602, "no tool"),
        ("tools/call", {"name": "__proto__"}, -32602, "no tool"),
        ("tools/call", {"name": ["tick"]}, -32602, "takes the name of a tool"),
        ("tools/call", {}, -32602, "takes the name of a tool"),
        ("tools/call", {"name": "tick", "arguments": [1]}, -32602, "arguments as an object"),
        ("tools/call", {"name": "clock", "arguments": {"zone": 5}}, -32602, "zone"),
        ("resources/read", {"uri": "clock://nowhere"}, -32000, "did not give 'clock://nowhere'"),
        ("resources/read", {"uri": 5}, -32602, "uri"),
        ("resources/read", {}, -32602, "uri"),
        ("resources/read", {"uri": "x" * 3000}, -32602, "uri"),
    ],
)
def test_what_is_not_its_servers_or_of_another_form_is_refused(
    clock: Server, chatting: httpx.Client, method: str, params: dict[str, Any], code: int, message: str
) -> None:
    said = asked(chatting, app_of(clock, chatting), method, params)
    assert (said["kind"], said["code"]) == ("error", code) and message in said["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"method": "tools/list", "params": {}}, "method"),
        ({"method": "tools/call"}, "params"),
        ({"method": "tools/call", "params": {}, "decision": "once"}, "arguments_hash"),
        ({"method": "tools/call", "params": {}, "arguments_hash": "0"}, "decision"),
        (
            {"method": "tools/call", "params": {}, "decision": "once", "arguments_hash": "0", "scope": "tool"},
            "decision",
        ),
        ({"method": "tools/call", "params": {}, "server": "other"}, "server"),
    ],
)
def test_a_body_of_another_form_is_refused(
    clock: Server, chatting: httpx.Client, body: dict[str, Any], param: str
) -> None:
    reply = chatting.post(app_of(clock, chatting), json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_a_file_is_no_app_and_a_server_may_be_gone(clock: Server, chatting: httpx.Client) -> None:
    store = clock.app.state.ponder.store.artifacts
    (file,) = clock.on_loop(store.keep(new_chat(chatting), "r", "c", [FileContent("a.html", b"<p>")])).kept
    for reply in (chatting.get(f"/api/artifacts/{file.id}/app"), chatting.post(
        f"/api/artifacts/{file.id}/app", json={"method": "tools/call", "params": {"name": "tick"}}
    )):  # fmt: skip
        error(reply, 404, "no_app")
    gone = app_of(clock, chatting, of="yesterday")
    assert chatting.get(gone).json()["connected"] is False
    said = asked(chatting, gone, "tools/call", {"name": "tick"})
    assert said["message"] == "The MCP server yesterday is not there any more."


def test_an_app_that_calls_without_end_is_told_to_wait(
    clock: Server, chatting: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_requests, "RATE", Rate(1, 3600.0))
    app = app_of(clock, chatting)
    said = [asked(chatting, app, "tools/call", {"name": "clock", "arguments": {"zone": "X"}}) for _ in range(2)]
    assert said[-1]["kind"] == "error" and "may be called 1/hour" in said[-1]["message"]


def test_an_app_goes_with_its_chat(clock: Server, chatting: httpx.Client) -> None:
    app = app_of(clock, chatting)
    chat = json.loads(chatting.get("/api/chats").text)["chats"][0]["id"]
    assert chatting.get(app).status_code == 200
    chatting.delete(f"/api/chats/{chat}")
    error(chatting.get(app), 404, "artifact_not_found")
