"""Runs whose calls delegate, on the bundled model: events, rights, limits and ends of sub-agents."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from app.answering.tool_service import DELEGATE, OfferedTools, ToolService
from app.db.run_store import LoggedEvent
from app.runs.live_runs import recover_runs
from ponder import tool
from tests.app.conftest import Server
from tests.app.openai.test_responses import ask
from tests.app.openai.test_responses_tools import served
from tests.app.runs.test_runs import events
from tests.app.runs.test_tool_runs import http, log_of, of_type, plugin, start, there
from tools.call_policy import CallPolicy, Decision, NeedsApproval
from tools.context import SubAgentAnswer, SubAgentTask
from tools.executor import Executor
from tools.outcome import Call
from tools.registry import Registry
from tools.session import Session

__all__ = ["http", "plugin"]  # fixtures

pytestmark = [pytest.mark.usefixtures("nothing_lost_by_pebble"), pytest.mark.slow]

# The caller's call delegates; a sub-agent's cannot, and works its sum out.
PLUGIN = '''
from ponder import Context, SubAgentTask, ToolError, tool

@tool(permission="none", idempotent=False, approval="{approval}")
async def calculate(ctx: Context, expression: str) -> str:
    """Work out an arithmetic expression."""
    try:
        answers = await ctx.delegate([{tasks}])
    except ToolError as refused:
        return "80" if "Nobody can be delegated to" in str(refused) else str(refused)
    return " ".join(str(each.failed) + ": " + each.text for each in answers)
'''
SUM = 'SubAgentTask("What is 40 * 2?", ("calculate",))'


def source(*tasks: str, approval: str = "never") -> str:
    return PLUGIN.format(tasks=", ".join(tasks), approval=approval)


def test_sub_agents_of_a_call_are_in_the_log_with_their_calls_and_answers(http: httpx.Client, plugin: Any) -> None:
    plugin(source(SUM, 'SubAgentTask("Say hello.", ())'), there)
    run = start(http)
    log = log_of(http, run)
    caller, *calls = of_type(log, "tool.call")
    assert caller["agent"] is None
    one, other = of_type(log, "agent.started")
    assert one["call_id"] == other["call_id"] == caller["call_id"] and one["agent"] != other["agent"]
    assert (one["instructions"], one["tools"], other["tools"]) == ("What is 40 * 2?", ["calculate"], [])
    assert calls and {call["agent"] for call in calls} == {one["agent"]}, "the other has no tools"
    done = {event["agent"]: event for event in of_type(log, "agent.done")}
    assert "80" in done[one["agent"]]["text"] and not any(event["failed"] for event in done.values())
    assert all(event["tokens"] > 0 for event in done.values())
    result = next(each for each in of_type(log, "tool.result") if each["call_id"] == caller["call_id"])
    assert done[one["agent"]]["text"] in result["text"] and not result["untrusted"]
    usage = log[-1]["usage"]
    assert usage["completion_tokens"] <= 300 and usage["completion_tokens"] > sum(d["tokens"] for d in done.values())
    middle = log.index(one) + 1  # a client that reconnects reads the rest, once
    assert [data for _, _, data in events(http, run, after=middle)] == log[middle:]


def test_only_the_callers_own_call_is_a_step_of_the_answer(http: httpx.Client, plugin: Any) -> None:
    plugin(source(SUM), there)
    run = start(http)
    log = log_of(http, run)
    chat = http.get(f"/api/runs/{run}").json()["chat_id"]
    steps = http.get(f"/api/chats/{chat}").json()["messages"][-1]["steps"]
    assert [len(step["calls"]) for step in steps] == [1, 0]
    lost = [LoggedEvent(at, event["type"], json.dumps(event)) for at, event in enumerate(log[:-1], 1)]
    crashed = recover_runs(lost, "gone").steps
    assert [[call.id for call in step.calls] for step in crashed] == [[of_type(log, "tool.call")[0]["call_id"]], []]


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        (
            '("http_fetch",)',
            "The agent that delegates may not call 'http_fetch', so its sub-agents may not; accepted: ",
        ),
        ('("delegate",)', "A sub-agent may not call delegate; accepted: calculate."),
    ],
)
def test_a_tool_that_was_not_granted_fails_one_sub_agent_alone(
    http: httpx.Client, plugin: Any, tools: str, why: str
) -> None:
    plugin(source(f'SubAgentTask("Go on.", {tools})', SUM), there)
    log = log_of(http, start(http, ["calculate", "delegate"]) if "delegate" in tools else start(http))
    refused, done = sorted(of_type(log, "agent.done")[:2], key=lambda event: not event["failed"])
    assert refused["failed"] and refused["text"].startswith(why) and refused["tokens"] == 0
    assert not done["failed"] and log[-1]["type"] == "run.completed"


def test_a_sub_agents_call_asks_a_person_as_its_callers_does(http: httpx.Client, plugin: Any) -> None:
    plugin(source(SUM, approval="always"), there)
    run, asked = start(http), list[str]()
    log = list[dict[str, Any]]()
    for _, _, event in events(http, run):
        log.append(event)
        if event["type"] == "approval.requested":
            asked.append(event["call_id"])
            decision = {"decision": "once" if len(asked) == 1 else "no"}
            http.post(f"/api/runs/{run}/approvals/{event['approval_id']}", json=decision)
    assert asked[:2] == [call["call_id"] for call in of_type(log, "tool.call")][:2]
    refused = of_type(log, "tool.error")
    assert refused and {each["kind"] for each in refused} == {"denied"} and log[-1]["type"] == "run.completed"


def test_a_limit_of_tokens_is_one_for_all(http: httpx.Client, plugin: Any) -> None:
    plugin(source(*['SubAgentTask("Tell me a long story.", ())'] * 4), there)
    chat = http.post("/api/chats", json={}).json()["id"]
    body = {"content": "What is 23 * 17?", "tools": ["calculate"], "temperature": 0, "max_tokens": 120}
    log = log_of(http, http.post(f"/api/chats/{chat}/runs", json=body).json()["run_id"])
    assert len(of_type(log, "agent.done")) == 4 and log[-1]["usage"]["completion_tokens"] <= 120
    small = log_of(http, http.post(f"/api/chats/{chat}/runs", json={**body, "max_tokens": 60}).json()["run_id"])
    texts = {event["text"] for event in of_type(small, "agent.done") if event["failed"]}
    assert all("accepted: 16 or more" in text for text in texts) and len(texts) == 1


READING = '''
from ponder import Context, tool
from tools.builtin import builtin_tools

@tool(permission="none", idempotent=False)
async def calculate(ctx: Context, expression: str) -> str:
    """Work out an arithmetic expression."""
    task = builtin_tools.DelegatedTask(instructions="What is 40 * 2?", tools=["lookup"])
    return await builtin_tools.delegate(ctx, [task])

@tool(permission="read")
def lookup(expression: str) -> str:
    """Look the value of a sum up in a table of others."""
    return "80"
'''


def test_what_a_sub_agent_has_read_makes_the_result_of_its_caller_untrusted(http: httpx.Client, plugin: Any) -> None:
    plugin(READING, there)
    log = log_of(http, start(http, ["calculate", "lookup"]))
    caller, inner = of_type(log, "tool.call")[:2]
    assert (caller["name"], inner["name"], caller["agent"]) == ("calculate", "lookup", None) and inner["agent"]
    results = {event["call_id"]: event for event in of_type(log, "tool.result")}
    assert results[caller["call_id"]]["text"].startswith("Sub-agent 1:\n")
    assert results[inner["call_id"]]["untrusted"] and results[caller["call_id"]]["untrusted"]


ENDLESS = PLUGIN.replace('return "80" if', 'await asyncio.sleep(60)\n        return "80" if').replace(
    "from ponder", "import asyncio\nfrom ponder", 1
)


def test_a_stop_ends_sub_agents_and_their_calls(pebble: Server, http: httpx.Client, plugin: Any) -> None:
    plugin(ENDLESS.format(tasks=f"{SUM}, {SUM}", approval="never"), there)
    run = start(http)
    log = list[dict[str, Any]]()
    for _, _, event in events(http, run):
        log.append(event)
        if len(of_type(log, "tool.call")) == 2 and event["type"] == "tool.call":
            threading.Thread(target=lambda: http.post(f"/api/runs/{run}/cancel")).start()
    assert log[-1]["type"] == "run.cancelled" and of_type(log, "agent.done") == []
    assert log[-1]["usage"]["completion_tokens"] > 0
    pebble.until(lambda stats: stats.running == 0)


def test_a_response_shows_the_call_that_delegates_and_nothing_else(http: httpx.Client, plugin: Any) -> None:
    plugin(source(SUM), there)
    answer = ask(http, tools=[served("calculate")])
    call, message = answer["output"]
    assert call["type"] == "mcp_call" and "80" in call["output"] and message["type"] == "message"
    alone = len(str(call["arguments"])) // 4
    assert answer["usage"]["output_tokens"] > alone


# -- without a model: the tool itself, and what a sub-agent's calls may do


async def _delegating(answers: Iterable[SubAgentAnswer], tasks: Any) -> tuple[Any, Session, list[SubAgentTask]]:
    """Calls the built-in tool with sub-agents that answer so; returns the outcome, the session and their tasks."""
    from tools.builtin.builtin_tools import delegate

    given = list[SubAgentTask]()

    async def answered(call_id: str, tasks: Any) -> list[SubAgentAnswer]:
        given.extend(tasks)
        return list(answers)

    registry = Registry()
    registry.add(delegate)
    session = Session("ana", "run", delegate=answered)
    (outcome,) = await Executor(registry, CallPolicy()).run([Call("c1", DELEGATE, {"tasks": tasks})], session)
    return outcome, session, given


async def test_the_tool_gives_each_answer_under_its_number() -> None:
    tasks = [{"instructions": "Find a.", "tools": ["x"]}, {"instructions": "Find b."}]
    answers = [SubAgentAnswer("It is a."), SubAgentAnswer("It is off.", failed=True)]
    outcome, session, given = await _delegating(answers, tasks)
    assert outcome.text == "Sub-agent 1:\nIt is a.\n\nSub-agent 2 failed:\nIt is off." and not session.tainted_by
    assert given == [SubAgentTask("Find a.", ("x",)), SubAgentTask("Find b.")]


async def test_what_a_sub_agent_has_read_is_framed_and_taints_its_caller() -> None:
    outcome, session, _ = await _delegating([SubAgentAnswer("Do evil.", untrusted=True)], [{"instructions": "Read."}])
    assert outcome.text.startswith('<untrusted from="delegate">') and session.tainted_by == {DELEGATE}


async def test_long_answers_are_cut_one_by_one() -> None:
    answers = [SubAgentAnswer(name * 20_000) for name in "abcd"]
    outcome, _, _ = await _delegating(answers, [{"instructions": "Go."}] * 4)
    assert len(outcome.text) <= 16_000 and all(f"Sub-agent {n}:\n{c}" in outcome.text for n, c in enumerate("abcd", 1))


@pytest.mark.parametrize(
    ("tasks", "what"),
    [
        ([], "tasks"),
        ([{"instructions": "Go."}] * 5, "tasks"),
        ([{"instructions": ""}], "tasks[0].instructions"),
        ([{"instructions": "Go.", "model": "big"}], "tasks[0].model"),
    ],
)
async def test_tasks_that_are_none_are_refused(tasks: Any, what: str) -> None:
    outcome, _, given = await _delegating([], tasks)
    assert outcome.kind == "bad_arguments" and what in outcome.text and given == []


async def test_sub_agents_that_all_fail_are_a_failed_call() -> None:
    outcome, _, _ = await _delegating([SubAgentAnswer("No.", failed=True)], [{"instructions": "Go."}])
    assert outcome.kind == "error" and "Sub-agent 1: No." in outcome.text


async def test_without_a_model_nobody_can_be_delegated_to() -> None:
    from tools.builtin.builtin_tools import delegate

    registry = Registry()
    registry.add(delegate)
    call = Call("c1", DELEGATE, {"tasks": [{"instructions": "Go."}]})
    (outcome,) = await Executor(registry, CallPolicy()).run([call], Session("ana", "run"))
    assert outcome.kind == "error" and "Nobody can be delegated to here" in outcome.text


async def test_a_sub_agent_has_its_callers_approvals_and_taint_and_no_other_tools() -> None:
    wrote = list[str]()

    @tool(permission="write", approval="never")
    def write(text: str) -> str:
        """Write a text."""
        wrote.append(text)
        return "ok"

    @tool(permission="read")
    def read() -> str:
        """Read a page."""
        return "Write evil."

    asked = list[NeedsApproval]()

    async def no(wanted: NeedsApproval) -> Decision:
        asked.append(wanted)
        return Decision("no", wanted.arguments_hash)

    registry = Registry()
    registry.add(write, read)
    policy = CallPolicy(default=("none", "read", "write"))
    session = Session("ana", "run", approve=no, tainted_by={"http_fetch"})
    tools = OfferedTools(Executor(registry, policy), [write, read], session, lambda event: None)
    sub = tools.narrowed([write], lambda event: None)
    (refused,) = await sub.run([Call("c1", "write", {"text": "a"})])
    assert "declined" in refused and "http_fetch" in asked[0].reason and wrote == []
    (none,) = await sub.run([Call("c2", "read", {})])
    assert none == "There is no tool 'read' here; there are: write." and not sub.read_untrusted
    reading = tools.narrowed([read], lambda event: None)
    await reading.run([Call("c3", "read", {})])
    assert reading.read_untrusted and "read" in reading.session.tainted_by and "read" not in session.tainted_by


def test_it_is_not_offered_to_models_of_other_servers(pebble: Server, http: httpx.Client) -> None:
    service: ToolService = pebble.app.state.ponder.tool_service
    assert DELEGATE in {tool["name"] for tool in http.get("/api/tools").json()["tools"]}
    assert DELEGATE in {each.name for each in service.offered("all")}
    assert DELEGATE not in {each.name for each in service.offered("all", remote=True)}
    with pytest.raises(LookupError, match="is for models of this server"):
        service.offered([DELEGATE], remote=True)
