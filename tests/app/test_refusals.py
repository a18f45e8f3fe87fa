"""Bad requests: each gets a clear 4xx in OpenAI's shape, and the server goes on as before."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.anthropic.request_models import MessagesRequest
from app.openai.request_models import ChatRequest, CompletionRequest
from app.request_body import CHAT_REFUSED, COMPLETION_REFUSED, NO_EFFECT
from tests.app.conftest import Server

HI: list[Any] = [{"role": "user", "content": "hi"}]
GOOD: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 2}
CHAT = "/v1/chat/completions"

pytestmark = [pytest.mark.usefixtures("nothing_lost"), pytest.mark.slow]

# (what replaces or joins a good request's fields, the field blamed, a word that the message must have)
BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "non-empty"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": None}, "messages", "missing"),
    ({"messages": ["hi"]}, "messages[0]", "object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "user"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "tool"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id", "string"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url", "reads text alone",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text", "text"),
    ({"max_tokens": 0}, "max_tokens", "1 or more"),
    ({"max_tokens": -1}, "max_tokens", "1 or more"),
    ({"max_tokens": "5"}, "max_tokens", "integer"),
    ({"max_tokens": 2.5}, "max_tokens", "integer"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_completion_tokens": 3}, "max_tokens", "one of them"),
    ({"temperature": -1}, "temperature", "0 (greedy) to 2"),
    ({"temperature": 2.1}, "temperature", "2"),
    ({"temperature": "warm"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.5}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "off"),
    ({"top_k": 2**63}, "top_k", "2147483647"),
    ({"min_p": 1}, "min_p", "less than 1"),
    ({"n": 0}, "n", "1 to 128"),
    ({"n": 1000}, "n", "128"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "4"),
    ({"stop": ""}, "stop", "non-empty"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop": 5}, "stop", "string"),
    ({"seed": 2**63}, "seed", "64-bit"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"logprobs": 3}, "logprobs", "true or false"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "token ids"),
    ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"min_tokens": 3}, "min_tokens", "max_tokens"),
    ({"repetition_detection": 8}, "repetition_detection", "max_pattern_size"),
    ({"repetition_detection": {"max_pattern_size": 8}}, "repetition_detection.min_count", "2 to 100000"),
    (
        {"repetition_detection": {"max_pattern_size": 257, "min_count": 2}},
        "repetition_detection.max_pattern_size", "1 to 256",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 8, "min_count": 2, "min_pattern_size": 9}},
        "repetition_detection.min_pattern_size", "1 to max_pattern_size (8)",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 8, "min_count": 2, "window": 9}},
        "repetition_detection.window", "min_count",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 8, "min_count": 2}, "response_format": {"type": "json_object"}},
        "repetition_detection", "together with response_format",
    ),
    ({"speculation": "on"}, "speculation", '"off", or {"proposer"?'),
    ({"speculation": {"proposer": "oracle"}}, "speculation.proposer", "accepted: auto, off, suffix, ngram."),
    ({"speculation": {"max_tokens": 33}}, "speculation.max_tokens", "1 to 32"),
    ({"speculation": {"max_tokens": 0}}, "speculation.max_tokens", "1 to 32"),
    ({"speculation": {"tokens": 3}}, "speculation.tokens", '"max_tokens"?'),
    ({"speculation": {"proposer": "suffix"}, "strategy": "beam"}, "speculation.proposer", "accepted: auto, off"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "--tool-call-parser"),  # a model without
    ({"tools": {}}, "tools", "list"),
    ({"tools": [5]}, "tools[0]", "object"),
    ({"tool_choice": "required"}, "tool_choice", "at least one tool"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name", "'f'"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"guided_regex": 5}, "guided_regex", "regular expression"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "guided_"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "guided_"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "structured_outputs", "one form"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning", "differ"),
    ({"reasoning": {"exclude": True}}, "reasoning.exclude", "max_tokens"),
    ({"reasoning": {"max_tokens": 64}, "thinking": {}}, "reasoning.max_tokens", "one"),
    ({"reasoning": {"enabled": False, "effort": "high"}}, "reasoning.enabled", "an effort"),
    ({"reasoning": {"enabled": False}, "reasoning_effort": "high"}, "reasoning.enabled", "an effort"),
    ({"reasoning": {"enabled": False, "max_tokens": 64}}, "reasoning.enabled", "max_tokens"),
    (
        {"reasoning": {"enabled": True}, "chat_template_kwargs": {"enable_thinking": False}},
        "reasoning.enabled", "differ",
    ),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty", "differ"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "true"),
    ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
    ({"modalities": ["audio"]}, "modalities", "text"),
    ({"audio": {}}, "audio", "audio"),
    ({"prediction": {}}, "prediction.type", '{"type": "content", "content"'),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content", "a text or a list"),
    ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content", "a list of"),
    ({"prediction": {"type": "content", "content": "9 " * 3000}}, "prediction", "context"),
    (
        {"prediction": {"type": "content", "content": "9"}, "speculation": "off"},
        "speculation", "accepted: one of them",
    ),
    (
        {"prediction": {"type": "content", "content": "9"}, "speculation": {"proposer": "ngram"}},
        "speculation", "'auto' or 'suffix'",
    ),
    ({"web_search_options": {}}, "web_search_options", "search"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "xhigh"),
    ({"reasoning_effort": "low", "thinking": {}}, "thinking", "one of them"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "reasoning_effort", "false"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "reasoning_effort", "one of"),
    ({"reasoning_effort": "none", "strategy": "budget"}, "strategy", "turned off"),
    ({"thinking": {"max_tokens": 1}}, "thinking.max_tokens", "2 or more"),
    ({"thinking": {"waits": 65}}, "thinking.waits", "64"),
    ({"thinking": {"wait_text": ""}}, "thinking.wait_text", "Wait"),
    ({"thinking": {"effort": 1}}, "thinking.effort", "min_tokens"),
    ({"thinking": {"min_tokens": 9, "max_tokens": 8}}, "thinking.min_tokens", "at most max_tokens, 8"),
    ({"thinking": {"waits": 3, "max_tokens": 5}}, "thinking.max_tokens", "or more tokens"),
    ({"thinking": {"min_tokens": 9}}, "thinking.min_tokens", "max_tokens of all"),
    ({"thinking": {}, "strategy": "tree"}, "strategy", "one of them"),
    ({"strategy": "guess"}, "strategy", "best_of_n"),
    ({"strategy_options": {}}, "strategy_options", "self_consistency"),
    ({"checker": {"type": "exact", "answer": "a"}}, "checker", "best_of_n"),
    ({"priority": 1.5}, "priority", "-100 to 100"),
    ({"deadline_s": -1}, "deadline_s", "above 0"),
    ({"strategy": "best_of_n", "checker": {"type": "guess"}}, "checker.type", "exact"),
    ({"strategy": "best_of_n", "checker": "a"}, "checker", "python"),
    ({"strategy": "best_of_n", "strategy_options": {"n": 0}}, "strategy_options.n", "greater than"),
    ({"strategy": "best_of_n", "strategy_options": {"m": 0}}, "strategy_options.m", "verifier"),
    ({"strategy": "best_of_n", "strategy_options": {"verifier": "checker"}}, "strategy_options.verifier", "checker"),
    ({"strategy": "best_of_n", "n": 2}, "n", "1 together"),
    ({"strategy": "tree", "strategy_options": {"beam": 64, "nodes": 2000}}, "strategy_options.beam", "64 at once"),
    ({"strategy": "tree", "strategy_options": {"nodes": 3000}}, "strategy_options.nodes", "at most 2000"),
    ({"strategy": "tree", "response_format": {"type": "json_object"}}, "response_format", "cannot hold"),
    ({"strategy": "beam", "stop": "x"}, "stop", "not set"),
    ({"verbosity": "least"}, "verbosity", "medium"),
    ({"functions": [{"name": "f"}]}, "functions", "tools"),
    ({"temprature": 1}, "temprature", "temperature"),
    ({"max_tokens": 100_000}, "max_tokens", "2048"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", "2048"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "word"), BAD_CHATS, ids=lambda v: str(v)[:40])
def test_a_bad_chat_is_refused_by_name(http: httpx.Client, change: dict[str, Any], param: str, word: str) -> None:
    for stream in (False, True):
        if stream and "stream_options" in change:
            continue  # that one is about the absence of a stream
        reply = http.post(CHAT, json={**GOOD, "stream": stream, **change})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert error["param"] == param and word in error["message"] and error["code"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": [10**7]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"), ({"prompt": ["a", 1]}, "prompt[1]"), ({"prompt": ["a"] * 200}, "prompt"),
        ({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"), ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"), ({"max_tokens": 0}, "max_tokens"), ({"messages": HI}, "messages"),
        ({"prompt": "x" * 3000}, "prompt"), ({"echo": 1}, "echo"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_completion_is_refused_by_name(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    reply = http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2, **change})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param.split("[")[0])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b'"x"', 400), (b"null", 400), (b'{"model": "\xff"}', 400),
        (b'{"model": "tiny", "temperature": NaN}', 400), (b'{"model": "tiny", "temperature": Infinity}', 400),
        (json.dumps(GOOD).encode().replace(b'"max_tokens": 2', b'"temperature": 1e999'), 400),
        (json.dumps(GOOD).encode().replace(b'"hi"', b'"\\ud800"'), 400),
        (b"[" * 100_000, 400), (b'{"a":' * 50_000, 400), (b'{"max_tokens": ' + b"9" * 5000 + b"}", 400),
        (b'{"model": "tiny", "messages": "' + b"x" * 20_000_000 + b'"}', 413),
    ],
    ids=lambda v: repr(v)[:40],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, body: bytes, status: int) -> None:
    reply = http.post(CHAT, content=body)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"]


def test_a_body_that_hides_its_size_is_still_limited(http: httpx.Client) -> None:
    reply = http.post(CHAT, content=(b"x" * 65536 for _ in range(320)))  # chunked: no Content-Length
    assert reply.status_code == 413


def test_the_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 5000}], stream=True)
    assert long.value.code == "context_length_exceeded" and "5019" in str(long.value)


def test_stream_options_have_fields_of_their_own(http: httpx.Client) -> None:
    reply = http.post(CHAT, json={**GOOD, "stream": True, "stream_options": {"nonsense": 1}})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "stream_options.nonsense"


def test_null_is_absent_and_fields_of_openais_service_have_no_effect(http: httpx.Client) -> None:
    optional = {n: None for n, f in ChatRequest.model_fields.items() if not f.is_required() and n != "max_tokens"}
    refused = dict.fromkeys(CHAT_REFUSED)
    ignored: dict[str, Any] = dict.fromkeys(NO_EFFECT, "x")
    ignored["metadata"] = {"a": "b"}
    reply = http.post(CHAT, json={**GOOD, **optional, **refused, **ignored})
    assert reply.status_code == 200, reply.text


def test_neutral_values_of_refused_fields_are_accepted(http: httpx.Client) -> None:
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    neutral |= {"functions": [], "function_call": "auto", "structured_outputs": {}}
    assert http.post(CHAT, json={**GOOD, **neutral}).status_code == 200


def test_unknown_paths_and_methods_answer_in_the_same_shape(http: httpx.Client) -> None:
    for reply, status in ((http.get("/v1/nothing"), 404), (http.get(CHAT), 405), (http.get("/api/nothing"), 404)):
        assert reply.status_code == status and reply.json()["error"]["message"]


EXTREMES = (2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, -1, -(2**63) - 1, 0.5, 5e-324, 1e308)


@pytest.mark.parametrize(
    ("path", "schema", "good"),
    [
        (CHAT, ChatRequest, GOOD),
        ("/v1/completions", CompletionRequest, {"model": "tiny", "prompt": "hi", "max_tokens": 2}),
        ("/v1/messages", MessagesRequest, GOOD),
    ],
    ids=["chat", "completions", "messages"],
)
def test_no_number_makes_the_server_fail(http: httpx.Client, path: str, schema: Any, good: dict[str, Any]) -> None:
    """One that no tensor holds stops the engine, and with it everybody's answers."""
    accepted = set[str]()
    for name, value in itertools.product(schema.model_fields, EXTREMES):
        body = {**good, name: {"5": value} if name == "logit_bias" else value}
        reply = http.post(path, json=body)
        assert reply.status_code in (200, 400, 404, 408), (reply.status_code, reply.text, body)
        accepted |= {name} if reply.status_code == 200 else set()
    assert {"temperature", "top_k", "top_p"} <= accepted


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_small = st.sampled_from([None, True, False, 0, 1, 2, -1, 0.5, "", "a", [], {}, [1], ["a"], {"a": 1}, 2**70, -0.0])
_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant"]) | _json, "content": st.text(max_size=9) | _json}
)


@pytest.mark.parametrize(
    ("path", "schema"), [(CHAT, ChatRequest), ("/v1/completions", CompletionRequest)], ids=["chat", "completions"]
)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_json_makes_the_server_fail(
    http: httpx.Client, server: Server, path: str, schema: Any, data: st.DataObject
) -> None:
    refused = CHAT_REFUSED if schema is ChatRequest else COMPLETION_REFUSED
    names = [*schema.model_fields, *refused, *NO_EFFECT]
    fields = st.dictionaries(st.sampled_from(names) | st.text(max_size=5), _small | _json, max_size=4)
    body: dict[str, Any] = data.draw(fields)
    body.setdefault("model", "tiny")
    if schema is ChatRequest:
        body.setdefault("messages", data.draw(st.lists(_message, max_size=3) | _json))
    else:
        body.setdefault("prompt", data.draw(st.text(max_size=9) | st.lists(st.integers(-1, 300), max_size=4) | _json))
    body.setdefault("max_tokens", 2)
    if body.get("n", 1) and isinstance(body.get("n"), int) and body["n"] > 2:
        body["n"] = 2
    reply = http.post(path, json=body)
    assert reply.status_code in (200, 400, 404), (reply.status_code, reply.text, body)
    if reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in reply.text
