"""The server's own tools in a response: run in its loop, shown as items, held back where a person would be asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from app.answering.answer_pipeline import Answered, AnswerPipeline
from app.openai.responses_job import ResponseJob, ServedTools
from app.openai.responses_request import Offer, ResponseRequest
from ponder import tool
from reasoning.agent import HandedOver, Wrote
from reasoning.thinking import Piece
from reasoning.turn import CallMore, CallStart
from tests.app.conftest import Server
from tests.app.folding import without_ids
from tests.app.openai.test_responses import CALCULATOR, QUESTION, ask, stream
from tests.app.runs.test_tool_runs import ASKING, http, plugin, there
from tests.app.runs.test_tool_runs import CALCULATOR as PLUGIN
from tools.call_policy import CallPolicy
from tools.executor import Executor
from tools.outcome import Call
from tools.registry import Registry

__all__ = ["http", "plugin"]  # fixtures

pytestmark = [pytest.mark.usefixtures("nothing_lost_by_pebble"), pytest.mark.slow]

Json = dict[str, Any]


def served(*names: str) -> Json:
    return {"type": "mcp", "server_label": "ponder", "allowed_tools": list(names), "require_approval": "never"}


def test_a_call_is_run_in_the_response_and_its_result_is_in_the_answer(http: httpx.Client, plugin: Any) -> None:
    plugin(PLUGIN, there)
    answer = stream(http, tools=[served("calculate")])
    call, message = answer["output"]
    assert call["type"] == "mcp_call" and call["status"] == "completed" and call["error"] is None
    assert (call["name"], json.loads(call["arguments"]), call["output"]) == (
        "calculate", {"expression": "23 * 17"}, "391",
    )  # fmt: skip
    assert "391" in message["content"][0]["text"]
    assert without_ids(answer) == without_ids(ask(http, tools=[served("calculate")]))


def test_a_web_search_without_an_engine_is_left_out_beside_other_tools(http: httpx.Client) -> None:
    """As Codex sends it with its functions."""
    answer = ask(http, tools=[CALCULATOR, {"type": "web_search", "external_web_access": True}])
    assert answer["warnings"] == [
        "tools[1] is a web search, and this server has no search engine: it is not offered to the model."
    ]
    assert answer["usage"]["input_tokens"] == ask(http, tools=[CALCULATOR])["usage"]["input_tokens"]


def test_results_are_counted_as_read(http: httpx.Client, plugin: Any) -> None:
    plugin(PLUGIN, there)
    answer = ask(http, tools=[served("calculate")])
    none = ask(http, tools=[served("calculate")], max_output_tokens=1)
    assert none["status"] == "incomplete" and none["usage"]["output_tokens"] == 1
    assert 0 < answer["usage"]["input_tokens"] - none["usage"]["input_tokens"] < 40
    assert 0 < none["usage"]["input_tokens_details"]["cached_tokens"] < none["usage"]["input_tokens"]


def test_a_conversation_goes_on_after_the_servers_calls(http: httpx.Client, plugin: Any) -> None:
    plugin(PLUGIN, there)
    first = ask(http, tools=[served("calculate")])
    kept = ask(http, "What is 40 * 2?", tools=[served("calculate")], previous_response_id=first["id"])
    assert kept["output"][0]["output"] == "80" and "80" in kept["output"][-1]["content"][0]["text"]
    items = [{"role": "user", "content": QUESTION}, *first["output"], {"role": "user", "content": "What is 40 * 2?"}]
    by_hand = ask(http, items, tools=[served("calculate")])
    assert by_hand["usage"]["input_tokens"] == kept["usage"]["input_tokens"]


def test_what_needs_a_persons_approval_fails_and_does_not_run(http: httpx.Client, plugin: Any) -> None:
    plugin(ASKING, there)
    answer = stream(http, tools=[served("calculate")])
    call = answer["output"][0]
    assert call["type"] == "mcp_call" and call["status"] == "failed" and call["output"] is None
    assert "approval" in call["error"]["content"][0]["text"]


ENDLESS = """
import asyncio

