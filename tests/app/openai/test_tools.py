"""Tools, seen from outside: which calls come, what they are held to, and what is refused. The model is a real one, and
so small that hardly any call makes sense: what is tested is that none can be invalid."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.app.conftest import Server
from tests.app.toolbox import (
    ADD,
    LIGHTS_OFF,
    TOOLS,
    TRIP,
    WEATHER,
    ask,
    begins_call,
    chat,
    check_call,
    join,
    named,
    refusal,
    stream,
    without_ids,
)
from tests.app.toolbox import tool as make_tool

pytestmark = [pytest.mark.usefixtures("nothing_lost_by_pebble"), pytest.mark.slow]

CHAT = "/v1/chat/completions"
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
OPEN_THINKING = {"chat_template_kwargs": {"open_thinking": True}}
HELD_BY_NOBODY: dict[str, Any] = {
    "not": {"properties": {"a": {"not": {"type": "string"}}}},
    "if": {"properties": {"a": {"if": {"type": "string"}, "then": {"minLength": 3}}}},
    "uniqueItems": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    "contains": {"properties": {"a": {"type": "array", "contains": {"const": 1}}}},
    "propertyNames": {"properties": {"a": {"type": "object", "propertyNames": {"maxLength": 9}}}},
}


def calls_of(reply: dict[str, Any]) -> list[Any]:
    return list(reply["choices"][0]["message"].get("tool_calls", []))


def test_a_free_answer_may_call_one_tool(pebble: Server, pebble_http: httpx.Client) -> None:
    for seed in range(4):
        reply = ask(
            pebble_http, "Weather in Oslo?", tools=TOOLS, logit_bias={begins_call(pebble): 100}, temperature=1.5,
            seed=seed, parallel_tool_calls=False, **NO_THINKING,
        )  # fmt: skip
        (choice,) = reply["choices"]
        (call,) = calls_of(reply)
        check_call(call, TOOLS)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None and choice["message"]["role"] == "assistant"


def test_a_free_answer_may_call_no_tool(pebble: Server, pebble_http: httpx.Client) -> None:
    reply = ask(pebble_http, tools=TOOLS, tool_choice="auto", logit_bias={begins_call(pebble): -100}, **NO_THINKING)
    (choice,) = reply["choices"]
    assert "tool_calls" not in choice["message"] and choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_required_is_calls_and_nothing_else(pebble_http: httpx.Client, temperature: float) -> None:
    called = set()
    for seed, question in enumerate(["What is the weather like in Oslo?", "Add 17 and 26."] * 3):
        reply = ask(
            pebble_http, question, tools=TOOLS, tool_choice="required", temperature=temperature, seed=seed,
            max_tokens=400, parallel_tool_calls=False, **NO_THINKING,
        )  # fmt: skip
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        for call in calls_of(reply):
            check_call(call, TOOLS)
            called.add(call["function"]["name"])
    assert len(called) > 1  # the choice among them is the model's


@pytest.mark.parametrize("each", TOOLS, ids=lambda t: t["function"]["name"])
@pytest.mark.parametrize("variables", [NO_THINKING, OPEN_THINKING], ids=["at once", "after thinking"])
def test_a_named_tool_is_called_exactly_once(pebble_http: httpx.Client, each: Any, variables: Any) -> None:
    name = each["function"]["name"]
    reply = ask(
        pebble_http, "What is 17 + 26?", tools=TOOLS, tool_choice=named(name), temperature=1, seed=1, max_tokens=600,
        **variables,
    )  # fmt: skip
    (choice,) = reply["choices"]
    if variables is OPEN_THINKING:
        assert choice["message"]["reasoning_content"]
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 1
    if choice["finish_reason"] == "length":  # it never stopped to think
        assert not calls_of(reply) and variables is OPEN_THINKING
        return
    (call,) = calls_of(reply)
    assert call["function"]["name"] == name and choice["message"]["content"] is None
    check_call(call, TOOLS)


@pytest.mark.parametrize("variables", [{}, OPEN_THINKING], ids=["may think", "thinks"])
def test_thinking_is_no_way_around_a_required_call(pebble: Server, pebble_http: httpx.Client, variables: Any) -> None:
    """The end of the answer is made as likely as can be, in the thinking too."""
    end = {str(id): 100 for id in pebble.engine.tokenizer.eos_token_ids}
    for prompt in ("Who are you?", "Use 4, 6 and 9 to make 33.", "What is 17 + 26?"):
        reply = ask(
            pebble_http, prompt, tools=TOOLS, tool_choice="required", logit_bias=end, max_tokens=200, **variables
        )
        if reply["choices"][0]["finish_reason"] != "length":
            (call,) = calls_of(reply)
            check_call(call, TOOLS)
            assert reply["choices"][0]["finish_reason"] == "tool_calls"


def test_where_thinking_is_switched_off_there_is_none_before_a_call(pebble: Server, pebble_http: httpx.Client) -> None:
    opening = {str(pebble.engine.tokenizer.token_id("<think>")): 100}
    reply = ask(pebble_http, tools=[ADD], tool_choice="required", logit_bias=opening, **NO_THINKING)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    check_call(calls_of(reply)[0], [ADD])


def test_none_calls_nothing_and_does_not_show_the_tools(pebble_http: httpx.Client) -> None:
    plain = ask(pebble_http, seed=1)
    for seed in range(4):
        reply = ask(pebble_http, tools=TOOLS, tool_choice="none", temperature=1.5, seed=seed, **NO_THINKING)
        assert "tool_calls" not in reply["choices"][0]["message"]
    reply = ask(pebble_http, tools=TOOLS, tool_choice="none", seed=1)
    assert reply["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert reply["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]


def test_parallel_calls_come_unless_forbidden(pebble: Server, pebble_http: httpx.Client) -> None:
    asked: dict[str, Any] = {
        "tools": [ADD, LIGHTS_OFF], "tool_choice": "required", "logit_bias": {begins_call(pebble): 100},
        "max_tokens": 150, **NO_THINKING,
    }  # fmt: skip
    several = calls_of(ask(pebble_http, **asked))
    assert len(several) > 1 and len({call["id"] for call in several}) == len(several)
    for call in several[:-1]:  # the last one is cut off by max_tokens, as this model was made to go on for ever
        check_call(call, TOOLS)
    assert len(calls_of(ask(pebble_http, **asked, parallel_tool_calls=False))) == 1


def test_every_answer_of_n_calls_by_itself(pebble_http: httpx.Client) -> None:
    reply = ask(
        pebble_http, tools=TOOLS, tool_choice="required", n=4, temperature=2, seed=2, parallel_tool_calls=False,
        max_tokens=400, **NO_THINKING,
    )  # fmt: skip
    calls = [call for choice in reply["choices"] for call in choice["message"]["tool_calls"]]
    assert len(calls) == 4 == len({call["id"] for call in calls})
    assert len({call["function"]["arguments"] for call in calls}) > 1
    for call in calls:
        check_call(call, TOOLS)


def test_references_enums_and_names_in_any_script_are_held(pebble_http: httpx.Client) -> None:
    for seed in range(8):
        reply = ask(
            pebble_http, tools=[TRIP], tool_choice="required", temperature=2, seed=seed, max_tokens=400,
            parallel_tool_calls=False, **NO_THINKING,
        )  # fmt: skip
        (call,) = calls_of(reply)
        check_call(call, [TRIP])
        arguments = json.loads(call["function"]["arguments"])
        assert list(arguments) == ["von", "stops", "größe"]  # all are required, and come in the schema's order


def test_parameters_that_nobody_listed_do_not_come(pebble_http: httpx.Client) -> None:
    """`additionalProperties` is not mentioned, so that JSON Schema alone would allow any."""
    for seed in range(6):
        reply = ask(
            pebble_http, tools=[WEATHER], tool_choice="required", temperature=2, seed=seed, parallel_tool_calls=False,
            max_tokens=200, **NO_THINKING,
        )  # fmt: skip
        (call,) = calls_of(reply)
        assert set(json.loads(call["function"]["arguments"])) <= {"city", "unit", "days"}


def test_64_tools_at_once(pebble_http: httpx.Client) -> None:
    tools = [
        make_tool(
            f"tool_{i}", {"type": "object", "properties": {f"p{i}": {"enum": [i, str(i)]}}, "required": [f"p{i}"]}
        )
        for i in range(64)
    ]
    for seed in range(3):
        reply = ask(
            pebble_http, "Use one.", tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=2,
            seed=seed, **NO_THINKING,
        )  # fmt: skip
        (call,) = calls_of(reply)
        check_call(call, tools)


@pytest.mark.parametrize("keyword", HELD_BY_NOBODY)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_strict_tool_that_cannot_be_held_is_refused_by_name(
    pebble_http: httpx.Client, keyword: str, choice: str
) -> None:
    bad = make_tool("f", {"type": "object", **HELD_BY_NOBODY[keyword]}, strict=True)
    error = refusal(pebble_http, **chat("hi", tools=[WEATHER, bad], tool_choice=choice))
    assert error["param"] == "tools[1].function.parameters" and error["code"] == "constraint_refused"
    assert keyword in error["message"]


def test_a_tool_that_may_not_be_called_need_not_be_held(pebble_http: httpx.Client) -> None:
    bad = make_tool("f", {"type": "object", **HELD_BY_NOBODY["not"]}, strict=True)
    for choice in ("none", named("add")):
        reply = ask(pebble_http, tools=[bad, ADD], tool_choice=choice, **NO_THINKING)
        for call in calls_of(reply):
            check_call(call, [ADD])


@pytest.mark.parametrize("keyword", HELD_BY_NOBODY)
def test_a_tool_that_is_not_strict_then_takes_any_object_and_no_other_does(
    pebble_http: httpx.Client, keyword: str
) -> None:
    loose = make_tool("f", {"type": "object", **HELD_BY_NOBODY[keyword]})
    asked: dict[str, Any] = {"tools": [loose, ADD], "temperature": 1, "seed": 1, **NO_THINKING}
    reply = ask(pebble_http, **asked, tool_choice=named("f"), max_tokens=120)
    (call,) = calls_of(reply)
    if reply["choices"][0]["finish_reason"] == "tool_calls":
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    else:
        assert call["function"]["arguments"].startswith("{")
    # Beside it in one request, the other tool is held to its schema all the same.
    reply = ask(pebble_http, **asked, tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    for call in calls_of(reply):
        if call["function"]["name"] == "add":
            check_call(call, [ADD])


@pytest.mark.parametrize(
    ("change", "param", "word"),
    [
        ({"tools": [make_tool("größe")]}, "tools[0].function.name", "letters"),
        ({"tools": [make_tool("a b")]}, "tools[0].function.name", "letters"),
        ({"tools": [make_tool("f" * 65)]}, "tools[0].function.name", "64"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name", "unique"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "object"),
        ({"tools": [make_tool("f", {"type": "string"})]}, "tools[0].function.parameters.type", "object"),
        ({"tools": [make_tool("f", {"properties": [1]})]}, "tools[0].function.parameters.properties", "object"),
        ({"tools": [make_tool("f", strict="yes")]}, "tools[0].function.strict", "true or false"),
        ({"tools": [make_tool("f", extra=1)]}, "tools[0].function.extra", "unknown"),
        ({"tools": [make_tool(f"f{i}") for i in range(513)]}, "tools", "512"),
        ({"tool_choice": "any"}, "tool_choice", "required"),
        ({"tool_choice": named("nobody")}, "tool_choice.function.name", "get_weather"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "required"),
        ({"ignore_eos": True}, "ignore_eos", "tools"),
        ({"stop_token_ids": [0, 500]}, "stop_token_ids", "500"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_tools_are_refused_by_name(
    pebble_http: httpx.Client, change: dict[str, Any], param: str, word: str
) -> None:
    error = refusal(pebble_http, **{**chat("hi", tools=TOOLS), **change})
    assert error["param"] == param and word in error["message"], error


def test_max_tokens_cuts_a_call_off_and_says_so(pebble_http: httpx.Client) -> None:
    asked: dict[str, Any] = {"tools": [TRIP], "tool_choice": "required", "temperature": 0, "seed": 1, **NO_THINKING}
    whole = ask(pebble_http, **asked, max_tokens=400, parallel_tool_calls=False)
    (call,) = calls_of(whole)
    spent = whole["usage"]["completion_tokens"]
    seen = set()
    for limit in range(1, spent, 3):
        cut = ask(pebble_http, **asked, max_tokens=limit, parallel_tool_calls=False)
        assert cut["choices"][0]["finish_reason"] == "length"
        assert cut["usage"]["completion_tokens"] == limit
        for part in calls_of(cut):
            assert part["function"]["name"] == "plan.trip"
            assert call["function"]["arguments"].startswith(part["function"]["arguments"])
            seen.add(part["function"]["arguments"])
    assert len(seen) > 3


@pytest.mark.parametrize("stop", ["shine", '"', "{", "tool", "\n", "}"])
def test_a_stop_string_inside_a_call_does_not_cut_it(pebble_http: httpx.Client, stop: str) -> None:
    sun = make_tool("sun", {"type": "object", "properties": {"x": {"const": "sun\nshine tool"}}, "required": ["x"]})
    reply = ask(pebble_http, tools=[sun], tool_choice="required", stop=stop, parallel_tool_calls=False, **NO_THINKING)
    (call,) = calls_of(reply)
    assert json.loads(call["function"]["arguments"]) == {"x": "sun\nshine tool"}
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


def test_control_tokens_may_stop_an_answer_with_tools_and_leave_calls_whole(
    pebble: Server, pebble_http: httpx.Client
) -> None:
    begin = begins_call(pebble)
    control = [id for id in pebble.engine.tokenizer.control_ids if str(id) != begin]
    reply = ask(pebble_http, tools=TOOLS, tool_choice=named("add"), stop_token_ids=control, **NO_THINKING)
    (call,) = calls_of(reply)
    check_call(call, TOOLS)


def test_logprobs_are_those_of_the_text(pebble: Server, pebble_http: httpx.Client) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "top_logprobs": 2, **NO_THINKING}
    spoken = ask(pebble_http, **asked, logit_bias={begins_call(pebble): -100})["choices"][0]
    assert "".join(entry["token"] for entry in spoken["logprobs"]["content"]) == spoken["message"]["content"]
    called = ask(pebble_http, **asked, tool_choice=named("add"))["choices"][0]
    check_call(called["message"]["tool_calls"][0], TOOLS)
    assert called["logprobs"] == {"content": [], "refusal": None}


def test_a_call_and_its_result_go_back_to_the_model(pebble_http: httpx.Client) -> None:
    first = ask(pebble_http, "What is 2 + 3?", tools=[ADD], tool_choice=named("add"), **NO_THINKING)
    message = first["choices"][0]["message"]
    turns = [
        {"role": "user", "content": "What is 2 + 3?"}, message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"},
    ]  # fmt: skip
    second = ask(pebble_http, messages=turns, tools=[ADD])
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
    assert second["choices"][0]["finish_reason"] in ("stop", "tool_calls", "length")
    longer = ask(pebble_http, messages=[*turns[:2], {**turns[2], "content": "5 " * 50}], tools=[ADD])
    assert longer["usage"]["prompt_tokens"] >= second["usage"]["prompt_tokens"] + 49  # the model reads it


SUM_FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "sum", "strict": True,
        "schema": {
            "type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["sum"], "additionalProperties": False,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("variables", [NO_THINKING, {}, OPEN_THINKING], ids=["at once", "may think", "thinks"])
@pytest.mark.parametrize("bias", [100, 0, -100], ids=["calls", "as it likes", "answers"])
def test_an_answer_beside_tools_is_calls_or_fits_the_form(
    pebble: Server, pebble_http: httpx.Client, variables: Any, bias: int
) -> None:
    for seed in range(3):
        reply = ask(
            pebble_http, "What is 12 + 7?", tools=[ADD], response_format=SUM_FORM, temperature=1.5, seed=seed,
            parallel_tool_calls=False, max_tokens=400, logit_bias={begins_call(pebble): bias}, **variables,
        )  # fmt: skip
        (choice,) = reply["choices"]
        if choice["finish_reason"] == "length":
            assert variables is not NO_THINKING and not choice["message"]["content"]  # it never stopped to think
            continue
        calls = calls_of(reply)
        assert (choice["finish_reason"] == "tool_calls") == bool(calls)
        assert bias == 0 or bool(calls) == (bias > 0)
        if calls:
            check_call(calls[0], [ADD])
        else:
            assert set(json.loads(choice["message"]["content"])) == {"sum"}


def test_a_form_beside_tools_that_must_be_called_leaves_the_calls(pebble_http: httpx.Client) -> None:
    reply = ask(pebble_http, tools=[ADD], tool_choice="required", response_format=SUM_FORM, **NO_THINKING)
    check_call(calls_of(reply)[0], [ADD])


@pytest.mark.parametrize(
    ("field", "value", "pattern"),
    [("guided_regex", "[a-c]{3}", "[a-c]{3}"), ("guided_choice", ["yes", "no"], "yes|no")],
    ids=["guided_regex", "guided_choice"],
)  # fmt: skip
def test_every_kind_of_form_stands_beside_tools(
    pebble: Server, pebble_http: httpx.Client, field: str, value: Any, pattern: str
) -> None:
    reply = ask(pebble_http, tools=TOOLS, logit_bias={begins_call(pebble): -100}, **{field: value}, **NO_THINKING)
    assert re.fullmatch(pattern, reply["choices"][0]["message"]["content"])


def test_a_form_beside_tools_streams_what_it_answers_whole(pebble: Server, pebble_http: httpx.Client) -> None:
    for bias in (100, -100):
        asked: dict[str, Any] = {
            "tools": [ADD], "response_format": SUM_FORM, "temperature": 1, "seed": 3, "max_tokens": 200,
            "parallel_tool_calls": False, "logit_bias": {begins_call(pebble): bias}, **NO_THINKING,
        }  # fmt: skip
        whole = ask(pebble_http, **asked)["choices"]
        joined = join(stream(pebble_http, chat("hi", **asked)))["choices"]
        assert without_ids(joined) == without_ids(whole)


def test_a_lenient_form_beside_tools_checks_answers_and_no_calls(pebble: Server, pebble_http: httpx.Client) -> None:
    wide = {**SUM_FORM["json_schema"]["schema"], "not": {"properties": {"sum": {"const": 100}}, "required": ["sum"]}}
    asked: dict[str, Any] = {
        "tools": [ADD], "max_tokens": 200, "parallel_tool_calls": False, **NO_THINKING,
        "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "strict": False, "schema": wide}},
    }  # fmt: skip
    reply = ask(pebble_http, **asked, logit_bias={begins_call(pebble): -100})
    assert set(json.loads(reply["choices"][0]["message"]["content"])) == {"sum"}
    check_call(calls_of(ask(pebble_http, **asked, logit_bias={begins_call(pebble): 100}))[0], [ADD])


class Addition(BaseModel):
    """Add two numbers."""

    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


def test_the_official_client_parses_calls_into_models(pebble_client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Addition)]
    reply = pebble_client.chat.completions.parse(
        model="default", messages=[{"role": "user", "content": "12 + 7?"}], tools=tools, tool_choice="required",
        parallel_tool_calls=False, max_tokens=100, extra_body=NO_THINKING,
    )  # fmt: skip
    (call,) = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Addition)
