"""Tests how much is thought, by which strategy, and what of it is seen: over HTTP, on all three APIs that answer a
chat.

The tiny model thinks in capitals and answers in small letters, so that nothing can be mistaken for the other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from app.answering.reasoning_config import ReasoningResolver
from app.config import BadSetting, Settings
from app.server import create_app
from reasoning.strategies import Strategies
from reasoning.strategy import Context, Event, Options, strategy
from reasoning.thinking import Piece
from tests.app.chatting import ask, begin, log_of, new_chat, read
from tests.app.conftest import Server, serving

pytestmark = pytest.mark.slow

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
THINKING = {"enable_thinking": True}


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, **fields}
    reply = http.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def streamed(http: httpx.Client, **fields: Any) -> tuple[str, str, dict[str, Any]]:
    """Thinking, content and usage."""
    body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, **fields}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [json.loads(line[6:]) for line in http.post(CHAT, json=body).text.splitlines() if line[:7] == "data: {"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    thinking = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return thinking, "".join(delta.get("content") or "" for delta in deltas), chunks[-1]["usage"]


def thought(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["completion_tokens_details"]["reasoning_tokens"])


def test_budgets_are_exact_over_http(http: httpx.Client, nothing_lost: None) -> None:
    rng = Random(5)
    for _ in range(25):
        most = rng.randint(12, 120)
        budget = {"min_tokens": rng.randint(0, most), "max_tokens": most, "waits": rng.randint(0, 2)}
        fields = {"thinking": budget, "seed": rng.getrandbits(30), "chat_template_kwargs": THINKING}
        if rng.random() < 0.3:
            fields["response_format"] = {"type": "json_object"}
        answer = chat(http, **fields)
        message = answer["choices"][0]["message"]
        assert max(budget["min_tokens"], 2) <= thought(answer) <= most, budget
        assert not any(letter.isupper() for letter in message["content"])
        assert message["reasoning_content"].count("Wait") <= budget["waits"]
        thinking, content, usage = streamed(http, **fields)
        assert (thinking, content) == (message["reasoning_content"], message["content"])
        # What is said of the cache may differ: the second time the prompt was seen before.
        assert usage["completion_tokens_details"] == answer["usage"]["completion_tokens_details"]


def test_waits_are_written_where_the_thinking_would_end(http: httpx.Client) -> None:
    fields = {"temperature": 0, "chat_template_kwargs": THINKING, "max_tokens": 1000}
    waited = chat(http, thinking={"waits": 3, "wait_text": "9K"}, **fields)
    plain = chat(http, **fields)
    text, before = (a["choices"][0]["message"]["reasoning_content"] for a in (waited, plain))
    assert text.count("9K") == 3
    assert text.startswith(before + "9K")
    assert thought(waited) > thought(plain)


@pytest.mark.parametrize("template", [{}, {"enable_thinking": False}, {"open_thinking": True}])
def test_no_effort_is_no_thinking_whatever_the_template_does(http: httpx.Client, template: dict[str, bool]) -> None:
    answer = chat(http, reasoning_effort="none", chat_template_kwargs=template)
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert thought(answer) == 0
    assert not any(letter.isupper() for letter in answer["choices"][0]["message"]["content"])


def test_an_effort_is_what_the_configuration_says(model: Path, tmp_path: Path) -> None:
    efforts = {"low": {"max_tokens": 7}, "high": {"min_tokens": 40}}
    with serving(model, tmp_path, efforts=efforts) as server, httpx.Client(base_url=server.url) as http:
        low = chat(http, reasoning_effort="low")
        high = chat(http, reasoning_effort="high")
        assert thought(low) <= 7 and thought(high) >= 40
        shown = http.get("/api/strategies").json()["efforts"]
        assert shown["low"]["max_tokens"] == 7 and shown["medium"]["max_tokens"] == 2048
        assert shown["xhigh"]["max_tokens"] == http.get("/api/server").json()["max_model_len"]
        reply = http.post(RESPONSES, json={"model": "default", "input": "hello", "reasoning": {"effort": "high"}})
        assert reply.json()["usage"]["output_tokens_details"]["reasoning_tokens"] >= 40
        assert reply.json()["reasoning"] == {"effort": "high", "summary": None}
        message = ask(http, new_chat(http), "hello", reasoning_effort="high", max_tokens=100)
        assert message["usage"]["reasoning_tokens"] >= 40


def test_a_model_that_does_not_think_says_so(no_thinker: Server) -> None:
    with httpx.Client(base_url=no_thinker.url) as http:
        body = {"model": "default", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        for fields, param in (
            ({"reasoning_effort": "low"}, "reasoning_effort"),
            ({"thinking": {"max_tokens": 9}}, "thinking"),
            ({"strategy": "budget"}, "strategy"),
        ):
            reply = http.post(CHAT, json=body | fields)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == param
            assert "does not think" in reply.json()["error"]["message"]
        assert http.post(CHAT, json=body | {"reasoning_effort": "none"}).status_code == 200


@pytest.fixture(scope="module")
def no_thinker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model under a tokenizer that spells its markers otherwise."""
    copy = tmp_path_factory.mktemp("models") / "plain"
    copy.mkdir()
    for file in model.iterdir():
        text = file.read_bytes()
        if file.suffix == ".json":
            text = text.replace(b"<think>", b"<thunk>").replace(b"</think>", b"</thunk>")
        (copy / file.name).write_bytes(text)
    with serving(copy, tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("best_of_n", {"n": 3}), ("self_consistency", {"n": 3, "compare": "text"}), ("beam", {"width": 2}),
        ("tree", {"beam": 2, "depth": 2, "samples": 2, "step_tokens": 8}),
        ("budget", {"max_tokens": 20}),
    ],
)  # fmt: skip
def test_strategies_answer_and_count_what_they_spend(
    http: httpx.Client, name: str, options: dict[str, Any], nothing_lost: None
) -> None:
    fields = {"strategy": name, "strategy_options": options, "seed": 3, "max_tokens": 40}
    answer = chat(http, **fields)
    (choice,) = answer["choices"]
    details = answer["usage"]["completion_tokens_details"]
    assert choice["finish_reason"] in ("stop", "length")
    assert "<" not in choice["message"]["content"]
    if name in ("best_of_n", "tree"):  # what nobody sees was written too
        assert details["reasoning_tokens"] > 0
        assert answer["usage"]["completion_tokens"] > 40 or name == "best_of_n"
    said = streamed(http, **fields)[1]
    assert said == choice["message"]["content"]
    body = {"model": "default", "input": "hello", "strategy": name, "strategy_options": options, "seed": 3}
    reply = http.post(RESPONSES, json=body | {"max_output_tokens": 40})
    assert reply.status_code == 200, reply.text


