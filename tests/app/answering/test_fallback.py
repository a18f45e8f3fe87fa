"""Fallback weights behind the APIs: answers as one engine writes them, and a report of the tokens of each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.answering.model_registry import ModelRegistry, fallback_memory
from app.config import BadSetting, Settings
from engine.ipc.fallback_link import FallbackLink
from engine.ipc.thread_link import ThreadLink
from tests.app.chatting import begin, log_of, new_chat
from tests.app.conftest import PEBBLE, Server, all_is_back, serving

DRAFT = PEBBLE.parent / "pebble-draft"
PUZZLE = [{"role": "user", "content": "Use 4, 6, 9 and 1 to make 24."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}
REQUESTS: dict[str, dict[str, Any]] = {
    "thinking": {"messages": PUZZLE, "temperature": 0},
    "sampled": {"messages": PUZZLE, "temperature": 1, "seed": 3, "n": 2, "frequency_penalty": 0.4, "top_p": 0.9},
    "budget": {"messages": PUZZLE, "temperature": 0, "thinking": {"max_tokens": 40, "waits": 1}},
    "stop": {"messages": PUZZLE, "temperature": 0, "stop": ["24"], "logprobs": True, "top_logprobs": 2},
    "schema": {
        "messages": PUZZLE, "temperature": 1, "seed": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "call": {
        "messages": [{"role": "user", "content": "How is the weather in Oslo?"}], "tools": [WEATHER],
        "tool_choice": "required", "temperature": 1, "seed": 2,
    },
    "strategy": {"messages": PUZZLE, "strategy": "best_of_n", "strategy_options": {"n": 2}, "seed": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def deferring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model, with itself for fallback weights."""
    with serving(PEBBLE, tmp_path_factory.mktemp("deferring"), fallback=(PEBBLE, 0.7)) as server:
        yield server
        all_is_back(server)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The draft model, with the bundled one for fallback weights."""
    with serving(DRAFT, tmp_path_factory.mktemp("draft"), fallback=(PEBBLE, 0.6)) as server:
        yield server
        all_is_back(server)


def ask(server: Server, **body: Any) -> Any:
    reply = httpx.post(
        f"{server.url}/v1/chat/completions", json={"model": "default", "max_tokens": 120, **body}, timeout=60
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def choices(reply: Any) -> tuple[Any, list[float]]:
    """Returns the answers, calls without their random ids, and the log-probabilities, which a prompt's chunks round."""
    numbers: list[float] = []

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items() if key != "id"}
        if isinstance(value, list):
            return [plain(each) for each in value]
        numbers.extend([value] if isinstance(value, float) else [])
        return None if isinstance(value, float) else value

    return plain(reply["choices"]), numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_what_one_engine_writes(pebble: Server, deferring: Server, name: str) -> None:
    expected, made = ask(pebble, **REQUESTS[name]), ask(deferring, **REQUESTS[name])
    (written, logprobs), (same, numbers) = choices(made), choices(expected)
    assert written == same and logprobs == pytest.approx(numbers, abs=0.01)
    counted = made["usage"]["completion_tokens"]
    assert counted == expected["usage"]["completion_tokens"] and "routing" not in expected
    assert made["routing"]["fallback"]["of"] == counted
    assert 0 <= made["routing"]["fallback"]["tokens"] <= counted


