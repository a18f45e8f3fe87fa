"""Schemas that are not held as they stand: unknown formats, which a warning names, and `"strict": false`."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import jsonschema
import pytest

from app.answering import answer_pipeline, schema_check
from tests.app.openai.test_structured_output import CHAT, COMPLETIONS, NO_THINKING, form

pytestmark = pytest.mark.usefixtures("nothing_lost_by_pebble")

Json = dict[str, Any]
NUMBERS = {"enum": list(range(30))}
UNIQUE: Json = {"type": "array", "items": NUMBERS, "uniqueItems": True, "minItems": 2, "maxItems": 2}
BYTES: Json = {"type": "string", "format": "byte", "maxLength": 3}
LOOSE = form(UNIQUE, strict=False)


def body(path: str, response_format: Json, **more: Any) -> Json:
    asked: Json = {"model": "default", "max_tokens": 80, "response_format": response_format, **more}
    if path == COMPLETIONS:
        return {**asked, "prompt": "Name some."}
    return {**asked, **NO_THINKING, "messages": [{"role": "user", "content": "Name some."}]}


def text_of(reply: Json) -> str:
    (choice,) = reply["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def events(http: httpx.Client, path: str, asked: Json) -> list[Json]:
    lines = http.post(path, json={**asked, "stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def verdicts(monkeypatch: pytest.MonkeyPatch, *given: str | None) -> list[str]:
    """The texts that are checked, in turn; the last verdict stays."""
    seen: list[str] = []

    async def wrong_with(schema: str, text: str) -> str | None:
        assert json.loads(schema) == UNIQUE
        seen.append(text)
        return given[min(len(seen), len(given)) - 1]

    monkeypatch.setattr(answer_pipeline, "wrong_with", wrong_with)
    return seen


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_format_is_an_annotation_and_the_answer_says_so(pebble_http: httpx.Client, path: str) -> None:
    reply = pebble_http.post(path, json=body(path, form(BYTES, strict=True)))
    assert reply.status_code == 200, reply.text
    assert reply.json()["warnings"] == ["response_format: the format 'byte' is not held"]
    told = [each["warnings"] for each in events(pebble_http, path, body(path, form(BYTES))) if "warnings" in each]
    assert told == [reply.json()["warnings"]]
    assert "warnings" not in pebble_http.post(path, json=body(path, form({"type": "null"}))).json()


def test_a_tool_with_an_unknown_format_is_held_and_the_answer_says_so(pebble_http: httpx.Client) -> None:
    parameters = {"type": "object", "properties": {"data": BYTES}, "required": ["data"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "send", "parameters": parameters, "strict": True}}
    asked = {**body(CHAT, {"type": "text"}), "tools": [tool], "tool_choice": "required"}
    reply = pebble_http.post(CHAT, json=asked)
    assert reply.status_code == 200, reply.text
    assert reply.json()["warnings"] == ["tools[0].function.parameters: the format 'byte' is not held"]


def test_a_response_says_what_is_not_held(pebble_http: httpx.Client) -> None:
    text = {"format": {"type": "json_schema", "name": "answer", "schema": BYTES}}
    asked = {"model": "default", "input": "Hi", "text": text, "max_output_tokens": 40, "store": False}
    reply = pebble_http.post("/v1/responses", json=asked)
    assert reply.status_code == 200, reply.text
    assert "byte" in reply.json()["warnings"][0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_without_strict_false_nothing_is_held_loosely(pebble_http: httpx.Client, path: str) -> None:
    for strict in ({}, {"strict": True}, {"strict": None}):
        reply = pebble_http.post(path, json=body(path, form(UNIQUE, **strict)))
        message = reply.json()["error"]["message"]
        assert reply.status_code == 400 and "uniqueItems" in message and '"strict": false' in message


def test_what_can_be_held_exactly_is_held_so_whatever_strict_says(pebble_http: httpx.Client) -> None:
    few = {**UNIQUE, "items": {"enum": ["a", "b"]}}
    reply = pebble_http.post(CHAT, json=body(CHAT, form(few, strict=False)))
    assert reply.status_code == 200 and "warnings" not in reply.json(), reply.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_loosely_held_answer_is_valid_or_the_request_fails(pebble_http: httpx.Client, path: str) -> None:
    valid = 0
    for seed in range(6):
        reply = pebble_http.post(path, json=body(path, LOOSE, seed=seed, temperature=1))
        if reply.status_code == 200:
            valid += 1
            assert jsonschema.Draft202012Validator(UNIQUE).is_valid(json.loads(text_of(reply.json())))
            assert "uniqueItems" in reply.json()["warnings"][0]
        else:
            assert (reply.status_code, reply.json()["error"]["code"]) == (422, "schema_not_met"), reply.text
    assert valid


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_that_is_not_valid_is_generated_once_more(
    pebble_http: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = verdicts(monkeypatch, None)
    once = pebble_http.post(path, json=body(path, LOOSE, seed=1, temperature=0))
    seen = verdicts(monkeypatch, "$: it repeats itself", None)
    reply = pebble_http.post(path, json=body(path, LOOSE, seed=1, temperature=0))
    assert reply.status_code == 200 and len(seen) == 2 and text_of(reply.json()) == seen[1]
    assert once.status_code == 200 and text_of(once.json()) == first[0] == seen[0]
    usage = reply.json()["usage"]
    assert usage["completion_tokens"] > len(seen[1]) / 8 and usage["prompt_tokens"] % 2 == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_that_is_never_valid_is_an_error_that_says_so(
    pebble_http: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = verdicts(monkeypatch, "$: it repeats itself")
    reply = pebble_http.post(path, json=body(path, LOOSE))
    assert reply.status_code == 422 and len(seen) == 2
    error = reply.json()["error"]
    assert error["code"] == "schema_not_met" and "it repeats itself" in error["message"]
    streamed = pebble_http.post(path, json=body(path, LOOSE, stream=True))
    assert (streamed.status_code, streamed.json()["error"]["code"]) == (422, "schema_not_met")


def test_an_answer_that_is_cut_off_is_given_as_it_is(
    pebble_http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = verdicts(monkeypatch, "$: never")
    reply = pebble_http.post(CHAT, json=body(CHAT, LOOSE, max_tokens=2))
    assert reply.json()["choices"][0]["finish_reason"] == "length" and seen == []


def test_a_check_without_an_end_is_stopped_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's expressions may take for ever; the check runs in a process that is killed."""
    monkeypatch.setattr(schema_check, "WAIT_S", 2.0)
    endless = json.dumps({"type": "string", "pattern": "^(a+)+$"})

    async def both() -> tuple[str | None, list[float]]:
        ticks = [time.monotonic()]
        checking = asyncio.create_task(schema_check.wrong_with(endless, json.dumps("a" * 60 + "b")))
        while not checking.done():
            await asyncio.wait({checking}, timeout=0.01)
            ticks.append(time.monotonic())
        return await checking, ticks

    wrong, ticks = asyncio.run(both())
    assert wrong is not None and "too long" in wrong
    assert len(ticks) > 20  # the loop went on meanwhile


def test_a_check_fetches_nothing() -> None:
    wrong = asyncio.run(schema_check.wrong_with('{"$ref":"http://127.0.0.1:9/schema.json"}', "1"))
    assert wrong is not None and "cannot be checked" in wrong
