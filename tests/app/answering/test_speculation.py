"""Speculative decoding over HTTP: a request's own wish, the same answer with and without, predictions, and counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import openai
import pytest

from app.config import Settings, load_settings
from engine import Engine
from engine.config import MAX_DRAFT
from engine.speculation import speculator
from tests.app.chatting import begin, log_of, new_chat
from tests.app.conftest import PEBBLE, Server, serving

SAY = [{"role": "user", "content": "Explain step by step how to add 27 and 58."}]
GREEDY: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 100}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def every_draft_is_verified() -> Iterator[None]:
    """Else the engine verifies those that the times of its steps say are worth it."""

    def all_of_them(survival: Mapping[int, Sequence[float]], rows: int, times: object) -> dict[int, int]:
        return {id: len(each) for id, each in survival.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "chosen_lengths", all_of_them)
        yield


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(PEBBLE, tmp_path_factory.mktemp("speculating"), speculation="auto") as server:
        yield server


@pytest.fixture(scope="module")
def web(speculating: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=speculating.url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, path: str = "/v1/chat/completions", **body: Any) -> Any:
    reply = client.post(path, json={**GREEDY, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def drafted(server: Server) -> int:
    return server.stats().speculation.drafted


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"messages": SAY},
    "sampled": {"messages": SAY, "temperature": 1, "seed": 3, "n": 2},
    "tools": {"messages": SAY, "tools": [WEATHER]},
    "schema": {
        "messages": SAY, "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 9}},
        },
    },
}  # fmt: skip


def told(reply: Any) -> list[Any]:
    """Returns the answers, their calls without ids."""
    return [
        (each["finish_reason"], each["message"].get("content"), each["message"].get("reasoning_content"),
         [call["function"] for call in each["message"].get("tool_calls", [])])
        for each in reply["choices"]
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_the_same_with_drafts_and_without(web: httpx.Client, name: str) -> None:
    plain = ask(web, **REQUESTS[name], speculation="off")
    for speculation in ({"proposer": "ngram", "max_tokens": 4}, {"proposer": "suffix"}, {}):
        reply = ask(web, **REQUESTS[name], speculation=speculation)
        assert told(reply) == told(plain)
        assert reply["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


@pytest.mark.slow
def test_a_request_turns_it_off_and_on(speculating: Server, web: httpx.Client, pebble: Server) -> None:
    before = drafted(speculating)
    ask(web, messages=SAY, speculation="off")
    assert drafted(speculating) == before
    ask(web, messages=SAY, logprobs=True)
    assert drafted(speculating) > before
    with httpx.Client(base_url=pebble.url, timeout=60) as client:  # where the setting is off
        before = drafted(pebble)
        ask(client, messages=SAY)
        assert drafted(pebble) == before
        ask(client, messages=SAY, speculation={"proposer": "ngram"})
        assert drafted(pebble) > before


def test_no_draft_is_longer_than_asked_for(speculating: Server, web: httpx.Client) -> None:
    def long() -> int:
        return sum(speculating.stats().speculation.drafted_at[1:])

    before = long()
    ask(web, messages=SAY, speculation={"max_tokens": 1})
    assert long() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "1 2 3 1 2 3 1 2 3 1 2 3"}),
        ("/v1/responses", {"input": SAY[0]["content"], "max_output_tokens": 100, "max_tokens": None}),
        ("/v1/messages", {"messages": SAY}),
    ],
)
def test_every_api_takes_the_field(speculating: Server, web: httpx.Client, path: str, body: dict[str, Any]) -> None:
    before = drafted(speculating)
    ask(web, path, **body, speculation="off")
    assert drafted(speculating) == before
    ask(web, path, **body, speculation={"proposer": "ngram"})
    assert drafted(speculating) > before
    refused = web.post(path, json={**GREEDY, **body, "speculation": {"proposer": "oracle"}})
    assert refused.status_code == 400 and "accepted: auto, off, suffix, medusa, ngram" in refused.text


def test_a_sequences_span_takes_the_field(speculating: Server, web: httpx.Client) -> None:
    id = web.post("/api/sequences", json={"prompt": "1 2 3 1 2 3 1 2 3 1 2 3"}).json()["id"]
    before = drafted(speculating)
    for speculation, more in (("off", False), ({"proposer": "ngram"}, True)):
        body = {"max_tokens": 40, "temperature": 0, "speculation": speculation}
        assert web.post(f"/api/sequences/{id}/generate", json=body).status_code == 200
        assert (drafted(speculating) > before) == more
    body = {"speculation": {"proposer": "oracle"}}
    assert web.post(f"/api/sequences/{id}/generate", json=body).json()["error"]["param"] == "speculation.proposer"
    web.delete(f"/api/sequences/{id}")


@pytest.mark.parametrize("parts", [False, True], ids=["text", "parts"])
def test_a_prediction_changes_no_token_and_is_counted(speculating: Server, pebble: Server, parts: bool) -> None:
    for server in (speculating, pebble):  # by a setting of auto, and of off
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        asked: dict[str, Any] = {**GREEDY, "messages": SAY}
        plain = client.chat.completions.create(**asked, extra_body={"speculation": "off"})
        text = plain.choices[0].message.content or ""
        assert plain.usage is not None and plain.usage.completion_tokens_details is not None
        assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None
        content: Any = [{"type": "text", "text": part} for part in (text[:9], text[9:])] if parts else text
        made = client.chat.completions.create(**asked, prediction={"type": "content", "content": content})
        assert made.choices[0].message.content == text and made.usage is not None
        details = made.usage.completion_tokens_details
        assert details is not None and details.rejected_prediction_tokens is None
        assert 0 < (details.accepted_prediction_tokens or 0) <= made.usage.completion_tokens
        *_, last = client.chat.completions.create(
            **asked, prediction={"type": "content", "content": content}, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        assert last.usage is not None and last.usage.completion_tokens_details is not None
        assert (last.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 0


def test_a_prediction_that_is_wrong_changes_no_token(web: httpx.Client) -> None:
    plain = ask(web, messages=SAY, speculation="off")
    prediction = {"type": "content", "content": "Nothing of this is in the answer. " * 9}
    assert told(ask(web, messages=SAY, prediction=prediction)) == told(plain)
    assert told(ask(web, messages=SAY, prediction={"type": "content", "content": ""})) == told(plain)


def test_beams_take_a_prediction_and_no_proposer(web: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": SAY, "strategy": "beam", "strategy_options": {"width": 2}, "max_tokens": 8}
    taken: list[dict[str, Any]] = [
        {"speculation": "off"}, {"speculation": {}}, {"prediction": {"type": "content", "content": "2"}},
    ]  # fmt: skip
    for each in taken:
        assert told(ask(web, **body, **each)) == told(ask(web, **body))
    refused = web.post("/v1/chat/completions", json={**GREEDY, **body, "speculation": {"proposer": "ngram"}})
    assert refused.status_code == 400 and "beam search verifies no drafts; accepted: auto, off" in refused.text


def test_the_longest_draft_of_a_setting_is_the_engines() -> None:
    (limit,) = [each.le for each in Settings.model_fields["speculation_tokens"].metadata if hasattr(each, "le")]
    assert limit == MAX_DRAFT


def test_the_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PONDER_SPECULATION_TOKENS", "5")
    config = load_settings(speculation="ngram", draft_model="models/pebble-draft").engine_config()
    assert (config.speculation, config.speculation_tokens) == ("ngram", 5)
    assert config.draft_model == "models/pebble-draft"


@pytest.mark.parametrize(("setting", "used"), [(None, "auto"), ("off", "off"), ("ngram", "ngram")])
def test_a_cpu_speculates_unless_told(setting: str | None, used: str) -> None:
    async def started() -> Engine:
        config = Settings(model=str(PEBBLE), device="cpu", kv_blocks=8, speculation=setting).engine_config()
        async with await Engine.start(config) as engine:
            return engine

    engine = asyncio.run(started())
    heads = () if used == "off" else ("medusa",)  # the model's own, beside it
    assert engine.speculation == used and engine.proposers == ("suffix", *heads, "ngram")


def test_metrics_have_the_engines_counts(speculating: Server, web: httpx.Client) -> None:
    ask(web, messages=SAY)
    stats = speculating.stats().speculation
    lines = [line for line in web.get("/metrics").text.splitlines() if line.startswith("ponder_spec_decode_")]
    values = {name: float(value) for name, value in (line.split() for line in lines)}
    name = "ponder_spec_decode_num"
    assert values[f"{name}_drafts_total"] == stats.rows > 0
    assert values[f"{name}_draft_tokens_total"] == stats.drafted >= stats.rows
    assert values[f"{name}_accepted_tokens_total"] == stats.accepted > 0
    at = [values[f'{name}_accepted_tokens_per_pos_total{{position="{place}"}}'] for place in range(16)]
    assert at == list(stats.accepted_at) and sum(at) == stats.accepted and at == sorted(at, reverse=True)
    assert values["ponder_spec_decode_tokens_per_step"] == pytest.approx(1 + stats.accepted / stats.rows)
    assert values["ponder_spec_decode_saved_seconds"] == pytest.approx(stats.saved_s)


def test_an_operator_is_told_what_drafts_gave(speculating: Server, web: httpx.Client, server: Server) -> None:
    ask(web, messages=SAY)
    stats = speculating.stats().speculation
    (told,) = [each["speculation"] for each in web.get("/api/operator/stats").json()["models"]]
    assert (told["drafted"], told["accepted"]) == (stats.drafted, stats.accepted)
    assert len(told["acceptance"]) == 16 and all(0 <= share <= 1 for share in told["acceptance"])
    assert told["tokens_per_step"] > 1 and told["saved_s"] == pytest.approx(stats.saved_s)
    (nothing,) = [
        each["speculation"] for each in httpx.get(f"{server.url}/api/operator/stats").json()["models"]
    ]  # where nothing was drafted
    assert nothing is None


def test_a_run_is_answered_with_drafts(speculating: Server, web: httpx.Client) -> None:
    before = drafted(speculating)
    begun = begin(web, new_chat(web), SAY[0]["content"], max_tokens=100, temperature=0)
    events = log_of(web, begun["run_id"])
    assert drafted(speculating) > before
    assert events[-1]["type"] == "run.completed", json.dumps(events[-1])
