"""Bad requests to `/v1/responses`: each gets a clear 4xx that names the field, and the server goes on as before."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.openai.responses_request import RESPONSES_NO_EFFECT, RESPONSES_REFUSED, ResponseRequest
from tests.app import wild
from tests.app.folding import events_of, response_of
from tests.app.openai.test_responses import CALCULATOR, PATH, body

pytestmark = [pytest.mark.usefixtures("nothing_lost_by_pebble"), pytest.mark.slow]

Json = dict[str, Any]
SERVED: Json = {"type": "mcp", "server_label": "ponder", "require_approval": "never"}
SOME = settings(max_examples=60, suppress_health_check=list(HealthCheck))

# (what replaces or joins a good request's fields, the field blamed, a word that the message must have)
BAD: list[tuple[Json, str, str]] = [
    ({"input": None}, "input", "missing"),
    ({"input": 5}, "input", "string"),
    ({"input": []}, "input", "at least one"),
    ({"input": [{"role": "user", "content": "x"}, 5]}, "input[1]", "object"),
    ({"model": "gpt-9"}, "model", "pebble"),
    ({"instructions": 5}, "instructions", "string"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1 or more"),
    ({"max_output_tokens": 10**6}, "max_output_tokens", "at most"),
    ({"temperature": 3}, "temperature", "2"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"truncation": "newest"}, "truncation", "disabled"),
    ({"max_tool_calls": 0}, "max_tool_calls", "1 or more"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "stored response"),
    ({"metadata": {"a": 1}}, "metadata.a", "strings"),
    ({"metadata": {"a" * 65: "b"}}, "metadata", "64"),
    ({"metadata": {str(at): "b" for at in range(17)}}, "metadata", "16"),
    ({"include": ["file_search_call.results"]}, "include", "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs", "include"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream: true"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "none"),
    ({"thinking": {"waits": -1}}, "thinking.waits", "waits"),
    ({"thinking": {"max_tokens": 1}}, "thinking.max_tokens", "2 or more"),
    ({"thinking": {}, "reasoning": {"effort": "low"}}, "thinking", "reasoning.effort"),
    ({"strategy": "guess"}, "strategy", "best_of_n"),
    ({"strategy_options": {"n": 2}}, "strategy_options", "strategy"),
    ({"checker": {"type": "exact", "answer": "a"}}, "checker", "best_of_n"),
    ({"priority": 101}, "priority", "-100 to 100"),
    ({"speculation": "on"}, "speculation", '"max_tokens"?: 1 to 32'),
    ({"speculation": {"max_tokens": 33}}, "speculation.max_tokens", "speculation.max_tokens is 33"),
    ({"speculation": {"proposer": "oracle"}}, "speculation.proposer", "accepted: auto, off, suffix, ngram"),
    ({"deadline_s": 0}, "deadline_s", "above 0"),
    ({"reasoning": {"effort": "none", "summary": "long"}}, "reasoning.summary", "effort"),
    ({"text": {"verbosity": "least"}}, "text.verbosity", "low"),
    ({"text": {"style": "x"}}, "text.style", "text.format"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "missing"),
    ({"text": {"format": {"type": "json_schema", "name": 5, "schema": {}}}}, "text.format.name", "string"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "http://x/y"}}}}, "text.format",
     "text.format"),
    ({"tools": [5]}, "tools[0]", "type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "searxng"),
    ({"tools": [{"type": "web_search", "filters": {"allowed_domains": ["x"]}}]}, "tools[0].filters", "not supported"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type", "mcp"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0]", "namespace"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]}]}, "tools[0].tools[0]",
     "function"),
    ({"tools": [{"type": ["function"]}]}, "tools[0].type", "mcp"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "letters"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "name"),
    ({"tools": [CALCULATOR, CALCULATOR]}, "tools[1].name", "unique"),
    ({"tools": [SERVED, CALCULATOR, {**CALCULATOR, "name": "b c"}]}, "tools[2].name", "letters"),
    ({"tools": [CALCULATOR, {**SERVED, "allowed_tools": ["nothing"]}]}, "tools[1].allowed_tools", "nothing"),
    ({"tools": [{**SERVED, "server_label": "deepwiki", "server_url": "https://x/mcp"}]}, "tools[0].server_url", "mcp"),
    ({"tools": [{**SERVED, "server_label": "deepwiki"}]}, "tools[0].server_label", "ponder"),
    ({"tools": [{**SERVED, "require_approval": "always"}]}, "tools[0].require_approval", "never"),
    ({"tools": [{"type": "mcp", "server_label": "ponder"}]}, "tools[0].require_approval", "never"),
    ({"tools": [SERVED, SERVED]}, "tools[1]", "one entry"),
    ({"tools": [SERVED], "tool_choice": "required"}, "tool_choice", "auto"),
    ({"tools": [CALCULATOR], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name", "calculator"),
    ({"tools": [CALCULATOR], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "required"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"background": True}, "background", "false"),
    ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    ({"messages": []}, "messages", "input"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"magic": 1}, "magic", "accepted"),
    ({"input": "word " * 40_000}, "input", "context"),
]  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("fields", "param", "word"), BAD)
def test_a_bad_request_is_told_what_would_be_accepted(
    pebble_http: httpx.Client, fields: Json, param: str, word: str, streamed: bool
) -> None:
    if streamed and "stream_options" in fields:
        pytest.skip("stream_options belongs to a stream")
    reply = pebble_http.post(PATH, json={**body(), "stream": streamed, **fields})
    error = reply.json()["error"]
    assert reply.status_code == (404 if param == "model" else 400), reply.text
    assert error["param"] == param and word in error["message"] and error["code"], error
    assert error["type"] == "invalid_request_error"


def test_what_has_no_effect_is_accepted(pebble_http: httpx.Client) -> None:
    fields = dict.fromkeys(RESPONSES_NO_EFFECT, "x")
    assert pebble_http.post(PATH, json=body(**fields, max_output_tokens=1)).status_code == 200


def test_the_official_client_raises_its_own_error(pebble_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        pebble_client.responses.create(model="default", input="hi", background=True)
    assert refused.value.param == "background" and refused.value.code == "unsupported_parameter"


_texts = st.sampled_from(["hi", "", "ü\n"])
_part = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text"]), "text": _texts | wild.small})
_item = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "reasoning", "mcp_call", "item_reference", "x"]
        )
    },
    optional={
        "role": st.sampled_from(["user", "assistant", "system"]) | wild.small,
        "content": _texts | st.lists(_part | wild.anything, max_size=2) | wild.small,
        "call_id": st.sampled_from(["x", "y"]) | wild.small,
        "id": st.sampled_from(["mcp_x", "mcp_y", "msg_1"]) | wild.small,
        "name": st.sampled_from(["f", "calculator"]) | wild.small,
        "arguments": st.sampled_from(["{}", '{"a": 1}', "{", "[]"]) | wild.small,
        "output": _texts | wild.small,
        "error": wild.anything,
        "summary": wild.small,
        "namespace": wild.small,
        "encrypted_content": wild.small,
        "status": st.sampled_from(["completed", "incomplete"]) | wild.small,
        "server_label": st.just("ponder") | wild.small,
    },
)
_function = st.fixed_dictionaries(
    {"type": st.just("function"), "name": st.sampled_from(["f", "g", "", "ü"]) | wild.small},
    optional={"parameters": wild.schemas | wild.anything, "strict": wild.small, "description": wild.small},
)
_namespace = st.fixed_dictionaries(
    {"type": st.just("namespace"), "name": st.sampled_from(["n", "", "n" * 70]) | wild.small},
    optional={"tools": st.lists(_function | wild.anything, max_size=2), "description": wild.small},
)
_mcp = st.fixed_dictionaries(
    {"type": st.just("mcp"), "server_label": st.just("ponder"), "require_approval": st.just("never") | wild.small},
    optional={"allowed_tools": st.just(["find_in_documents"]) | wild.anything, "x": wild.small},
)
_fields: dict[str, Any] = {
    "input": _texts | st.lists(_item | wild.anything, max_size=4) | wild.anything,
    "instructions": _texts | wild.small,
    "previous_response_id": st.just("resp_0") | wild.small,
    "tools": st.lists(_function | _namespace | _mcp | wild.anything, max_size=3) | wild.anything,
    "tool_choice": st.sampled_from(["auto", "none", "required", {"type": "function", "name": "f"}]) | wild.anything,
    "parallel_tool_calls": wild.small,
    "text": st.fixed_dictionaries(
        {"format": wild.formats | wild.anything}, optional={"verbosity": st.just("low") | wild.small}
    )
    | wild.anything,
    "reasoning": st.fixed_dictionaries({"effort": st.just("none") | wild.small}) | wild.anything,
    "include": st.just(["message.output_text.logprobs", "reasoning.encrypted_content"]) | wild.anything,
    "max_tool_calls": st.integers(1, 2) | wild.small,
    "truncation": st.just("auto") | wild.small,
    "top_logprobs": st.integers(0, 2) | wild.small,
    "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2) | wild.anything,
    "chat_template_kwargs": st.just({"enable_thinking": False}) | wild.anything,
    "user": wild.small,
    "store": st.booleans() | wild.small,
    "seed": st.integers(0, 9) | wild.small,
    "private": st.booleans() | wild.small,
    "speculation": st.sampled_from(["off", "auto"])
    | st.fixed_dictionaries(
        {}, optional={"proposer": st.just("ngram") | wild.small, "max_tokens": st.integers(0, 9) | wild.small}
    )
    | wild.anything,
    "repetition_detection": st.fixed_dictionaries(
        {"max_pattern_size": st.integers(0, 5) | wild.small, "min_count": st.integers(1, 5) | wild.small},
        optional={"min_pattern_size": st.integers(0, 6) | wild.small, "x": wild.small},
    )
    | wild.anything,
}


@SOME
@given(fields=st.fixed_dictionaries({}, optional=_fields), streamed=st.booleans())
def test_no_body_makes_the_server_fail(pebble_http: httpx.Client, fields: Json, streamed: bool) -> None:
    sent = {**body("hi", max_output_tokens=3, stream=streamed), **fields}
    reply = pebble_http.post(PATH, json=sent)
    assert reply.status_code in (200, 400), (reply.status_code, reply.text, sent)
    if reply.status_code == 400:
        error = reply.json()["error"]
        assert error["param"] and error["code"] and error["message"], (error, sent)
        assert error["param"].split(".")[0].split("[")[0] in sent, error
    elif streamed:
        response_of(events_of(reply.text))


@pytest.mark.parametrize("field", _fields)
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_field_makes_the_server_fail(pebble_http: httpx.Client, field: str, data: st.DataObject) -> None:
    test_no_body_makes_the_server_fail.hypothesis.inner_test(  # type: ignore[attr-defined]  # hypothesis's own
        pebble_http, {field: data.draw(_fields[field])}, False
    )


def test_every_field_of_the_request_is_tried_with_something_bad() -> None:
    tried = {name for fields, _, _ in BAD for name in fields} | set(_fields) | {"stream"}
    assert set(ResponseRequest.model_fields) <= tried
    assert {"background", "conversation", "messages", "max_tokens"} <= set(RESPONSES_REFUSED)
