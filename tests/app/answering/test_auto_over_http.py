"""`model: auto` as clients meet it: in chat completions, responses and runs, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.answering.model_cascade import ModelCascade
from app.answering.served_model import ServedModel
from reasoning.candidate import Candidate
from reasoning.route import Confident, FirstTokens, Gate, Verdict
from tests.app.chatting import begin, log_of, new_chat, read
from tests.app.conftest import Server

DEADLINE_S = 3.0  # enough for the small model on a busy machine, too
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK: dict[str, Any] = {
    "model": "auto", "messages": [{"role": "user", "content": "Use 2, 3 and 4 to make 24."}], "max_tokens": 60,
    "temperature": 0,
}  # fmt: skip


@pytest.fixture
def http(both: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=both.url, timeout=60) as client:
        yield client
    all_is_back(both)


def all_is_back(both: Server) -> None:
    """Every sequence of every model is closed."""
    deadline = time.monotonic() + 20
    for served in both.app.state.ponder.models:
        while (stats := both.on_loop(served.engine.stats())).sequences or stats.blocks_used:
            assert time.monotonic() < deadline, (served.name, stats)
            time.sleep(0.01)


@pytest.fixture
def gate(both: Server) -> Iterator[Any]:
    """Sets how sure the small model must be."""
    models = both.app.state.ponder.models
    before = models.auto

    def set_gate(gate: Gate) -> None:
        models.auto = ModelCascade([models.get("small"), models.get("pebble")], gate)

    yield set_gate
    models.auto = before


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = http.post(path, json={**body, "stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


class Late(Confident):
    """Judges once the request has no time left."""

    def judge(self, answer: Candidate) -> Verdict:
        time.sleep(DEADLINE_S)
        return Confident.judge(self, answer)


class LateStop(FirstTokens):
    """Stops an answer, and judges it once the request has no time left."""

    def judge(self, answer: Candidate) -> Verdict:
        time.sleep(DEADLINE_S)
        return FirstTokens.judge(self, answer)


def test_without_time_for_the_next_model_the_answer_before_is_given(http: httpx.Client, gate: Any) -> None:
    alone = http.post(CHAT, json={**ASK, "model": "small"}).json()
    for late, whole in ((Late(1.0), True), (LateStop(1.0), False)):
        gate(late)
        reply = http.post(CHAT, json={**ASK, "deadline_s": DEADLINE_S})
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        assert answer["model"] == "small" and [each["passed"] for each in answer["routing"]["tried"]] == [False]
        if whole:
            assert answer["choices"] == alone["choices"]
            assert answer["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
        else:
            assert answer["choices"][0]["finish_reason"] == "length"
            assert 16 <= answer["usage"]["completion_tokens"] < alone["usage"]["completion_tokens"]


def test_a_model_that_begins_too_late_is_not_the_one_that_answers(
    http: httpx.Client, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, open_ = http.post(CHAT, json={**ASK, "model": "small"}).json(), ServedModel.open

    async def late(served: ServedModel, *args: Any, **options: Any) -> Any:
        seq = await open_(served, *args, **options)
        if served.name == "pebble":
            await asyncio.sleep(DEADLINE_S)
        return seq

    monkeypatch.setattr(ServedModel, "open", late)
    gate(Confident(1.0))
    answer = http.post(CHAT, json={**ASK, "deadline_s": DEADLINE_S}).json()
    assert answer["model"] == "small" and answer["choices"] == alone["choices"]
    refused = http.post(CHAT, json={**ASK, "model": "pebble", "deadline_s": DEADLINE_S})
    assert refused.status_code == 408 and refused.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize(("bar", "who"), [(0.0, "small"), (1.0, "pebble")])
def test_the_reply_is_that_of_the_model_which_answered(http: httpx.Client, gate: Any, bar: float, who: str) -> None:
    gate(Confident(bar))
    reply = http.post(CHAT, json=ASK)
    assert reply.status_code == 200, reply.text
    answer, alone = reply.json(), http.post(CHAT, json={**ASK, "model": who}).json()
    assert answer["model"] == who
    assert answer["choices"] == alone["choices"]
    routing = answer["routing"]
    assert routing["model"] == who and routing["escalated"] == (who == "pebble")
    assert [each["passed"] for each in routing["tried"]] == ([True] if who == "small" else [False, True])
    if who == "pebble":
        small, large = routing["tried"]
        assert "accepted: at least 1" in small["why"] and 0 < small["cost"] < small["tokens"]
        assert answer["usage"]["completion_tokens"] == small["tokens"] + alone["usage"]["completion_tokens"]
        assert large["tokens"] == alone["usage"]["completion_tokens"]
    streamed = chunks(http, CHAT, {**ASK, "stream_options": {"include_usage": True}})
    assert {chunk["model"] for chunk in streamed} == {who}
    message = answer["choices"][0]["message"]
    for field in ("content", "reasoning_content"):
        parts = [c["delta"].get(field) or "" for chunk in streamed for c in chunk["choices"]]
        assert "".join(parts) == (message.get(field) or "")
    assert streamed[-1]["choices"] == [] and streamed[-1]["routing"]["tried"][0]["model"] == "small"
    assert streamed[-2]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_responses_are_routed_too(http: httpx.Client, gate: Any) -> None:
    gate(Confident(1.0))
    body = {"model": "auto", "input": "Use 2, 3 and 4 to make 24.", "max_output_tokens": 60, "temperature": 0}
    answer = http.post(RESPONSES, json=body).json()
    assert answer["model"] == "pebble" and answer["routing"]["escalated"]
    assert http.get(f"{RESPONSES}/{answer['id']}").json() == answer
    events = chunks(http, RESPONSES, body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert (last["model"], last["output"][0]["content"]) == ("pebble", answer["output"][0]["content"])
    assert last["routing"]["tried"][0]["why"] == answer["routing"]["tried"][0]["why"]


@pytest.mark.parametrize(("bar", "who"), [(0.0, "small"), (1.0, "pebble")])
def test_a_run_tells_who_was_asked_and_why(http: httpx.Client, gate: Any, bar: float, who: str) -> None:
    gate(Confident(bar))
    chat = new_chat(http)
    log = log_of(http, begin(http, chat, "Use 2, 3 and 4 to make 24.", model="auto", max_tokens=60)["run_id"])
    kinds = [each["type"] for each in log]
    assert log[-1]["type"] == "run.completed", log[-1]
    tried = [each for each in log if each["type"] == "route.tried"]
    (answering,) = [each for each in log if each["type"] == "route.answering"]
    assert answering["model"] == who
    assert [each["model"] for each in tried] == (["small"] if who == "small" else ["small", "pebble"])
    assert bool(tried[0]["why"]) == (who == "pebble")
    assert kinds.index("route.answering") < kinds.index(
        "thinking.started" if "thinking.started" in kinds else kinds[-1]
    )
    assert log[-1]["usage"]["completion_tokens"] == sum(each["tokens"] for each in tried)
    said = next(each for each in read(http, chat)["messages"] if each["role"] == "assistant")
    assert said["content"] == next(each["text"] for each in log if each["type"] == "answer.done")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"n": 2}, "n"), (CHAT, {"strategy": "best_of_n"}, "strategy"),
        (CHAT, {"thinking": {"max_tokens": 1}}, "thinking.max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 40_000}]}, "messages"),
        (RESPONSES, {"tools": [{"type": "mcp", "server_label": "ponder", "require_approval": "never"}]}, "model"),
        ("/v1/completions", {"prompt": "x"}, "model"),
    ],
)  # fmt: skip
def test_what_auto_cannot_do_is_refused(http: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    base = {CHAT: ASK, RESPONSES: {"model": "auto", "input": "x"}}.get(path, {"model": "auto"})
    reply = http.post(path, json={**base, **fields})
    assert reply.status_code in (400, 404), reply.text
    assert reply.json()["error"]["param"] == param
    chat = new_chat(http)
    for more, field in (({"tools": "all"}, "tools"), ({"strategy": "tree"}, "strategy")):
        refused = http.post(f"/api/chats/{chat}/runs", json={"content": "x", "model": "auto", **more})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field


def test_a_budget_holds_for_whoever_answers(http: httpx.Client, gate: Any) -> None:
    gate(Confident(1.0))
    answer = http.post(CHAT, json={**ASK, "thinking": {"min_tokens": 10, "max_tokens": 20}, "max_tokens": 50}).json()
    small = answer["routing"]["tried"][0]["tokens"]
    thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"] - small
    assert answer["model"] == "pebble" and 10 <= thought <= 20


def test_leaving_ends_what_both_models_write(both: Server, http: httpx.Client, gate: Any) -> None:
    gate(Confident(1.0))
    body = {**ASK, "max_tokens": 2000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=body, timeout=0.5)
    all_is_back(both)
