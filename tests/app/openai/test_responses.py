"""`POST /v1/responses` on the bundled model, by the official client and its types: items, events, forms, thinking."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from pydantic import BaseModel

from app.openai import responses
from app.openai.responses_request import RESPONSES_NO_EFFECT, RESPONSES_REFUSED, ResponseRequest
from tests.app.conftest import Server
from tests.app.folding import events_of, response_of, without_ids
from tests.app.test_docs import DOCS, table

Json = dict[str, Any]
QUESTION = "What is 23 * 17?"
CALCULATOR: Json = {
    "type": "function",
    "name": "calculator",
    "description": "Work out an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
    "strict": True,
}
LONG: Any = {
    "type": "json_schema", "name": "long",
    "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 5000},
}  # fmt: skip
PATH = "/v1/responses"

pytestmark = [pytest.mark.usefixtures("nothing_lost_by_pebble"), pytest.mark.slow]


def body(prompt: Any = QUESTION, **fields: Any) -> Json:
    return {"model": "default", "input": prompt, "temperature": 0, "max_output_tokens": 120, **fields}


def ask(http: httpx.Client, prompt: Any = QUESTION, **fields: Any) -> Json:
    """The whole reply of a request that is accepted, as the official types take it."""
    reply = http.post(PATH, json=body(prompt, **fields))
    assert reply.status_code == 200, reply.text
    Response.model_validate(reply.json())
    return dict(reply.json())


def stream(http: httpx.Client, prompt: Any = QUESTION, **fields: Any) -> Json:
    """The response that a checked stream ends with."""
    reply = http.post(PATH, json=body(prompt, stream=True, **fields))
    assert reply.status_code == 200, reply.text
    return response_of(events_of(reply.text))


def test_an_answer_is_a_message_with_its_counts(pebble_client: openai.OpenAI) -> None:
    answer = pebble_client.responses.create(model="default", input="Who are you?", temperature=0, user="me")
    (item,) = answer.output
    assert item.type == "message" and item.status == answer.status == "completed"
    assert "Pebble" in answer.output_text
    assert answer.usage is not None and answer.usage.output_tokens > 5
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.user == "me" and answer.model == "pebble" and answer.error is None


def test_the_official_client_makes_the_same_of_a_stream(pebble_client: openai.OpenAI) -> None:
    fields: Json = {"model": "default", "input": "Who are you?", "temperature": 0}
    with pebble_client.responses.stream(**fields) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        final = events.get_final_response()
    assert text == final.output_text == pebble_client.responses.create(**fields).output_text


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    prompt=st.sampled_from([QUESTION, "Who are you?", "Write a poem about the sea."]),
    fields=st.fixed_dictionaries(
        {"seed": st.integers(0, 99), "max_output_tokens": st.sampled_from([1, 2, 9, 40, 90])},
        optional={
            "tools": st.just([CALCULATOR]),
            "tool_choice": st.sampled_from(["auto", "none"]),
            "include": st.just(["message.output_text.logprobs"]),
            "chat_template_kwargs": st.sampled_from([{"open_thinking": True}, {"enable_thinking": False}]),
            "instructions": st.just("Answer in one sentence."),
        },
    ),
)
def test_a_stream_makes_the_whole_reply(pebble_http: httpx.Client, prompt: str, fields: Json) -> None:
    whole = ask(pebble_http, prompt, **{**fields, "temperature": 1.2})
    assert without_ids(stream(pebble_http, prompt, **{**fields, "temperature": 1.2})) == without_ids(whole)


def test_a_call_of_the_clients_ends_the_response_and_its_result_answers(pebble_client: openai.OpenAI) -> None:
    fields: Json = {"model": "default", "temperature": 0, "tools": [CALCULATOR]}
    first = pebble_client.responses.create(input=QUESTION, **fields)
    (call,) = first.output
    assert call.type == "function_call" and json.loads(call.arguments) == {"expression": "23 * 17"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "391"}
    second = pebble_client.responses.create(input=[result], previous_response_id=first.id, **fields)
    assert "391" in second.output_text
    assert second.usage is not None and second.usage.input_tokens_details.cached_tokens > 0
    said: list[Any] = [{"role": "user", "content": QUESTION}, call, result]
    by_hand = pebble_client.responses.create(input=said, **fields)
    assert (by_hand.output_text, by_hand.usage.input_tokens if by_hand.usage else 0) == (
        second.output_text, second.usage.input_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "calculator"}], ids=["required", "named"])
def test_a_call_can_be_asked_for(pebble_http: httpx.Client, choice: Any) -> None:
    answer = stream(pebble_http, "Who are you?", tools=[CALCULATOR], tool_choice=choice, max_output_tokens=400)
    assert answer["output"][-1]["type"] == "function_call"
    assert answer["tool_choice"] == choice


def test_a_form_is_held(pebble_http: httpx.Client) -> None:
    schema = {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"], "additionalProperties": False,
    }  # fmt: skip
    text = {"format": {"type": "json_schema", "name": "trip", "schema": schema, "strict": True}}
    answer = stream(pebble_http, "Where to?", text=text)
    (message,) = [item for item in answer["output"] if item["type"] == "message"]
    jsonschema.validate(json.loads(message["content"][0]["text"]), schema)
    assert answer["text"] == {**text, "verbosity": "medium"}
    whatever = ask(pebble_http, "Where to?", text={"format": {"type": "json_object"}}, max_output_tokens=90)
    if whatever["status"] == "completed":
        assert isinstance(json.loads(whatever["output"][-1]["content"][0]["text"]), dict)


def test_the_official_client_parses_a_form(pebble_client: openai.OpenAI) -> None:
    class Trip(BaseModel):
        city: Literal["Oslo", "Rome"]
        days: Literal[1, 2]

    answer = pebble_client.responses.parse(model="default", input="Where to?", text_format=Trip, temperature=0)
    assert answer.output_parsed is not None and answer.output_parsed.days in (1, 2)


def test_thinking_is_an_item_of_its_own_and_can_be_given_back(pebble_http: httpx.Client) -> None:
    thinks = {"chat_template_kwargs": {"open_thinking": True}, "seed": 3, "temperature": 1.0}
    answer = stream(pebble_http, **thinks, max_output_tokens=300)
    reasoning = answer["output"][0]
    assert reasoning["type"] == "reasoning" and reasoning["content"][0]["text"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    said = {"role": "user", "content": QUESTION}
    assert ask(pebble_http, [said, *answer["output"], said], **thinks)["status"] in ("completed", "incomplete")


def test_no_effort_is_no_thinking(pebble_http: httpx.Client) -> None:
    asked = ask(pebble_http, reasoning={"effort": "none"})
    said = ask(pebble_http, chat_template_kwargs={"enable_thinking": False})
    assert without_ids(asked) == {**without_ids(said), "reasoning": {"effort": "none", "summary": None}}
    assert asked["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    assert asked["usage"]["input_tokens"] != ask(pebble_http)["usage"]["input_tokens"]


def test_logprobs_are_those_of_the_text(pebble_http: httpx.Client) -> None:
    answer = stream(pebble_http, "Who are you?", include=["message.output_text.logprobs"], top_logprobs=2)
    part = answer["output"][-1]["content"][0]
    assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode().strip() == part["text"].strip()
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


def test_an_answer_that_was_cut_off_says_so(pebble_http: httpx.Client) -> None:
    answer = stream(pebble_http, text={"format": LONG}, max_output_tokens=20)
    assert answer["status"] == answer["output"][-1]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 20


def test_a_call_that_was_cut_off_is_not_part_of_what_follows(pebble_http: httpx.Client) -> None:
    fields: Json = {"tools": [CALCULATOR], "tool_choice": "required"}
    cut = ask(pebble_http, **fields, max_output_tokens=20)
    assert cut["output"][-1]["type"] == "function_call" and cut["output"][-1]["status"] == "incomplete"
    after = ask(pebble_http, "Who are you?", previous_response_id=cut["id"])
    by_hand = [{"role": "user", "content": text} for text in (QUESTION, "Who are you?")]
    assert after["usage"]["input_tokens"] == ask(pebble_http, by_hand)["usage"]["input_tokens"]


def test_leaving_a_stream_cancels_it(pebble_client: openai.OpenAI, pebble: Server) -> None:
    before = pebble.stats().generated_tokens
    with pebble_client.responses.create(
        model="default", input="Count.", text={"format": LONG}, max_output_tokens=900, stream=True
    ) as events:
        for _, event in zip(range(9), events, strict=False):
            if event.type == "response.created":
                made = event.response.id
    assert pebble.until(lambda s: s.sequences == 0).generated_tokens - before < 900
    with pytest.raises(openai.NotFoundError):
        pebble_client.responses.retrieve(made)


def test_leaving_a_request_cancels_it(pebble: Server) -> None:
    before = pebble.stats().generated_tokens
    with httpx.Client(base_url=pebble.url) as http, pytest.raises(httpx.TimeoutException):
        http.post(PATH, json=body("Count.", text={"format": LONG}, max_output_tokens=900), timeout=0.4)
    assert pebble.until(lambda s: s.sequences == 0).generated_tokens - before < 900


def test_every_field_and_route_is_listed() -> None:
    listed = table("## Responses\n")
    assert {n for n, state in listed.items() if state == "works"} == set(ResponseRequest.model_fields)
    assert {n for n, state in listed.items() if state == "no effect"} == RESPONSES_NO_EFFECT
    assert {n for n, state in listed.items() if state == "refused"} == set(RESPONSES_REFUSED)
    text = re.sub(r"\{\w+\}", "{}", Path(DOCS / "api.md").read_text(encoding="utf-8"))
    for route in responses.router.routes:
        assert isinstance(route, APIRoute)
        assert re.sub(r"\{\w+\}", "{}", route.path) in text


def test_a_thought_goes_back_by_what_encodes_it_alone(pebble_http: httpx.Client) -> None:
    fields: Json = {"thinking": {"max_tokens": 24}, "store": False, "max_output_tokens": 60}
    first = stream(pebble_http, include=["reasoning.encrypted_content"], **fields)
    thought = next(item for item in first["output"] if item["type"] == "reasoning")
    bare = {"type": "reasoning", "id": thought["id"], "summary": [], "encrypted_content": thought["encrypted_content"]}
    others = [item for item in first["output"] if item["type"] == "message"]
    question = [{"role": "user", "content": QUESTION}]
    by_both = [
        ask(pebble_http, [*question, each, *others], **fields)["usage"]["input_tokens"] for each in (thought, bare)
    ]
    assert by_both[0] == by_both[1]
    assert "encrypted_content" not in ask(pebble_http, **fields)["output"][0]


def test_the_oldest_turns_are_left_out_where_truncation_is_auto(pebble_http: httpx.Client) -> None:
    turns = [{"role": "user", "content": f"{at} " + "apple " * 400} for at in range(60)]
    items = [{"role": "developer", "content": "Be brief."}, *turns, {"role": "user", "content": "Who are you?"}]
    reply = pebble_http.post(PATH, json=body(items, max_output_tokens=5))
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
    kept = ask(pebble_http, items, truncation="auto", max_output_tokens=5)
    limit = pebble_http.get("/v1/models/default").json()["max_model_len"]
    assert limit - 450 < kept["usage"]["input_tokens"] <= limit - 5
    alone = pebble_http.post(PATH, json=body("apple " * 30_000, truncation="auto"))
    assert alone.status_code == 400 and alone.json()["error"]["code"] == "context_length_exceeded"


def test_verbosity_is_an_instruction(pebble_http: httpx.Client) -> None:
    counts = [
        ask(pebble_http, text={"verbosity": each}, max_output_tokens=1)["usage"]["input_tokens"]
        for each in ("low", "medium", "high")
    ]
    assert counts[1] == ask(pebble_http, max_output_tokens=1)["usage"]["input_tokens"] < min(counts[0], counts[2])
