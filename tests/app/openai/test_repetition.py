"""`repetition_detection` over HTTP: an answer that runs in circles ends, in words that each API's clients know."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

DETECTION = {"max_pattern_size": 16, "min_count": 3}
FOREVER: dict[str, Any] = {"chat_template_kwargs": {"forever": True}, "repetition_detection": DETECTION}
CIRCLES = "0123456789" * 3  # the tiny model counts so


def test_a_chat_completion_that_repeats_itself_stops(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "max_tokens": 200}
    (choice,) = client.chat.completions.create(**asked, extra_body=FOREVER).choices
    assert (choice.message.content, choice.finish_reason) == (CIRCLES, "stop")
    assert choice.model_extra == {"stop_reason": "repetition_detected"}
    chunks = list(client.chat.completions.create(**asked, extra_body=FOREVER, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == CIRCLES
    last = chunks[-1].choices[0]
    assert (last.finish_reason, last.model_extra) == ("stop", {"stop_reason": "repetition_detected"})


def test_without_it_a_chat_completion_goes_on(client: openai.OpenAI) -> None:
    body = {"chat_template_kwargs": {"forever": True}}
    reply = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "go"}], max_tokens=200, extra_body=body
    )
    assert reply.choices[0].finish_reason == "length" and not reply.choices[0].model_extra


@pytest.mark.parametrize(("size", "length"), [(9, 200), (10, 30), (20, 30)])
def test_a_longer_pattern_than_is_looked_for_is_none(client: openai.OpenAI, size: int, length: int) -> None:
    reply = client.completions.create(
        model="tiny", prompt="9", max_tokens=200,
        extra_body={"repetition_detection": {"max_pattern_size": size, "min_count": 3}},
    )  # fmt: skip
    assert reply.usage is not None and reply.usage.completion_tokens == length


def test_a_completion_that_repeats_itself_stops(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "9", "max_tokens": 200}
    body = {"repetition_detection": {**DETECTION, "min_pattern_size": 11, "max_pattern_size": 20}}
    (choice,) = client.completions.create(**asked, extra_body=body).choices
    assert (choice.text, choice.finish_reason) == (CIRCLES * 2, "stop"), "a pattern of 20 tokens, three times"
    assert (choice.model_extra or {})["stop_reason"] == "repetition_detected"
    *_, last = client.completions.create(**asked, extra_body=body, stream=True)
    assert last.choices[0].finish_reason == "stop"
    assert (last.choices[0].model_extra or {})["stop_reason"] == "repetition_detected"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_repeats_itself_is_complete_and_warns(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "go", "max_output_tokens": 200, "extra_body": FOREVER}
    if stream:
        *_, last = client.responses.create(**asked, stream=True)
        assert last.type == "response.completed"
        response = last.response
    else:
        response = client.responses.create(**asked)
    assert (response.status, response.output_text) == ("completed", CIRCLES)
    assert (response.model_extra or {})["warnings"] == [
        "The answer ended because it repeated itself (repetition_detection)."
    ]


def test_a_response_refuses_what_a_chat_completion_refuses(http: httpx.Client) -> None:
    reply = http.post("/v1/responses", json={"model": "tiny", "input": "go", "repetition_detection": {"min_count": 1}})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("repetition_detection.")
    assert "1 to 256" in reply.json()["error"]["message"]


def test_a_span_of_a_sequence_says_that_it_repeated_itself(http: httpx.Client) -> None:
    id = http.post("/api/sequences", json={"prompt": "9"}).json()["id"]
    body = {"max_tokens": 200, "repetition_detection": DETECTION}
    reply = http.post(f"/api/sequences/{id}/generate", json=body)
    assert reply.status_code == 200 and '"finish_reason":"repetition"' in reply.text.replace(": ", ":")
    http.delete(f"/api/sequences/{id}")
