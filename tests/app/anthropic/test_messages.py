"""Messages, seen through Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import MessageParam, TextBlock, ThinkingBlock
from pydantic import BaseModel, Field

from app.anthropic.routes import MessageStream
from app.errors import ApiError
from tests.app.anthropic.conftest import client_of
from tests.app.conftest import Server, all_is_back, serving
from tests.app.keyed import asking_for_keys, key_of

pytestmark = [pytest.mark.usefixtures("nothing_lost"), pytest.mark.slow]

HI: list[MessageParam] = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 30, "extra_body": {"temperature": 0}}
THINK: dict[str, Any] = {**ASK, "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 20}}
LONG = {"type": "array", "items": {"type": "integer"}, "minItems": 400}


class Pair(BaseModel):
    left: int = Field(ge=0, le=99)
    right: bool


def prompt_of(usage: anthropic.types.Usage) -> int:
    """All tokens of the prompt, whether the cache had them or not."""
    return usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)


def test_a_message_has_the_shape_of_anthropics(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**{**ASK, "max_tokens": 5})
    assert message.type == "message" and message.role == "assistant" and message.id.startswith("msg_")
    (block,) = message.content
    assert isinstance(block, TextBlock) and len(block.text) == 5
    assert (message.stop_reason, message.stop_sequence, message.usage.output_tokens) == ("max_tokens", None, 5)
    assert message._request_id and message._request_id.startswith("req_")


def test_a_stream_adds_up_to_the_whole_message(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**THINK)
    with claude.messages.stream(**THINK) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.model_dump() for block in whole.content] == [
        {name: value for name, value in block.model_dump().items() if name != "parsed_output"}
        for block in streamed.content
    ]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("content_block_stop") == 2
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert prompt_of(streamed.usage) == prompt_of(whole.usage)


def test_a_stop_sequence_ends_the_answer_and_is_named(claude: anthropic.Anthropic) -> None:
    (block,) = claude.messages.create(**ASK).content
    assert isinstance(block, TextBlock)
    message = claude.messages.create(**ASK, stop_sequences=[block.text[2]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", block.text[2])


def test_an_answer_ends_with_its_turn(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**{**ASK, "max_tokens": 1500, "extra_body": {}})
    assert message.stop_reason == "end_turn"


def test_more_tokens_than_the_context_has_are_cut_there(claude: anthropic.Anthropic) -> None:
    long: Any = {"type": "json_schema", "schema": {**LONG, "minItems": 4000}}
    message = claude.messages.create(**{**ASK, "max_tokens": 32_000}, output_config={"format": long})
    assert message.stop_reason == "model_context_window_exceeded"
    assert prompt_of(message.usage) + message.usage.output_tokens == 2048


def test_thinking_is_a_block_with_a_signature_that_is_accepted(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**THINK)
    thinking, text = message.content
    assert isinstance(thinking, ThinkingBlock) and thinking.thinking.isupper() and thinking.signature
    assert isinstance(text, TextBlock) and text.text.islower()
    details = message.usage.output_tokens_details
    assert details is not None and 0 < details.thinking_tokens <= 20
    back: list[MessageParam] = [*HI, {"role": "assistant", "content": message.content}, *HI]
    assert claude.messages.create(**{**THINK, "messages": back}).content
    other: Any = {**thinking.model_dump(), "thinking": "SOMETHING ELSE"}
    with pytest.raises(anthropic.BadRequestError, match="not this server's signature"):
        claude.messages.create(**{**THINK, "messages": [*HI, {"role": "assistant", "content": [other]}, *HI]})


def test_thinking_that_is_omitted_leaves_its_signature(claude: anthropic.Anthropic) -> None:
    asked = {**THINK, "thinking": {**THINK["thinking"], "display": "omitted"}}
    message = claude.messages.create(**asked)
    thinking = message.content[0]
    assert isinstance(thinking, ThinkingBlock) and thinking.thinking == "" and thinking.signature
    back: list[MessageParam] = [*HI, {"role": "assistant", "content": message.content}, *HI]
    assert claude.messages.create(**{**asked, "messages": back}).content


@pytest.mark.parametrize(
    ("thinking", "kinds"),
    [(None, {"text"}), ({"type": "disabled"}, {"text"}), ({"type": "adaptive"}, {"thinking", "text"})],
    ids=["absent", "disabled", "adaptive"],
)
def test_thinking_comes_where_it_is_asked_for(claude: anthropic.Anthropic, thinking: Any, kinds: set[str]) -> None:
    asked = {**ASK, "max_tokens": 1500, "extra_body": {}, "output_config": {"effort": "low"}}
    asked |= {} if thinking is None else {"thinking": thinking}
    assert {block.type for block in claude.messages.create(**asked).content} == kinds


@pytest.fixture(scope="module")
def discreet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("discreet"), thinking_text="hidden") as server:
        yield server


def test_thinking_that_nobody_sees_is_redacted(discreet: Server) -> None:
    with client_of(discreet) as client:
        message = client.messages.create(**THINK)
        assert [block.type for block in message.content] == ["redacted_thinking", "text"]
        back: list[MessageParam] = [*HI, {"role": "assistant", "content": message.content}, *HI]
        assert client.messages.create(**{**THINK, "messages": back}).content


def test_a_result_has_its_type(claude: anthropic.Anthropic) -> None:
    message = claude.messages.parse(**{**ASK, "max_tokens": 200}, output_format=Pair)
    assert isinstance(message.parsed_output, Pair)


def test_counted_tokens_are_those_of_the_usage(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HI, "system": "Be brief."}
    counted = claude.messages.count_tokens(**asked).input_tokens
    assert counted == prompt_of(claude.messages.create(**asked, max_tokens=3).usage)


def test_a_tool_runner_goes_on_without_a_thread(claude: anthropic.Anthropic) -> None:
    """Its requests ask the server to keep the conversation, until an error's details say that it does not."""
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(**{**ASK, "extra_body": {"thread": {"type": "create"}}})
    body: Any = refused.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    messages: Any = HI
    runner = claude.beta.messages.tool_runner(
        model="tiny", max_tokens=5, messages=messages, tools=[], extra_body={"temperature": 0}
    )
    assert runner.until_done().stop_reason == "max_tokens"