def test_a_stream_shows_nothing_but_the_report_at_its_end(draft: Server) -> None:
    body = {"model": "default", "messages": PUZZLE, "temperature": 0, "max_tokens": 120}
    whole = ask(draft, **body)
    assert 0 < whole["routing"]["fallback"]["tokens"] < whole["routing"]["fallback"]["of"]
    with httpx.stream("POST", f"{draft.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60) as reply:
        chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    for field in ("content", "reasoning_content"):
        streamed = "".join(delta.get(field) or "" for delta in deltas)
        assert streamed == (whole["choices"][0]["message"].get(field) or "")
    assert [chunk["routing"] for chunk in chunks if "routing" in chunk] == [whole["routing"]]
    assert chunks[-1]["routing"] == whole["routing"]


def test_messages_of_anthropic_have_the_report(draft: Server) -> None:
    body = {"model": "default", "messages": PUZZLE, "max_tokens": 120, "temperature": 0}
    reply = httpx.post(f"{draft.url}/v1/messages", json=body, timeout=60).json()
    assert 0 < reply["routing"]["fallback"]["tokens"] <= reply["usage"]["output_tokens"]


def test_a_request_brings_its_own_threshold(draft: Server, pebble: Server) -> None:
    def by(confidence: float) -> Any:
        options = {"min_confidence": confidence}
        return ask(draft, messages=PUZZLE, temperature=0, strategy="fallback", strategy_options=options)

    for server, listed in ((draft, True), (pebble, False)):
        strategies = httpx.get(f"{server.url}/api/strategies").json()["strategies"]
        assert ("fallback" in {each["name"] for each in strategies}) == listed
    never, always = by(0), by(1)
    assert never["routing"]["fallback"]["tokens"] == 0
    assert choices(always)[0] == choices(ask(pebble, messages=PUZZLE, temperature=0))[0]
    body = {"model": "default", "messages": PUZZLE, "strategy": "fallback"}
    refused = httpx.post(f"{pebble.url}/v1/chat/completions", json=body)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == "strategy_options.min_confidence"
    assert "the engine has no fallback weights; accepted: None" in error["message"]


def test_a_run_tells_where_they_went_on(draft: Server) -> None:
    with httpx.Client(base_url=draft.url, timeout=60) as client:
        begun = begin(client, new_chat(client), PUZZLE[0]["content"], max_tokens=120, temperature=0)
        events = log_of(client, begun["run_id"])
    (deferred,) = [each for each in events if each["type"] == "strategy.event"]
    assert deferred["name"] == "AnswerDeferred" and 0 < deferred["fields"]["tokens"] < 120
    assert events[-1]["type"] == "run.completed"


def test_a_reader_who_leaves_ends_both(draft: Server) -> None:
    link = draft.engine._link
    assert isinstance(link, FallbackLink) and isinstance(link._fallback, ThreadLink)
    core = link._fallback.core

    def until(sequences: int) -> None:
        deadline = time.monotonic() + 20
        while core.stats().sequences != sequences:
            assert time.monotonic() < deadline, core.stats()
            time.sleep(0.005)

    body = {"model": "default", "messages": PUZZLE, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{draft.url}/v1/chat/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        until(1)  # the answer was handed over
        next(lines)
    until(0)
    all_is_back(draft)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fallback_confidence": 0.2}, "fallback_confidence is set and fallback_model is not; accepted: both"),
        ({"fallback_model": str(PEBBLE)}, "has the same weights; accepted: another model, or quantization"),
        ({"fallback_model": str(PEBBLE), "models": {"small": str(DRAFT)}}, r"both set \(small\); accepted: one of"),
        ({"fallback_model": str(DRAFT), "api_workers": 2, "engine": "process"}, "api_workers is 2, .* accepted: 1"),
    ],
)
def test_what_does_not_go_together_is_refused_before_loading(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadSetting, match=message):
        Settings(model=str(PEBBLE), data_dir=tmp_path, **changed).engine_fallback()


async def test_the_settings_start_both_and_say_what_it_costs(tmp_path: Path) -> None:
    settings = Settings(
        model=str(DRAFT), data_dir=tmp_path, device="cpu", dtype="float32", threads=1, kv_blocks=101,
        kv_disk_bytes=600_000, fallback_model=str(PEBBLE), fallback_confidence=0.25,
    )  # fmt: skip
    fallback = settings.engine_fallback()
    assert fallback is not None
    assert fallback_memory(settings.engine_config(), fallback) == (
        f"The fallback weights in {PEBBLE} take about 68 MB of memory beside the first ones' 6 MB, and half of the KV "
        "cache."
    )
    async with await ModelRegistry.start(settings) as models:
        engine = models.default.engine
        assert engine.fallback is not None and engine.fallback.min_confidence == 0.25
        first, other = engine.config, engine.fallback.config
        assert (first.kv_blocks, other.kv_blocks, first.kv_disk_bytes, other.kv_disk_bytes) == (
            50,
            50,
            300_000,
            300_000,
        )
        assert first.kv_dir != other.kv_dir and other.model == str(PEBBLE)
        assert "below 0.25 none of" in engine.numerics.quantization