def test_a_strategy_makes_calls_that_are_held_to_their_schemas(pebble_http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "count", "parameters": schema, "strict": True}}
    fields = {"tools": [tool], "tool_choice": "required", "strategy": "best_of_n", "strategy_options": {"n": 2}}
    answer = chat(pebble_http, max_tokens=300, **fields)
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert calls and all(isinstance(json.loads(c["function"]["arguments"])["a"], int) for c in calls)
    reply = pebble_http.post(
        CHAT,
        json={"model": "default", "messages": [{"role": "user", "content": "x"}], **fields, "strategy": "tree"}
        | {"strategy_options": {}},
    )
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools"


def test_a_run_tells_its_budget_and_marks_its_waits(http: httpx.Client) -> None:
    budget = {"waits": 2, "max_tokens": 400}
    log = log_of(http, begin(http, new_chat(http), "hello", thinking=budget, max_tokens=800)["run_id"])
    (started,) = [e for e in log if e["type"] == "thinking.started"]
    assert (started["max_tokens"], started["waits"]) == (400, 2)
    assert [(e["number"], e["of"]) for e in log if e["type"] == "thinking.wait"] == [(1, 2), (2, 2)]
    text = "".join(e["text"] for e in log if e["type"] == "thinking.delta")
    assert text.count("Wait") == 2
    at = next(i for i, e in enumerate(log) if e["type"] == "thinking.wait")
    before = "".join(e["text"] for e in log[:at] if e["type"] == "thinking.delta")
    assert text.startswith(before + "Wait")
    done = [e for e in log if e["type"] == "thinking.done"]
    assert sum(e["tokens"] for e in done) == log[-1]["usage"]["reasoning_tokens"] <= 400