from ponder import tool

@tool(permission="none", timeout=500)
async def calculate(expression: str) -> str:
    \"\"\"Work out an arithmetic expression.\"\"\"
    await asyncio.Event().wait()
    return "never"
"""


def test_leaving_while_a_tool_runs_ends_it(pebble: Server, http: httpx.Client, plugin: Any) -> None:
    plugin(ENDLESS, there)
    body = {"model": "default", "input": QUESTION, "tools": [served("calculate")], "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/responses", json=body) as reply:
        assert "event: response.mcp_call_arguments.done" in reply.iter_lines()  # reads no further
    pebble.until(lambda s: s.sequences == 0)


def test_none_of_the_servers_tools_is_called_where_none_may_be(http: httpx.Client, plugin: Any) -> None:
    plugin(PLUGIN, there)
    answer = stream(http, tools=[served("calculate")], tool_choice="none")
    assert "mcp_call" not in [item["type"] for item in answer["output"]]


def test_a_call_of_the_clients_ends_the_loop(http: httpx.Client, plugin: Any) -> None:
    plugin(PLUGIN.replace("calculate", "unit_of").replace("arithmetic expression", "unit"), there)
    answer = stream(http, tools=[CALCULATOR, served("unit_of")])
    assert answer["status"] == "completed"
    assert (answer["output"][-1]["type"], answer["output"][-1]["name"]) == ("function_call", "calculator")
    result = {"type": "function_call_output", "call_id": answer["output"][-1]["call_id"], "output": "391"}
    after = ask(http, [result], tools=[CALCULATOR, served("unit_of")], previous_response_id=answer["id"])
    assert "391" in after["output"][-1]["content"][0]["text"]


class BothCalled(AnswerPipeline):
    """A model that writes one turn with a call of each kind, which the bundled one never does."""

    async def stream(self) -> AsyncGenerator[Answered, None]:
        calls = [Call("a", "calculate", '{"expression": "40 * 2"}'), Call("b", "calculator", "{}")]
        for at, call in enumerate(calls):
            assert isinstance(call.arguments, str)
            deltas = (CallStart(at, call.id, call.name), CallMore(at, call.arguments))
            yield 0, Wrote(Piece("call", "", 1, finish_reason="stop" if at else None), deltas)
        assert self.loop is not None
        with contextlib.suppress(HandedOver):
            await self.loop.tools.run(calls)


def test_a_turn_with_both_kinds_shows_the_servers_result_and_ends(
    pebble: Server, http: httpx.Client, plugin: Any
) -> None:
    plugin(PLUGIN, there)
    body = {"model": "default", "input": QUESTION, "tools": [CALCULATOR, served("calculate")]}

    async def made() -> Json:
        state, request = pebble.app.state.ponder, ResponseRequest.model_validate(body)
        job = await ResponseJob.of(request, Offer.of(request), state, "local")
        made = job.pipeline
        job.pipeline = BothCalled(made.watch, made.plans, loop=made.loop)
        return await job.whole()

    answer = pebble.on_loop(made())
    ours, theirs = answer["output"]
    assert (ours["type"], ours["status"], ours["output"]) == ("mcp_call", "completed", "80")
    assert (theirs["type"], theirs["status"], theirs["call_id"]) == ("function_call", "completed", "b")
    assert answer["status"] == "completed" and http.get(f"/v1/responses/{answer['id']}").json() == answer


@tool(permission="none")
def double(n: int) -> int:
    """Twice a number."""
    return 2 * n


@tool(permission="write", approval="never")
def note(text: str) -> str:
    """Keep a text."""
    return "kept"


def tools_of(*, alone: bool = False, read_from: tuple[str, ...] = ()) -> ServedTools:
    registry = Registry()
    registry.add(double, note)
    executor = Executor(registry, CallPolicy(default=("none", "read", "write")))
    return ServedTools(executor, list(registry), response="resp_1", user="ana", read_from=read_from, alone=alone)


def test_a_turn_with_both_kinds_of_calls_has_the_servers_run() -> None:
    tools = tools_of()
    calls = [Call("a", "double", '{"n": 21}'), Call("b", "theirs", "{}"), Call("c", "double", '{"n": 4}')]
    with pytest.raises(HandedOver):
        asyncio.run(tools.run(calls))
    assert {id: outcome.result.text for id, outcome in tools.outcomes.items()} == {"a": "42", "c": "8"}


def test_only_without_functions_of_the_clients_does_a_call_begin_early() -> None:
    call = Call("a", "double", '{"n": 21}')
    assert tools_of(alone=True).only_reads(call) and not tools_of().only_reads(call)
    assert not tools_of(alone=True).only_reads(Call("b", "note", '{"text": "x"}'))


def test_a_conversation_that_read_results_keeps_tools_from_writing(http: httpx.Client, plugin: Any) -> None:
    plugin(PLUGIN.replace('permission="none"', 'permission="write", approval="never"'), there)
    read = [
        {"role": "user", "content": "What is 40 * 2?"},
        {"type": "function_call", "call_id": "x", "name": "calculate", "arguments": '{"expression": "40 * 2"}'},
        {"type": "function_call_output", "call_id": "x", "output": "80"},
        {"role": "assistant", "content": "40 * 2 = 80."},
        {"role": "user", "content": QUESTION},
    ]
    clean, tainted = ask(http, tools=[served("calculate")]), ask(http, read, tools=[served("calculate")])
    assert clean["output"][0]["status"] == "completed" and tainted["output"][0]["status"] == "failed"


def test_what_was_read_before_keeps_tools_from_writing() -> None:
    call = Call("a", "note", '{"text": "x"}')
    clean, tainted = tools_of(), tools_of(read_from=("fetch",))
    asyncio.run(clean.run([call]))
    asyncio.run(tainted.run([call]))
    assert clean.outcomes["a"].ok
    assert (tainted.outcomes["a"].kind == "denied" and "fetch" in tainted.outcomes["a"].text) or "approval" in (
        tainted.outcomes["a"].text
    )


SHELL: Json = {
    "type": "namespace", "name": "mcp__shell", "description": "A shell.",
    "tools": [
        {
            "type": "function", "name": "run", "strict": True,
            "parameters": {
                "type": "object", "properties": {"line": {"enum": ["ls", "pwd"]}}, "required": ["line"],
                "additionalProperties": False,
            },
        }
    ],
}  # fmt: skip


def test_a_function_of_a_namespace_is_called_by_both_names(http: httpx.Client) -> None:
    answer = stream(http, "List the files.", tools=[SHELL], tool_choice="required", parallel_tool_calls=False)
    call = answer["output"][-1]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__shell", "run")
    assert json.loads(call["arguments"])["line"] in ("ls", "pwd")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
    again = ask(http, [{"role": "user", "content": "List the files."}, *answer["output"], result], tools=[SHELL])
    assert again["usage"]["input_tokens"] > answer["usage"]["input_tokens"]


def test_the_answer_after_the_servers_calls_fits_the_form(http: httpx.Client, plugin: Any) -> None:
    plugin(PLUGIN, there)
    schema = {
        "type": "object", "properties": {"n": {"enum": [391, 392]}}, "required": ["n"], "additionalProperties": False,
    }  # fmt: skip
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    answer = stream(http, tools=[served("calculate")], text=text, max_tool_calls=1)
    assert answer["output"][0]["type"] == "mcp_call"
    assert json.loads(answer["output"][-1]["content"][0]["text"])["n"] in (391, 392)


def test_so_many_turns_call_as_max_tool_calls_allows(http: httpx.Client, plugin: Any) -> None:
    plugin(PLUGIN, there)
    answer = ask(http, "What is 23 * 17? And 40 * 2?", tools=[served("calculate")], max_tool_calls=1)
    assert sum(item["type"] == "mcp_call" for item in answer["output"]) <= 1 and answer["max_tool_calls"] == 1
