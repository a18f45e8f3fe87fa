"""Histories as clients send them: gaps are filled before the template sees them; what is no text is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.openai.chat_messages import NO_RESULT, turns
from tests.app.conftest import Server
from tests.app.toolbox import refusal

USER = {"role": "user", "content": "hi"}


def call(id: Any = "a", name: Any = "f", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def calls(*made: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(made), **more}


def result(id: Any = "a", content: Any = "1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


# (messages, the field blamed, a word that the message must have)
BAD: list[tuple[list[Any], str, str]] = [
    ([5], "messages[0]", "object"),
    ([{"role": "bot", "content": "x"}], "messages[0].role", "assistant"),
    ([{"role": "user", "content": 5}], "messages[0].content", "string"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].image_url", "data:"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type", "image_url"),
    ([USER, calls(call()), result(content={"a": 1})], "messages[2].content", "string"),
    ([USER, calls(call()), result(5)], "messages[2].tool_call_id", "string"),
    ([{**USER, "tool_calls": [call()]}], "messages[0].tool_calls", "assistant"),
    ([USER, {**calls(), "tool_calls": {"a": 1}}], "messages[1].tool_calls", "list"),
    ([USER, {**calls(), "tool_calls": "f()"}], "messages[1].tool_calls", "list"),
    ([USER, calls("f()")], "messages[1].tool_calls[0]", "function"),
    ([USER, calls(call(id=5))], "messages[1].tool_calls[0].id", "string"),
    ([USER, calls(call(name=None))], "messages[1].tool_calls[0]", "function"),
    ([USER, calls(call(name="f" * 257))], "messages[1].tool_calls[0]", "256"),
    ([USER, calls(call(arguments=5))], "messages[1].tool_calls[0]", "function"),
    ([USER, {"role": "assistant", "content": "x", "reasoning_content": 5}], "messages[1].reasoning_content", "string"),
    ([USER, {"role": "assistant", "content": None, "audio": {"id": "a"}}], "messages[1].audio", "tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "param", "word"), BAD, ids=[f"{i} {b[1]}" for i, b in enumerate(BAD)])
def test_what_cannot_be_read_is_refused(
    http: httpx.Client, messages: list[Any], param: str, word: str, nothing_lost: None
) -> None:
    error = refusal(http, model="tiny", messages=messages, max_tokens=2)
    assert error["param"] == param and word in error["message"], error


def test_calls_reach_the_template_as_objects_and_results_with_their_names() -> None:
    made = turns(
        [
            USER, calls(call("a", "f", '{"x": [1]}'), call("b", "g", "")), result("b", "two"), result("a", "one"),
            calls(call("a", "f"), content="again", reasoning_content="why"), result("a"),  # an id may come back
            {"role": "assistant", "content": [{"type": "text", "text": "do"}, {"type": "text", "text": "ne"}]},
        ]
    )  # fmt: skip
    assert [m["role"] for m in made] == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [c["function"] for c in made[1]["tool_calls"]] == [
        {"name": "f", "arguments": {"x": [1]}}, {"name": "g", "arguments": {}}
    ]  # fmt: skip
    assert [(m["name"], m["tool_call_id"], m["content"]) for m in made[2:4]] == [("g", "b", "two"), ("f", "a", "one")]
    assert (made[1]["content"], made[4]["content"], made[4]["reasoning_content"]) == ("", "again", "why")
    assert made[6] == {"role": "assistant", "content": "done"}


def test_the_bundled_models_template_shows_calls_and_results(pebble: Server) -> None:
    made = turns([USER, calls(call("a", "get_it", '{"x": "Ü"}'), content="So."), result("a", "forty-two")])
    text = pebble.engine.tokenizer.decode(
        pebble.engine.tokenizer.apply_chat_template(made, enable_thinking=False), skip_special=False
    )
    assert 'So.\n<tool_call>\n{"name": "get_it", "arguments": {"x": "Ü"}}\n</tool_call>' in text
    assert "tool\nforty-two" in text


# A history, and what the template is given: role and content, for a tool's message with the call that it answers.
REPAIRED: dict[str, tuple[list[Any], list[tuple[str, ...]]]] = {
    "no content": ([{"role": "user", "content": None}], [("user", "")]),
    "an assistant that says nothing": (
        [USER, {"role": "assistant", "content": None, "tool_calls": []}], [("user", "hi"), ("assistant", "")],
    ),
    "a call without its result": (
        [USER, calls(call()), USER],
        [("user", "hi"), ("assistant", ""), ("tool", NO_RESULT, "a"), ("user", "hi")],
    ),
    "one of two calls without its result": (
        [USER, calls(call("a"), call("b")), result("b")],
        [("user", "hi"), ("assistant", ""), ("tool", "1", "b"), ("tool", NO_RESULT, "a")],
    ),
    "a history that ends in a call": (
        [USER, calls(call())], [("user", "hi"), ("assistant", ""), ("tool", NO_RESULT, "a")],
    ),
    "a result without its call": ([USER, result()], [("user", "hi"), ("user", "Result of a tool:\n1")]),
    "a result of another call": (
        [USER, calls(call()), {**result("b"), "name": "g"}],
        [("user", "hi"), ("assistant", ""), ("user", "Result of g:\n1"), ("tool", NO_RESULT, "a")],
    ),
    "a result that comes twice": (
        [USER, calls(call()), result(), result()],
        [("user", "hi"), ("assistant", ""), ("tool", "1", "a"), ("user", "Result of a tool:\n1")],
    ),
    "a result without an id": (
        [USER, calls(call()), {"role": "tool", "content": "1"}],
        [("user", "hi"), ("assistant", ""), ("tool", "1", "a")],
    ),
    "results by name": (
        [USER, calls(call("a", "f"), call("b", "g")), *({"role": "tool", "name": n, "content": n} for n in "gf")],
        [("user", "hi"), ("assistant", ""), ("tool", "g", "b"), ("tool", "f", "a")],
    ),
    "two calls of one id": (
        [USER, calls(call("a"), call("a")), result("a")],
        [("user", "hi"), ("assistant", ""), ("tool", "1", "a"), ("tool", NO_RESULT, "a-1")],
    ),
    "a call and its result as they once were": (
        [
            USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "1"},
        ],
        [("user", "hi"), ("assistant", ""), ("tool", "1", "call")],
    ),
    "a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], [("assistant", "No.")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "expected"), REPAIRED.values(), ids=REPAIRED.keys())
def test_the_gaps_of_a_history_are_filled(
    http: httpx.Client, messages: list[Any], expected: list[tuple[str, ...]], nothing_lost: None
) -> None:
    made = turns(messages)
    assert [(m["role"], m["content"], *([m["tool_call_id"]] if m["role"] == "tool" else [])) for m in made] == expected
    reply = http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 2})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (call(arguments="{"), {"arguments": "{"}),
        (call(arguments="[1]"), {"arguments": "[1]"}),
        (call(arguments='{"a": NaN}'), {"arguments": '{"a": NaN}'}),
        (call(arguments="[" * 10**5), {"arguments": "[" * 10**5}),
        (call(arguments=""), {}),
        (call(arguments={"a": 1}), {"a": 1}),
        ({"id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}}, {"input": "x"}),
        (call(name="a tool of another's", arguments='{"a": 1}'), {"a": 1}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_arguments_of_an_old_call_reach_the_template_as_an_object(
    given: dict[str, Any], arguments: dict[str, Any]
) -> None:
    made = turns([USER, calls(given), result()])
    assert made[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_what_a_reply_says_can_be_sent_back_as_it_is(pebble_http: httpx.Client, nothing_lost_by_pebble: None) -> None:
    """Also what was cut off in the middle of a call."""
    body: dict[str, Any] = {
        "model": "default", "messages": [USER], "temperature": 0, "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": {"a": [1, 2, 3]}}}}],
        "parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    whole = pebble_http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    again = [USER, whole, result(whole["tool_calls"][0]["id"])]
    assert pebble_http.post("/v1/chat/completions", json={**body, "messages": again}).status_code == 200
    cut_off = 0
    for limit in range(8, 40, 2):
        cut = pebble_http.post("/v1/chat/completions", json={**body, "max_tokens": limit}).json()["choices"][0]
        for made in cut["message"].get("tool_calls", []):
            again = [USER, cut["message"], result(made["id"])]
            assert pebble_http.post("/v1/chat/completions", json={**body, "messages": again}).status_code == 200
            cut_off += cut["finish_reason"] == "length"
    assert cut_off
