"""Conversations with calls in them: what hangs together is accepted and shown to the model, the rest refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.openai.request_models import turns
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
    ([USER, result()], "messages[1].tool_call_id", "no call waits"),
    ([USER, calls(call()), result("b")], "messages[2].tool_call_id", "'a'"),
    ([USER, calls(call()), result(None)], "messages[2].tool_call_id", "None"),
    ([USER, calls(call()), {"role": "tool", "content": "1"}], "messages[2].tool_call_id", "id of a call"),
    ([USER, calls(call()), result(), result()], "messages[3].tool_call_id", "no call waits"),
    ([USER, calls(call()), result(content=None)], "messages[2].content", "string"),
    ([USER, calls(call()), result(content={"a": 1})], "messages[2].content", "string"),
    ([USER, calls(call()), USER], "messages[2]", "before the result of a"),
    ([USER, calls(call("a"), call("b")), result("b"), USER], "messages[3]", "before the result of a"),
    ([USER, calls(call())], "messages", "ends before the result of a"),
    ([USER, calls(call("a"), call("b")), result("a")], "messages", "ends before the result of b"),
    ([USER, calls(call("a"), call("a")), result("a")], "messages[1].tool_calls", "twice"),
    ([{**USER, "tool_calls": [call()]}], "messages[0].tool_calls", "assistant"),
    ([USER, {**calls(), "tool_calls": {"a": 1}}], "messages[1].tool_calls", "list"),
    ([USER, {**calls(), "tool_calls": "f()"}], "messages[1].tool_calls", "list"),
    ([USER, calls("f()")], "messages[1].tool_calls[0]", "function"),
    ([USER, calls(call(), call(id=""))], "messages[1].tool_calls[1]", "function"),
    ([USER, calls(call(id=5))], "messages[1].tool_calls[0]", "function"),
    ([USER, calls(call(name=None))], "messages[1].tool_calls[0]", "function"),
    ([USER, calls(call(name="a b"))], "messages[1].tool_calls[0].function.name", "letters"),
    ([USER, calls(call(type="custom"))], "messages[1].tool_calls[0].type", "function"),
    ([USER, calls(call(arguments={"a": 1}))], "messages[1].tool_calls[0]", "function"),
    ([USER, calls(call(arguments="{"))], "messages[1].tool_calls[0].function.arguments", "object"),
    ([USER, calls(call(arguments="[1]"))], "messages[1].tool_calls[0].function.arguments", "no object"),
    ([USER, calls(call(arguments='{"a": NaN}'))], "messages[1].tool_calls[0].function.arguments", "NaN"),
    ([USER, calls(call(arguments='{"a": 1e999}'))], "messages[1].tool_calls[0].function.arguments", "too large"),
    ([USER, calls(call(arguments='{"a": "\\ud800"}'))], "messages[1].tool_calls[0].function.arguments", "surrogate"),
    ([USER, calls(call(arguments='{"a": ' + "[" * 10**5))], "messages[1].tool_calls[0].function.arguments", "deeply"),
    (
        [USER, calls(call(arguments='{"a": ' + "[" * 300 + "]" * 300 + "}")), result()],
        "messages[1].tool_calls[0].function.arguments", "deeply",
    ),
    ([USER, {"role": "assistant", "content": None}], "messages[1].content", "string"),
    ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "messages[1].content", "string"),
    ([USER, {"role": "assistant", "content": "x", "reasoning_content": 5}], "messages[1].reasoning_content", "string"),
    (
        [USER, {"role": "assistant", "content": "x", "function_call": {"name": "f"}}],
        "messages[1].function_call", "tool_calls",
    ),
    ([USER, {"role": "function", "name": "f", "content": "1"}], "messages[1].role", "tool"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "param", "word"), BAD, ids=[f"{i} {b[1]}" for i, b in enumerate(BAD)])
def test_a_conversation_that_does_not_hang_together_is_refused(
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


def test_what_a_reply_says_can_be_sent_back_as_it_is(pebble_http: httpx.Client, nothing_lost_by_pebble: None) -> None:
    """Also what was cut off in the middle of a call: then the client must repair it, and is told so."""
    body: dict[str, Any] = {
        "model": "default", "messages": [USER], "temperature": 0, "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": {"a": [1, 2, 3]}}}}],
        "parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    whole = pebble_http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    again = [USER, whole, result(whole["tool_calls"][0]["id"])]
    assert pebble_http.post("/v1/chat/completions", json={**body, "messages": again}).status_code == 200
    whole_arguments = whole["tool_calls"][0]["function"]["arguments"]
    refused = 0
    for limit in range(8, 40, 2):
        cut = pebble_http.post("/v1/chat/completions", json={**body, "max_tokens": limit}).json()["choices"][0]
        for made in cut["message"].get("tool_calls", []):
            if made["function"]["arguments"] in ("", whole_arguments):
                continue
            broken = [USER, cut["message"], result(made["id"])]
            assert refusal(pebble_http, **{**body, "messages": broken})["param"].endswith("function.arguments")
            refused += 1
    assert refused
