"""Tests what a user lets tools do, over HTTP: classes everywhere and in one chat, and answers that outlast the
server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.conftest import PEBBLE, Server, serving
from tests.app.library import error
from tests.app.runs.test_runs import events

pytestmark = pytest.mark.slow

ALL = ["none", "read", "write", "network", "execute"]
PLUGIN = '''
from ponder import tool

@tool(permission="write", approval="always")
def calculate(expression: str) -> str:
    """Work out an arithmetic expression."""
    return str({"23 * 17": 391, "40 * 2": 80}.get(expression, "no idea"))
'''
QUESTION = "What is 23 * 17?"


@pytest.fixture
def http(pebble: Server) -> Iterator[httpx.Client]:
    """A client, on a server where nothing is set afterwards, with a tool that asks."""
    with httpx.Client(base_url=pebble.url, timeout=60) as client:
        plug(pebble, client)
        yield client
        (pebble.data / "plugins" / "asking.py").unlink()
        pebble.until(lambda _: not offered(client))
        client.delete("/api/permissions")
        for each in client.get("/api/permissions").json()["remembered"]:
            client.delete(f"/api/permissions/{each['id']}")


def plug(server: Server, http: httpx.Client, source: str = PLUGIN) -> None:
    folder = server.data / "plugins"
    folder.mkdir(exist_ok=True)
    (folder / "asking.py").write_text(source)
    server.until(lambda _: bool(offered(http)))


def offered(http: httpx.Client) -> list[dict[str, Any]]:
    return [tool for tool in http.get("/api/tools").json()["tools"] if tool["origin"] == "plugin asking.py"]


def new_chat(http: httpx.Client) -> str:
    return str(http.post("/api/chats", json={}).json()["id"])


def ended(http: httpx.Client, chat: str, answer: str | None = None, question: str = QUESTION) -> list[dict[str, Any]]:
    """The log of a run, whose approvals all get this answer."""
    body = {"content": question, "tools": ["calculate"], "temperature": 0, "max_tokens": 300}
    run = http.post(f"/api/chats/{chat}/runs", json=body).json()["run_id"]
    log = list[dict[str, Any]]()
    for _, _, event in events(http, run):
        log.append(event)
        if event["type"] == "approval.requested":
            assert answer is not None, event
            address = f"/api/runs/{run}/approvals/{event['approval_id']}"
            assert http.post(address, json={"decision": answer}).status_code == 202
    return log


def kinds(log: list[dict[str, Any]]) -> set[str]:
    return {event["type"] for event in log}


def test_everything_is_permitted_until_something_is_said(http: httpx.Client) -> None:
    shown = http.get("/api/permissions").json()
    assert shown == {"classes": ALL, "default": ALL, "chats": {}, "remembered": []}


def test_a_class_that_was_taken_away_is_denied_to_the_next_call(http: httpx.Client) -> None:
    chat = new_chat(http)
    assert http.put("/api/permissions", json={"classes": ["read", "none"]}).json()["classes"] == ["none", "read"]
    denied = [event for event in ended(http, chat) if event["type"] == "tool.error"]
    assert denied[0]["kind"] == "denied" and "'write', which is not granted" in denied[0]["message"]
    assert http.delete("/api/permissions").status_code == 204
    assert "tool.result" in kinds(ended(http, new_chat(http), "once"))


def test_a_chat_narrows_its_user_and_never_widens(http: httpx.Client) -> None:
    narrow, other = new_chat(http), new_chat(http)
    http.put("/api/permissions", json={"classes": ["none", "write"]})
    shown = http.put(f"/api/chats/{narrow}/permissions", json={"classes": ["read", "none"]}).json()
    assert shown == {"chat_id": narrow, "classes": ["none", "read"], "permitted": ["none"]}
    assert http.get("/api/permissions").json()["chats"] == {narrow: ["none", "read"]}
    assert "tool.result" not in kinds(ended(http, narrow))
    assert "tool.result" in kinds(ended(http, other, "once"))
    assert http.delete(f"/api/chats/{narrow}/permissions").status_code == 204
    shown = http.get(f"/api/chats/{narrow}/permissions").json()
    assert shown == {"chat_id": narrow, "classes": None, "permitted": ["none", "write"]}


@pytest.mark.parametrize(("answer", "then"), [("always", "tool.result"), ("never", "tool.error")])
def test_an_answer_that_is_remembered_is_shown_and_can_be_forgotten(http: httpx.Client, answer: str, then: str) -> None:
    assert "approval.requested" in kinds(ended(http, new_chat(http), answer))
    again = kinds(ended(http, new_chat(http)))
    assert then in again and "approval.requested" not in again
    (kept,) = http.get("/api/permissions").json()["remembered"]
    assert kept["preview"] == 'calculate(expression="23 * 17")' and kept["allow"] is (answer == "always")
    assert (kept["tool"], kept["origin"], kept["chat_id"]) == ("calculate", "plugin asking.py", None)
    assert kept["scope"] == "arguments" and len(kept["arguments_hash"]) == 64 and kept["expires_at"] is None
    assert http.delete(f"/api/permissions/{kept['id']}").status_code == 204
    error(http.delete(f"/api/permissions/{kept['id']}"), 404, "not_found")
    assert "approval.requested" in kinds(ended(http, new_chat(http), "no"))


def test_an_answer_for_one_call_is_not_for_another(http: httpx.Client) -> None:
    ended(http, new_chat(http), "always")
    assert "approval.requested" in kinds(ended(http, new_chat(http), "no", "What is 40 * 2?"))


def test_an_answer_for_good_outlasts_the_server(tmp_path: Path) -> None:
    for asked, answer in ((True, "always"), (False, None)):
        with serving(PEBBLE, tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            plug(server, http)
            log = kinds(ended(http, new_chat(http), answer))
            assert "tool.result" in log and ("approval.requested" in log) is asked


def test_a_plugin_that_changes_what_it_says_asks_again(pebble: Server, http: httpx.Client) -> None:
    ended(http, new_chat(http), "always")
    plug(pebble, http, PLUGIN.replace("Work out", "Work out, and keep,"))
    pebble.until(lambda _: "keep" in offered(http)[0]["description"])
    assert "approval.requested" in kinds(ended(http, new_chat(http), "no"))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "classes"),
        ({"classes": "all"}, "classes"),
        ({"classes": ["read", "root"]}, "classes[1]"),
        ({"classes": [], "chat": "x"}, "chat"),
    ],
)
def test_what_is_no_class_is_refused_by_name(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    for address in ("/api/permissions", f"/api/chats/{new_chat(http)}/permissions"):
        reply = http.put(address, json=body)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
    assert http.get("/api/permissions").json()["classes"] == ALL


def test_a_chat_that_is_not_there_has_no_permissions(http: httpx.Client) -> None:
    error(http.get("/api/chats/nowhere/permissions"), 404, "chat_not_found")
    error(http.put("/api/chats/nowhere/permissions", json={"classes": []}), 404, "chat_not_found")
    assert http.get("/api/permissions").json()["chats"] == {}
