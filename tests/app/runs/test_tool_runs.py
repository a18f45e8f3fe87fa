"""Runs with tools, on the bundled model: calls in the log, plugins that change, approvals, and a person's answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import Request

from app.config import LOCAL_USER
from app.current_user import user_of
from app.runs.run_tools import RunTools
from reasoning.agent import Limits
from tests.app.conftest import Server
from tests.app.library import error
from tests.app.runs.test_runs import events
from tools.context import Question
from tools.outcome import Call

pytestmark = pytest.mark.slow

CALCULATOR = '''
from ponder import tool

@tool(permission="none")
def calculate(expression: str) -> str:
    """Work out an arithmetic expression."""
    return str({"23 * 17": 391, "40 * 2": 80}.get(expression, "no idea"))
'''
ASKING = CALCULATOR.replace('permission="none"', 'permission="write", approval="always"')
QUESTION = "What is 23 * 17?"


@pytest.fixture
def http(pebble: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pebble.url, timeout=60) as client:
        yield client


@pytest.fixture
def plugin(pebble: Server, http: httpx.Client) -> Iterator[Any]:
    """Write the plugin `calculator.py`, and wait until the server has it."""
    folder = pebble.data / "plugins"
    folder.mkdir(exist_ok=True)
    path = folder / "calculator.py"

    def write(source: str, until: Any) -> None:
        path.write_text(source, "utf-8")
        pebble.until(lambda _: until(http.get("/api/tools").json()))

    yield write
    path.unlink(missing_ok=True)
    pebble.until(lambda _: not there(http.get("/api/tools").json()))


def there(reply: dict[str, Any]) -> bool:
    return bool(plugged(reply)) and not reply["faults"]


def plugged(reply: dict[str, Any]) -> list[dict[str, Any]]:
    return [tool for tool in reply["tools"] if tool["origin"] == "plugin calculator.py"]


def start(http: httpx.Client, tools: Any = ("calculate",), content: str = QUESTION) -> str:
    chat = http.post("/api/chats", json={}).json()["id"]
    body = {"content": content, "tools": list(tools), "temperature": 0, "max_tokens": 300}
    reply = http.post(f"/api/chats/{chat}/runs", json=body)
    assert reply.status_code == 202, reply.text
    return str(reply.json()["run_id"])


def log_of(http: httpx.Client, run: str) -> list[dict[str, Any]]:
    return [data for _, _, data in events(http, run)]


def of_type(log: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in log if event["type"] == kind]


def test_a_call_is_run_and_its_result_is_in_the_answer(http: httpx.Client, plugin: Any) -> None:
    plugin(CALCULATOR, there)
    log = log_of(http, start(http))
    (call,), (result,) = of_type(log, "tool.call"), of_type(log, "tool.result")
    assert call["name"] == "calculate" and json.loads(call["arguments"]) == {"expression": "23 * 17"}
    assert result["call_id"] == call["call_id"] and result["text"] == "391" and not result["untrusted"]
    assert "391" in of_type(log, "answer.done")[0]["text"] and log[-1]["type"] == "run.completed"


def test_a_plugin_that_changes_is_what_the_next_run_calls(http: httpx.Client, plugin: Any) -> None:
    plugin(CALCULATOR, there)
    changed = CALCULATOR.replace("an arithmetic expression", "an expression, anew").replace("391", "392")
    plugin(changed, lambda reply: there(reply) and "anew" in plugged(reply)[0]["description"])
    assert of_type(log_of(http, start(http)), "tool.result")[0]["text"] == "392"


def test_a_broken_plugin_is_told_and_the_old_one_stays(http: httpx.Client, plugin: Any) -> None:
    plugin(CALCULATOR, there)
    plugin("import nothing_like_this", lambda reply: bool(reply["faults"]))
    reply = http.get("/api/tools").json()
    assert "nothing_like_this" in reply["faults"][0]["message"]
    assert [tool["name"] for tool in plugged(reply)] == ["calculate"]
    assert of_type(log_of(http, start(http)), "tool.result")[0]["text"] == "391"


def waiting_for(http: httpx.Client) -> str | None:
    """Returns what the chat used last waits for, as the list of chats says it."""
    found: str | None = http.get("/api/chats").json()["chats"][0]["waiting_for"]
    return found


@pytest.mark.parametrize(("decision", "ended"), [("once", "tool.result"), ("no", "tool.error")])
def test_what_asks_first_waits_for_a_person(http: httpx.Client, plugin: Any, decision: str, ended: str) -> None:
    plugin(ASKING, there)
    run = start(http)
    log = list[dict[str, Any]]()
    for _, _, event in events(http, run):
        log.append(event)
        if event["type"] == "approval.requested":
            address = f"/api/runs/{run}/approvals/{event['approval_id']}"
            error(http.post(address, json={"decision": "perhaps"}), 400, "invalid_value", "decision")
            assert waiting_for(http) == "approval"
            assert http.post(address, json={"decision": decision}).status_code == 202
            assert waiting_for(http) is None
    (asked,), (resolved,) = of_type(log, "approval.requested"), of_type(log, "approval.resolved")
    assert "23 * 17" in asked["preview"] and resolved["decision"] == decision
    assert len(of_type(log, ended)) == 1 and log[-1]["type"] == "run.completed"
    error(http.post(address, json={"decision": "once"}), 404, "not_waiting")


def test_a_run_that_waits_for_a_person_can_be_stopped(http: httpx.Client, plugin: Any) -> None:
    plugin(ASKING, there)
    run = start(http)
    kinds = list[str]()
    for _, _, event in events(http, run):
        kinds.append(event["type"])
        if event["type"] == "approval.requested":
            threading.Thread(target=lambda: http.post(f"/api/runs/{run}/cancel")).start()
    assert kinds[-1] == "run.cancelled" and "tool.result" not in kinds


def test_a_tool_that_is_not_there_is_refused_by_name(http: httpx.Client, plugin: Any) -> None:
    plugin(CALCULATOR, there)
    chat = http.post("/api/chats", json={}).json()["id"]
    for wanted, param in ((["calculatee"], "tools"), ([], "tools"), (3, "tools")):
        reply = http.post(f"/api/chats/{chat}/runs", json={"content": "?", "tools": wanted})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert (
        "accepted: calculate"
        in http.post(f"/api/chats/{chat}/runs", json={"content": "?", "tools": ["calculatee"]}).text
    )
    assert http.get(f"/api/chats/{chat}").json()["messages"] == []


ASKS = '''
from ponder import Context, tool
from tools.builtin import builtin_tools

@tool(permission="none")
async def calculate(ctx: Context, expression: str) -> str:
    """Work out an arithmetic expression."""
    return await builtin_tools.ask_user(ctx, "Which do you mean?", ["391", "23"])
'''


def test_the_user_is_asked_which_they_mean(http: httpx.Client, plugin: Any) -> None:
    plugin(ASKS, there)
    assert "ask_user" in {tool["name"] for tool in http.get("/api/tools").json()["tools"]}
    run = start(http)
    log = list[dict[str, Any]]()
    for _, _, event in events(http, run):
        log.append(event)
        if event["type"] == "question.asked":
            assert event["text"] == "Which do you mean?" and event["choices"] == ["391", "23"]
            address = f"/api/runs/{run}/questions/{event['question_id']}"
            error(http.post(address, json={"text": "neither"}), 400, "invalid_value", "text")
            assert http.post(address, json={"text": "391"}).status_code == 202
    (result,) = of_type(log, "tool.result")
    assert result["text"] == "The user answered: 391" and "391" in of_type(log, "answer.done")[0]["text"]


async def test_a_question_that_nobody_answers_in_time_is_told_to_the_model(pebble: Server) -> None:
    shed = pebble.app.state.ponder.tool_service
    log: Any = []  # all that is needed of a run's log is that it takes events
    tools = RunTools(
        shed.executor, shed.offered(["ask_user"]), log, run="run_of_nobody", chat="none", user="local",
        limits=Limits(), wait_s=0.01,
    )  # fmt: skip

    async def asked() -> list[str]:
        return await tools.run([Call("c1", "ask_user", {"question": "Which bank?"})])

    (text,) = pebble.on_loop(asked())
    assert "Nobody answered. Go on with what is likeliest" in text
    assert [event.type for event in log if event.type.startswith("question")] == [
        "question.asked", "question.answered",
    ]  # fmt: skip


async def test_an_answer_that_was_taken_as_its_time_ended_counts(pebble: Server) -> None:
    shed = pebble.app.state.ponder.tool_service
    log: Any = []  # all that is needed of a run's log is that it takes events
    tools = RunTools(shed.executor, [], log, run="r", chat="c", user="local", limits=Limits(), wait_s=0.0)
    asking = asyncio.create_task(tools._ask(Question("c1", "ask_user", "Which?")))
    await asyncio.sleep(0)
    tools.answer("question_1", "this one")
    assert await asking == "this one"


async def test_the_time_that_a_person_takes_is_not_the_runs(pebble: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("app.runs.run_tools.time.monotonic", lambda: now[0])
    shed = pebble.app.state.ponder.tool_service
    log: Any = []  # all that is needed of a run's log is that it takes events
    tools = RunTools(shed.executor, [], log, run="r", chat="c", user="local", limits=Limits())
    both = [asyncio.create_task(tools._ask(Question(call, "ask_user", "Which?"))) for call in ("c1", "c2")]
    await asyncio.sleep(0)
    now[0] += 600
    assert tools.clock() == 1000
    tools.answer("question_1", "this one")
    await both[0]
    now[0] += 60
    tools.answer("question_2", "that one")
    await both[1]
    assert tools.clock() == 1000
    now[0] += 5
    assert tools.clock() == 1005


def test_what_writes_asks_first_once_documents_were_read(pebble: Server, http: httpx.Client, plugin: Any) -> None:
    plugin(CALCULATOR.replace('"none"', '"write", approval="never"'), there)
    assert of_type(log_of(http, start(http)), "approval.requested") == [], "nothing was read"
    job = http.post("/api/documents", files={"file": ("a.txt", b"What is 23 * 17? It is asked at school.")}).json()[
        "job"
    ]
    pebble.until(lambda _: http.get(f"/api/jobs/{job['id']}").json()["status"] == "done")
    chat = http.post("/api/chats", json={}).json()["id"]
    body = {"content": QUESTION, "tools": ["calculate"], "temperature": 0, "max_tokens": 300}
    for collections in ("all", None):  # the second answer has the first one, which was made from documents, before it
        reply = http.post(f"/api/chats/{chat}/runs", json={**body, "collections": collections})
        asked = []
        for _, _, event in events(http, reply.json()["run_id"]):
            if event["type"] == "approval.requested":
                asked.append(event["reason"])
                address = f"/api/runs/{reply.json()['run_id']}/approvals/{event['approval_id']}"
                http.post(address, json={"decision": "no"})
        assert asked and "documents" in asked[0], collections


def test_only_whose_run_it_is_can_approve(pebble: Server, http: httpx.Client, plugin: Any) -> None:
    plugin(ASKING, there)
    run = start(http)
    pebble.app.dependency_overrides[user_of] = _who_it_says
    try:
        for _, _, event in events(http, run):
            if event["type"] == "approval.requested":
                address = f"/api/runs/{run}/approvals/{event['approval_id']}"
                assert http.post(address, json={"decision": "once"}, headers={"X-User": "eve"}).status_code == 404
                assert http.post(address, json={"decision": "no"}).status_code == 202
    finally:
        del pebble.app.dependency_overrides[user_of]


async def _who_it_says(request: Request) -> str:
    return request.headers.get("x-user", LOCAL_USER)
