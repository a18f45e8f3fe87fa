"""Ollama's own client, at a server with the setting `ollama_api`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from tests.app.conftest import Server, serving
from tests.app.gate import GatedEmbedder

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_predict": 12}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


@pytest.fixture(scope="module")
def shelf_with_ollama(
    model: Path, tmp_path_factory: pytest.TempPathFactory, embedder: GatedEmbedder
) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("ollama"), embedder, ollama_api=True) as server:
        yield server


@pytest.fixture(scope="module")
def theirs(shelf_with_ollama: Server) -> ollama.Client:
    return ollama.Client(host=shelf_with_ollama.url, timeout=60)


@pytest.fixture(scope="module")
def plain(shelf_with_ollama: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shelf_with_ollama.url, timeout=60) as client:
        yield client


def test_it_is_off_by_default(http: httpx.Client) -> None:
    assert http.get("/api/tags").status_code == 404
    assert http.post("/api/chat", json={"model": "default", "messages": HELLO}).status_code in (404, 405)


def test_models_are_listed_shown_and_loaded(theirs: ollama.Client) -> None:
    (listed,) = theirs.list().models
    (loaded,) = theirs.ps().models
    assert listed.model is not None and listed.model.endswith(":latest") and loaded.model == listed.model
    shown = theirs.show(listed.model)
    assert shown.capabilities is not None and shown.capabilities[0] == "completion"
    assert shown.modelinfo is not None and shown.modelinfo["ponder.context_length"] > 0


def test_a_stream_adds_up_to_the_whole_and_ends_with_the_numbers(theirs: ollama.Client) -> None:
    whole = theirs.chat("default", HELLO, options=GREEDY)
    parts = list(theirs.chat("default", HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)
    assert last.done_reason == whole.done_reason == "length" and whole.eval_count == 12
    assert last.total_duration is not None and last.total_duration > 0


def test_it_answers_as_a_chat_completion_does(theirs: ollama.Client, plain: httpx.Client) -> None:
    body = {"model": "default", "messages": HELLO, "max_tokens": 12, "temperature": 0}
    expected = plain.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert theirs.chat("default", HELLO, options=GREEDY).message.content == expected
    assert theirs.generate("default", "Hello", options=GREEDY).response == expected


def test_drafts_are_an_option(theirs: ollama.Client, plain: httpx.Client) -> None:
    expected = theirs.generate("default", "Hello", options=GREEDY).response
    drafts = {**GREEDY, "speculation": {"proposer": "ngram", "max_tokens": 4}}
    assert theirs.generate("default", "Hello", options=drafts).response == expected
    body = {"model": "default", "prompt": "a", "options": {"speculation": "on"}}
    message = plain.post("/api/generate", json=body).json()["error"]
    assert message.startswith("options.speculation is 'on'") and '"max_tokens"?: 1 to 32' in message


def test_a_prompt_with_a_system_text_is_a_chat_of_two_messages(theirs: ollama.Client, plain: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    streamed = theirs.generate("default", "Hello", system="Be brief.", options=GREEDY, stream=True)
    assert (
        "".join(part.response or "" for part in streamed)
        == theirs.chat("default", messages, options=GREEDY).message.content
    )


def test_a_format_is_held_to(theirs: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    said = theirs.chat("default", HELLO, format=schema, options={"temperature": 0, "num_predict": 200}).message.content
    assert said is not None and isinstance(json.loads(said)["ok"], bool)
    free = theirs.generate("default", "Hello", format="json", options={"temperature": 0, "num_predict": 200})
    assert free.done_reason == "length" or isinstance(json.loads(free.response or ""), dict)


def test_calls_come_whole_and_their_results_go_back(pebble_with_ollama: ollama.Client) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    parts = list(pebble_with_ollama.chat("pebble", asked, tools=[WEATHER], stream=True, options={"temperature": 0}))
    (called,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert called.function.name == "get_weather" and set(called.function.arguments) == {"town"}
    whole = pebble_with_ollama.chat("pebble", asked, tools=[WEATHER], options={"temperature": 0}).message
    assert whole.tool_calls is not None and whole.tool_calls[0].function == called.function
    asked += [whole, {"role": "tool", "tool_name": "get_weather", "content": '{"temperature": 12}'}]
    assert pebble_with_ollama.chat("pebble", asked, tools=[WEATHER], options={"temperature": 0}).message.content


def test_thinking_comes_apart(pebble_with_ollama: ollama.Client) -> None:
    asked = [{"role": "user", "content": "Use 4, 6 and 9 to make 33."}]
    thought = pebble_with_ollama.chat("pebble", asked, think=True, options={"temperature": 0}).message
    assert thought.thinking and thought.content and "<think>" not in thought.content
    assert not pebble_with_ollama.chat("pebble", asked, think=False, options=GREEDY).message.thinking


@pytest.fixture(scope="module")
def pebble_with_ollama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ollama.Client]:
    with serving(Path("models/pebble"), tmp_path_factory.mktemp("pebble-ollama"), ollama_api=True) as server:
        yield ollama.Client(host=server.url, timeout=60)


def test_a_request_without_a_prompt_finds_the_model_loaded(theirs: ollama.Client) -> None:
    assert theirs.generate("default", keep_alive="5m").done_reason == "load"
    assert theirs.chat("default:latest", []).done_reason == "load"


def test_vectors_are_those_of_the_other_api(theirs: ollama.Client, plain: httpx.Client) -> None:
    expected = plain.post("/v1/embeddings", json={"model": "default", "input": ["a", "b"]}).json()["data"]
    found = theirs.embed("default", ["a", "b"])
    assert [list(each) for each in found.embeddings] == [each["embedding"] for each in expected]
    assert list(theirs.embeddings("default", "a").embedding) == expected[0]["embedding"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("chat", {"messages": [{"role": "x", "content": ""}]}, "messages"), ("chat", {"format": "xml"}, "format"),
        ("chat", {"messages": HELLO, "options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"messages": HELLO, "options": {"temperature": "hot"}}, "options.temperature is 'hot'"),
        ("chat", {"messages": HELLO, "options": {"stop": [""]}}, "options.stop is"),
        ("chat", {"messages": HELLO, "options": {"num_predict": 99_999}}, "maximum context length"),
        ("chat", {"messages": HELLO, "format": {"type": 5}}, "format"),
        ("chat", {"messages": [{**HELLO[0], "images": ["aGk="]}]}, "images"), ("chat", {"template": "x"}, "template"),
        ("chat", {"messages": HELLO, "options": {"num_predict": 0}}, "options.num_predict is 0"),
        ("generate", {"prompt": "a", "options": {"speculation": {"proposer": "x"}}}, "options.speculation.proposer is"),
        ("chat", {"messages": "x"}, "messages"),
        ("generate", {"prompt": "a", "raw": True}, "raw"), ("generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("generate", {"prompt": "a" * 9000}, "maximum context length"),
        ("generate", {"prompt": "a", "options": {"min_p": 2}}, "options.min_p is 2"),
        ("generate", {"prompt": "a", "context": [1]}, "context"), ("generate", {"prompt": 3}, "prompt"),
        ("embed", {"input": []}, "input"), ("embed", {"input": 3}, "input"), ("embed", {}, "input"),
        ("embed", {"input": "a", "truncate": False}, "truncate"), ("embed", {"input": "a", "prompt": "b"}, "prompt"),
        ("embeddings", {"prompt": "a", "dimensions": 3}, "dimensions"), ("show", {"system": "x"}, "system"),
        ("chat", {"messages": HELLO, "options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_bad_request_is_refused_in_their_shape(
    plain: httpx.Client, path: str, body: dict[str, Any], named: str
) -> None:
    reply = plain.post(f"/api/{path}", json={"model": "default", **body})
    assert reply.status_code == 400 and reply.json().keys() == {"error"} and named in reply.json()["error"], reply.text
    assert not re.search("max_tokens|response_format|json_schema", reply.json()["error"])


def test_an_unknown_model_is_not_found(theirs: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        theirs.chat("llama3.2", HELLO)
    assert caught.value.status_code == 404 and "llama3.2" in caught.value.error