def test_a_second_turn_finds_the_first_in_the_cache(claude: anthropic.Anthropic) -> None:
    """Although Claude Code's first block of the system prompt is another with every request."""

    def ask(number: int, messages: list[MessageParam]) -> anthropic.types.Message:
        header = f"x-anthropic-billing-header: cc_version=2.1.197.{number:03x}; cc_entrypoint=cli; cch={number:05x};"
        system: Any = [
            {"type": "text", "text": header},
            {"type": "text", "text": "You are a careful engineer. " * 40, "cache_control": {"type": "ephemeral"}},
        ]
        return claude.messages.create(**{**ASK, "max_tokens": 8, "system": system, "messages": messages})

    first = ask(1, HI)
    second = ask(2, [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": "and?"}])
    assert (first.usage.cache_read_input_tokens, first.usage.input_tokens) == (0, prompt_of(first.usage) % 16)
    assert second.usage.cache_read_input_tokens is not None
    assert second.usage.cache_read_input_tokens >= 0.95 * prompt_of(second.usage)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, ["max_tokens", "1 or more"]),
        ({"messages": []}, ["messages", "non-empty"]),
        ({"temperature": 3}, ["temperature", "0 (greedy) to 2"]),
        ({"stop_sequences": [""]}, ["stop_sequences", "non-empty"]),
        ({"thinking": {"type": "enabled"}}, ["thinking.budget_tokens", "missing"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 30}}, ["thinking.budget_tokens", "max_tokens (30)"]),
        ({"thinking": {"type": "between_tools"}}, ["thinking.type", "adaptive"]),
        ({"output_config": {"format": {"type": "text"}}}, ["output_config.format", "json_schema"]),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, ["output_config.format"]),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, ["web_search_20250305", "'custom' tools"]),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, ["tools[0].name", "letters"]),
        ({"tool_choice": {"type": "any"}}, ["tool_choice", "no tools"]),
        ({"tool_choice": {"type": "some"}}, ["tool_choice", '"any"']),
        ({"container": "c"}, ["container", "no container"]),
        ({"response_format": {"type": "text"}}, ["response_format", "output_config.format"]),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, ["context_management", "no edits"]),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, ["prompt is too long", "2048"]),
        ({"surprise": 1}, ["surprise", "not a field"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_refusal_names_the_field(claude: anthropic.Anthropic, fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model="tiny", messages=HI, max_tokens=30, extra_body=fields)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert set(body["error"]) == {"type", "message"} and body["request_id"] == refused.value.request_id
    assert all(word in body["error"]["message"] for word in words), body


def test_an_unknown_model_is_not_found(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="accepted: 'tiny' or 'default'"):
        claude.messages.create(**{**ASK, "model": "claude-opus"})


def test_fields_of_anthropics_own_service_change_nothing(claude: anthropic.Anthropic) -> None:
    more: dict[str, Any] = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"},
        "extra_headers": {"anthropic-beta": "a-beta-2026-01-01", "anthropic-version": "2023-06-01"},
        "extra_body": {
            "temperature": 0, "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
    }  # fmt: skip
    assert claude.messages.create(**{**ASK, **more}).content == claude.messages.create(**ASK).content


def test_a_large_body_is_refused_in_anthropics_shape(server: Server) -> None:
    body = json.dumps({**ASK, "system": "a" * (11 << 20)})
    reply = httpx.post(f"{server.url}/v1/messages", content=body, timeout=60)
    assert (reply.status_code, reply.json()["error"]["type"]) == (413, "request_too_large")


def test_models_are_listed_for_both_kinds_of_clients(claude: anthropic.Anthropic) -> None:
    listed = claude.models.list()
    assert [each.id for each in listed][:2] == ["tiny", "default"] and not listed.has_more
    assert claude.models.retrieve("tiny").display_name == "tiny" and listed.data[0].created_at.year > 2000


def test_leaving_cancels_the_answer(claude: anthropic.Anthropic, server: Server) -> None:
    long: Any = {"format": {"type": "json_schema", "schema": LONG}}
    started = server.stats().generated_tokens
    with claude.messages.create(**{**ASK, "max_tokens": 1500}, output_config=long, stream=True) as stream:
        for _, _event in zip(range(9), stream, strict=False):
            pass
    assert server.until(lambda s: s.sequences == 0).generated_tokens - started < 1500


# -- keys and limits


def test_a_key_is_taken_from_either_header(model: Path, tmp_path: Path) -> None:
    with asking_for_keys(model, tmp_path) as server:
        key = key_of(server, "ana")
        with client_of(server, key) as client:
            assert client.messages.create(**ASK).content
        with anthropic.Anthropic(base_url=server.url, auth_token=key, api_key=None) as client:
            assert client.messages.count_tokens(model="tiny", messages=HI).input_tokens
        with client_of(server, "sk-ant-wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(**ASK)
        body: Any = refused.value.body
        assert body["error"]["type"] == "authentication_error"
        all_is_back(server)


def test_a_limit_says_when_to_try_again(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, requests_per_minute=1) as server, client_of(server) as client:
        client.messages.create(**ASK)
        client.messages.count_tokens(model="tiny", messages=HI)  # which costs nothing
        with pytest.raises(anthropic.RateLimitError) as refused:
            client.messages.create(**ASK)
        body: Any = refused.value.body
        assert body["error"]["type"] == "rate_limit_error" and int(refused.value.response.headers["retry-after"]) > 0


# -- streams


async def test_a_silent_stream_is_pinged_and_ends_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.openai.event_stream.PING_S", 0.001)
    pinged = asyncio.Event()
    sent = b""

    async def events() -> AsyncGenerator[bytes, None]:
        await pinged.wait()
        yield b""
        raise ApiError(503, "It stopped.", code="engine_stopped")

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal sent
        sent += message.get("body", b"")
        pinged.set() if b"event: ping" in sent else None

    async def receive() -> MutableMapping[str, Any]:
        return await asyncio.Event().wait() and {}

    await MessageStream(events())({"type": "http", "path": "/v1/messages"}, receive, send)
    first, *_, last, rest = sent.decode().split("\n\n")
    assert first == 'event: ping\ndata: {"type":"ping"}' and rest == ""
    assert last.startswith("event: error\ndata: ") and '"overloaded_error"' in last
