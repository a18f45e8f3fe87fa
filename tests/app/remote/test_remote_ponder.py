"""A Ponder as the remote model of another one, by both of its APIs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.conftest import PEBBLE, Server, serving

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


@pytest.fixture(scope="module")
def second(remotes: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings: list[dict[str, Any]] = [
        {"name": "by-openai", "url": f"{remotes.url}/v1", "model": "pebble"},
        {"name": "by-anthropic", "url": remotes.url, "model": "pebble", "api": "anthropic"},
    ]
    with (
        serving(PEBBLE, tmp_path_factory.mktemp("second"), remote=settings) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize("model", ["by-openai", "by-anthropic"])
def test_it_answers_as_it_does_at_home(second: httpx.Client, http: httpx.Client, model: str) -> None:
    body = {"messages": [{"role": "user", "content": "What is 27 + 58?"}], "temperature": 0, "max_tokens": 120}
    there = second.post(CHAT, json={"model": model, **body}).json()
    home = http.post(CHAT, json={"model": "pebble", **body, "reasoning_effort": "none"}).json()
    if model == "by-openai":  # where thinking is the model's own choice
        home = http.post(CHAT, json={"model": "pebble", **body}).json()
        thought = home["choices"][0]["message"].get("reasoning_content")
        assert there["choices"][0]["message"].get("reasoning_content") == thought
    assert there["choices"][0]["message"]["content"] == home["choices"][0]["message"]["content"]
    assert there["usage"]["completion_tokens"] == home["usage"]["completion_tokens"]
    assert there["usage"]["prompt_tokens"] == home["usage"]["prompt_tokens"]


@pytest.mark.parametrize("model", ["by-openai", "by-anthropic"])
def test_a_form_and_a_call_hold(second: httpx.Client, model: str) -> None:
    asked = [{"role": "user", "content": "What is 2 + 3?"}]
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    body: dict[str, Any] = {"model": model, "messages": asked, "max_tokens": 60, "temperature": 0}
    reply = second.post(CHAT, json={**body, "response_format": form})
    assert reply.status_code == 200 and '"sum"' in reply.json()["choices"][0]["message"]["content"].replace("\\", "")
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    reply = second.post(CHAT, json={**body, "tools": [tool], "tool_choice": "required", "stream": True})
    assert '"name":"add"' in reply.text and '"finish_reason":"tool_calls"' in reply.text
