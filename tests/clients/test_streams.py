"""Streams of all APIs: joined, they are the whole reply, whatever the model writes and wherever its tokens end."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.app import folding, toolbox
from tests.app.conftest import Server
from tests.clients.script import Turn, play
from tests.clients.scripted_model import Requests

pytestmark = pytest.mark.slow

SOME = settings(max_examples=30, suppress_health_check=list(HealthCheck))
Json = dict[str, Any]
# Letters of several bytes, which tokens cut, and marks that JSON and the model's tags are made of.
texts = st.text(alphabet='ab 1\n"\\{}[]<>/|é東🚲', max_size=30)
arguments = st.dictionaries(
    texts, st.recursive(texts | st.integers(-99, 99) | st.none(), st.lists, max_leaves=4), max_size=3
)
calls = st.lists(st.tuples(st.sampled_from(["f", "g"]), arguments), max_size=2)
scripts = st.builds(Turn, texts, calls, texts)
answers = st.builds(Turn, texts, st.just([]), texts)
SCHEMA: Json = {"type": "object"}


def chat(http: httpx.Client, script: Turn) -> tuple[Json, Json]:
    tools = [toolbox.tool(name, SCHEMA) for name in "fg"]
    body = {"model": "default", "messages": [{"role": "user", "content": play(script)}], "tools": tools}
    whole = http.post("/v1/chat/completions", json=body).json()["choices"]
    (joined,), (told,) = (
        toolbox.without_ids(each) for each in (toolbox.join(toolbox.stream(http, body))["choices"], whole)
    )
    return joined, told


def completion(http: httpx.Client, script: Turn) -> tuple[str, str]:
    prompt = f"<|im_start|>user\n{play(script)}<|im_end|>\n<|im_start|>assistant\n"
    body = {"model": "default", "prompt": prompt, "max_tokens": 400}
    lines = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]), whole


def response(http: httpx.Client, script: Turn) -> tuple[Json, Json]:
    tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in "fg"]
    body = {"model": "default", "input": play(script), "tools": tools, "store": False}
    streamed = folding.events_of(http.post("/v1/responses", json={**body, "stream": True}).text)
    whole = http.post("/v1/responses", json=body).json()
    return folding.without_ids(folding.response_of(streamed)), folding.without_ids(whole)


def message(http: httpx.Client, script: Turn) -> tuple[list[Json], list[Json]]:
    fields: Any = {
        "model": "default", "max_tokens": 2000, "messages": [{"role": "user", "content": play(script)}],
        "tools": [{"name": name, "input_schema": SCHEMA} for name in "fg"],
        "thinking": {"type": "enabled", "budget_tokens": 500},
    }  # fmt: skip
    client = anthropic.Anthropic(base_url=str(http.base_url), api_key="none", max_retries=0)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    return _blocks(streamed), _blocks(client.messages.create(**fields))


def _blocks(made: anthropic.types.Message) -> list[Json]:
    kept = ("type", "text", "thinking", "signature", "name", "input")
    return [{name: value for name, value in block.model_dump().items() if name in kept} for block in made.content]


def ollama_chat(http: httpx.Client, script: Turn) -> tuple[Json, Json]:
    tools = [toolbox.tool(name, SCHEMA) for name in "fg"]
    body = {"model": "default", "messages": [{"role": "user", "content": play(script)}], "tools": tools}
    lines = [json.loads(line)["message"] for line in http.post("/api/chat", json=body).text.splitlines()]
    return _joined(lines), _joined([http.post("/api/chat", json={**body, "stream": False}).json()["message"]])


def _joined(parts: list[Json]) -> Json:
    called = [call["function"] for part in parts for call in part.get("tool_calls", [])]
    return {name: "".join(part.get(name, "") for part in parts) for name in ("content", "thinking")} | {"calls": called}


def ollama_generate(http: httpx.Client, script: Turn) -> tuple[Json, Json]:
    body = {"model": "default", "prompt": play(script)}
    lines = [json.loads(line) for line in http.post("/api/generate", json=body).text.splitlines()]
    parts = [lines, [http.post("/api/generate", json={**body, "stream": False}).json()]]
    streamed, whole = (
        {n: "".join(line.get(n, "") for line in each) for n in ("response", "thinking")} for each in parts
    )
    return streamed, whole


@pytest.mark.parametrize("both", [chat, response, message, ollama_chat], ids=lambda both: both.__name__)
@SOME
@given(script=scripts)
def test_a_joined_stream_with_calls_is_the_whole_reply(http: httpx.Client, both: Any, script: Turn) -> None:
    joined, whole = both(http, script)
    assert joined == whole
    written = json.dumps(whole, ensure_ascii=False)
    assert all(json.dumps(name) in written for name, _ in script.calls)


@pytest.mark.parametrize("both", [completion, ollama_generate], ids=lambda both: both.__name__)
@SOME
@given(script=answers)
def test_a_joined_stream_of_text_is_the_whole_reply(http: httpx.Client, both: Any, script: Turn) -> None:
    joined, whole = both(http, script)
    assert joined == whole
    text = whole if isinstance(whole, str) else whole["response"]
    assert text.endswith(script.text) if isinstance(whole, str) else text.strip() == script.text.strip()


def test_nothing_of_it_is_left(scripted: tuple[Server, Requests]) -> None:
    scripted[0].until(lambda stats: stats.sequences == 0)