def test_a_run_tells_its_search_as_it_grows(http: httpx.Client, nothing_lost: None) -> None:
    options = {"beam": 2, "depth": 2, "samples": 2, "step_tokens": 8}
    fields = {"strategy": "tree", "strategy_options": options, "max_tokens": 30}
    chat_id = new_chat(http)
    log = log_of(http, begin(http, chat_id, "hello", **fields)["run_id"])
    nodes = {e["node"]: e for e in log if e["type"] == "search.node"}
    assert any(e["text"] for e in nodes.values())
    assert nodes[0]["parent"] is None and len(nodes) > 2
    assert all(e["parent"] in nodes for e in nodes.values() if e["node"])
    (done,) = [e for e in log if e["type"] == "search.done"]
    chosen = [e["node"] for e in log if e["type"] == "search.select"]
    assert chosen[0] == 0 and chosen[-1] == done["node"] and done["nodes"] == len(nodes)
    assert all(nodes[child]["parent"] == parent for parent, child in pairwise(chosen))
    assert {e["node"] for e in log if e["type"] == "search.score"} <= set(nodes)
    assert log[-1]["type"] == "run.completed"
    assert log[-1]["usage"]["completion_tokens"] >= done["written"]
    said = next(m for m in read(http, chat_id)["messages"] if m["role"] == "assistant")
    assert said["content"] == next(e["text"] for e in log if e["type"] == "answer.done")


def test_a_run_tells_its_candidates(http: httpx.Client) -> None:
    fields = {"strategy": "best_of_n", "strategy_options": {"n": 3}, "max_tokens": 30}
    log = log_of(http, begin(http, new_chat(http), "hello", **fields)["run_id"])
    done = [e for e in log if e["type"] == "candidate.done"]
    (chosen,) = [e for e in log if e["type"] == "candidate.chosen"]
    assert sorted(e["index"] for e in done) == [0, 1, 2]
    best = next(e for e in done if e["index"] == chosen["index"])
    assert best["text"] == next(e["text"] for e in log if e["type"] == "answer.done")
    assert best["score"] == chosen["score"]


class Nothing(Options):
    pass


class Noticed(Event):
    pass


@dataclass(frozen=True)
class Odd(Event):
    held: object


@strategy("raises", Nothing)
async def raises(seq: Any, context: Context, options: Nothing) -> Any:
    """Fails."""
    seq.fork(3)
    raise RuntimeError("no luck")
    yield


@strategy("endless", Nothing)
async def endless(seq: Any, context: Context, options: Nothing) -> Any:
    """Tells things for ever."""
    while True:
        seq.fork(1)
        yield Noticed()


@strategy("brief", Nothing)
async def brief(seq: Any, context: Context, options: Nothing) -> Any:
    """Says one thing."""
    yield Noticed()
    yield Odd("x")
    for held in ("x" * 20_000, threading.Lock(), float("nan"), b"x"):
        yield Odd(held)
    tokens = tuple(context.tokenizer.encode("ok"))
    seq.append(tokens)
    yield Piece("answer", "ok", len(tokens), tokens, finish_reason="stop")


@pytest.fixture
def with_plugins(server: Server) -> Iterator[None]:
    state = server.app.state.ponder
    before = state.reasoning_resolver
    offered = Strategies()
    for each in (raises, endless, brief):
        offered.add(each, "plugin")
    state.reasoning_resolver = ReasoningResolver(offered, seconds=0.3)
    yield
    state.reasoning_resolver = before


def test_a_plugin_that_fails_or_never_ends_leaves_nothing(
    http: httpx.Client, with_plugins: None, nothing_lost: None
) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "a"}]}
    for name, code, word in (("raises", "strategy_error", "no luck"), ("endless", "strategy_timeout", "in time")):
        reply = http.post(CHAT, json=body | {"strategy": name})
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == code and word in reply.json()["error"]["message"]
        log = log_of(http, begin(http, new_chat(http), "hello", strategy=name)["run_id"])
        assert log[-1]["type"] == "run.failed" and log[-1]["code"] == code
    log = log_of(http, begin(http, new_chat(http), "hello", strategy="brief")["run_id"])
    assert {"type": "strategy.event", "name": "Noticed", "fields": {}}.items() <= log[2].items()
    odd = [e["fields"] for e in log if e["type"] == "strategy.event" and e["name"] == "Odd"]
    assert odd == [{"held": "x"}, {}, {}, {}, {}]  # what is too long or no JSON is told by its name alone
    assert next(e["text"] for e in log if e["type"] == "answer.done") == "ok"
    listed = {each["name"]: each for each in http.get("/api/strategies").json()["strategies"]}
    assert listed["brief"]["origin"] == "plugin" and listed["brief"]["about"] == "Says one thing."
    assert {"budget", "tree", "beam", "best_of_n", "self_consistency"} <= set(listed)
    assert "fallback" not in listed  # there are no fallback weights


