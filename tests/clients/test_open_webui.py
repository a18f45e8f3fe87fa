"""Requests that Open WebUI's source makes, of both APIs that it knows. The program itself has several gigabytes and is
not installed for this."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.clients import cell

Json = dict[str, Any]
CALL = {
    "id": "call_1",
    "index": 0,
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}


def test_models_are_found(http: httpx.Client) -> None:
    assert "default" in {each["id"] for each in http.get("/v1/models").raise_for_status().json()["data"]}
    assert http.get("/api/version").json()["version"] and http.get("/api/tags").json()["models"][0]["model"]
    assert http.get("/api/ps").json()["models"][0]["expires_at"]


def test_a_turn_with_a_tool_through_chat_completions(http: httpx.Client) -> None:
    """Streams with usage, and gives a call back as it came, its number included."""
    asked: Json = {
        "model": "default", "stream": True, "stream_options": {"include_usage": True}, "tools": [cell.GET_WEATHER],
        "messages": [
            {"role": "user", "content": cell.ASKS_WEATHER}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
        ],
    }  # fmt: skip
    lines = http.post("/v1/chat/completions", json=asked).raise_for_status().text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == cell.SUMMARY and chunks[-1]["usage"]["total_tokens"] > 0


def test_a_title_is_made(http: httpx.Client) -> None:
    asked = {"model": "default", "stream": False, "max_completion_tokens": 1000}
    reply = http.post(
        "/v1/chat/completions", json={**asked, "messages": [{"role": "user", "content": cell.SAYS_HELLO}]}
    )
    assert reply.json()["choices"][0]["message"]["content"] == cell.HELLO


def test_a_turn_with_a_tool_through_ollamas_api(http: httpx.Client) -> None:
    """Arguments are an object there, and images of no picture an empty list."""
    called = {**CALL, "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    asked: Json = {
        "model": "default:latest", "stream": True, "tools": [cell.GET_WEATHER], "keep_alive": "5m",
        "options": {"temperature": 0.5, "num_ctx": 4096, "num_keep": 4, "mirostat": 0, "stop": ["~~"]},
        "messages": [
            {"role": "user", "content": cell.ASKS_WEATHER, "images": []},
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "content": "12 degrees", "tool_call_id": "call_1"},
        ],
    }  # fmt: skip
    lines = http.post("/api/chat", json=asked).raise_for_status().text.splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == cell.SUMMARY