def test_a_summary_of_thinking_is_written_in_the_cache_of_its_user(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = list[str]()
    with serving(model, tmp_path, thinking_text="summarised") as server, httpx.Client(base_url=server.url) as http:
        opened = server.engine.open

        async def open(*args: Any, tenant: str = "", **options: Any) -> Any:
            tenants.append(tenant)
            return await opened(*args, tenant=tenant, **options)

        monkeypatch.setattr(server.engine, "open", open)
        chat(http, temperature=0, chat_template_kwargs=THINKING)
    assert len(tenants) > 1 and set(tenants) == {"local"}


@pytest.mark.parametrize("policy", ["hidden", "summarised"])
def test_thinking_is_not_seen_where_the_server_says_so(model: Path, tmp_path: Path, policy: str) -> None:
    fields = {"temperature": 0, "chat_template_kwargs": THINKING}
    with serving(model, tmp_path, thinking_text=policy) as server, httpx.Client(base_url=server.url) as http:
        answer = chat(http, **fields)
        message = answer["choices"][0]["message"]
        assert thought(answer) > 2 and message["content"]
        seen = message.get("reasoning_content", "")
        if policy == "hidden":
            assert not seen
        else:  # it answers the question for a summary in small letters, as it answers everything
            assert seen and not any(letter.isupper() for letter in seen)
        assert streamed(http, **fields)[:2] == (seen, message["content"])
        reply = http.post(RESPONSES, json={"model": "default", "input": "hello", "reasoning": {"effort": "high"}})
        kinds = [item["type"] for item in reply.json()["output"]]
        assert kinds == (["message"] if policy == "hidden" else ["reasoning", "message"])
        chat_id = new_chat(http)
        begun = begin(http, chat_id, "hello", thinking=True, max_tokens=100)
        log = log_of(http, begun["run_id"])
        shown = "".join(e["text"] for e in log if e["type"] == "thinking.delta")
        assert not any(letter.isupper() for letter in shown) and bool(shown) == (policy == "summarised")
        done = [e for e in log if e["type"] == "thinking.done"]
        assert sum(e["tokens"] for e in done) == log[-1]["usage"]["reasoning_tokens"] > 2
        stored = next(m for m in read(http, chat_id)["messages"] if m["role"] == "assistant")
        assert (stored["thinking"] or "") == shown
        options = {"beam": 2, "depth": 2, "samples": 2, "step_tokens": 8}
        fields = {"strategy": "tree", "strategy_options": options, "thinking": True, "max_tokens": 60}
        grown = log_of(http, begin(http, new_chat(http), "hello", **fields)["run_id"])
        assert {e["text"] for e in grown if e["type"] == "search.node"} == {""}  # a step may be thinking
        refused = http.get(f"/api/runs/{begun['run_id']}/trace")
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "thinking_not_shown"


def test_a_summary_by_a_model_that_is_not_served_is_refused_at_the_start(server: Server, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, summary_model="nobody")
    with pytest.raises(BadSetting, match="nobody"):
        create_app(server.engine, settings)


def test_a_run_with_a_strategy_replays_to_the_same_tokens(pebble: Server, pebble_http: httpx.Client) -> None:
    from app.answering.served_model import ServedModel
    from app.runs.trace import Trace, replay

    for fields in (
        {"thinking": {"waits": 1, "max_tokens": 60}},
        {"reasoning_effort": "none"},
        {"strategy": "best_of_n", "strategy_options": {"n": 3}},
    ):
        begun = begin(pebble_http, new_chat(pebble_http), "What is 17 + 26?", max_tokens=120, **fields)
        log_of(pebble_http, begun["run_id"])
        text = pebble_http.get(f"/api/runs/{begun['run_id']}/trace").text
        trace = Trace.loads(text.partition("\n")[0])
        made = pebble.on_loop(replay(ServedModel(pebble.engine, "pebble"), trace, ReasoningResolver()))
        assert made.differs_at is None, fields
        assert made.tokens > 0
