"""Tests what clients meet where the server limits them: a 429 of OpenAI's shape with a time, and less before
nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.app.chatting import begin, log_of, new_chat
from tests.app.conftest import Server, serving
from tests.app.keyed import asking_for_keys, client_of, key_of

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
FOREVER = {**ASK, "max_tokens": 2000, "stream": True, "chat_template_kwargs": {"forever": True}}


@pytest.fixture(scope="module")
def limited(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server where a key may do little."""
    limits = {"requests_per_minute": 6, "tokens_per_minute": 400}
    with asking_for_keys(model, tmp_path_factory.mktemp("limited"), **limits) as server:
        yield server


@pytest.fixture(scope="module")
def busy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that can be made to look as if many waited."""
    with serving(model, tmp_path_factory.mktemp("busy"), max_wait_s=30, reduced_thinking=6) as server:
        yield server


@pytest.fixture
def waiting(busy: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    def wait(seconds: float) -> None:
        for queue_estimate in busy.app.state.ponder.meter.queue_estimates.values():
            monkeypatch.setattr(queue_estimate, "wait_s", lambda: seconds)
            monkeypatch.setattr(type(queue_estimate), "__len__", lambda _: 1)

    return wait


def refused(reply: httpx.Response, code: str) -> tuple[str, int]:
    """The message, and after how many seconds to come again."""
    assert reply.status_code == 429, reply.text
    error = reply.json()["error"]
    assert error["code"] == code and error["type"] == "rate_limit_error"
    seconds = int(reply.headers["retry-after"])
    assert seconds >= 1 and f"Try again in {seconds} s." in error["message"]
    return str(error["message"]), seconds


def test_requests_are_counted_for_each_key_and_told(limited: Server) -> None:
    with client_of(limited, key_of(limited, "ana")) as ana, client_of(limited, key_of(limited, "bob")) as bob:
        for left in (5, 4, 3, 2, 1, 0):
            reply = ana.post(CHAT, json={**ASK, "max_tokens": 1})
            assert reply.status_code == 200
            assert reply.headers["x-ratelimit-limit-requests"] == "6"
            assert reply.headers["x-ratelimit-remaining-requests"] == str(left)
            assert reply.headers["x-ratelimit-reset-requests"] in ("59s", "1m0s")
        message, seconds = refused(ana.post("/v1/completions", json={}), "rate_limit_exceeded")
        assert "6 requests" in message and 50 < seconds <= 60
        assert ana.get("/v1/models").status_code == 200, "what costs nothing is not limited"
        assert bob.post(CHAT, json=ASK).status_code == 200


def test_a_refusal_does_not_wait_for_the_body(limited: Server) -> None:
    key = key_of(limited, "carl")
    with client_of(limited, key) as carl:
        while carl.post(CHAT, json={}).status_code != 429:
            pass
    address = urlsplit(limited.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as line:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: 9000000\r\n\r\n"
        )
        line.sendall(head.encode())
        assert line.recv(4096).startswith(b"HTTP/1.1 429")


def test_tokens_are_counted_read_and_written(limited: Server) -> None:
    with client_of(limited, key_of(limited, "dora")) as dora:
        reply = dora.post(CHAT, json={**ASK, "max_tokens": 100, "chat_template_kwargs": {"forever": True}})
        usage = reply.json()["usage"]["total_tokens"]
        assert 100 < usage < 200 and reply.headers["x-ratelimit-limit-tokens"] == "400"
        long = {**ASK, "messages": [{"role": "user", "content": "x" * (395 - usage)}]}
        message, _ = refused(dora.post(CHAT, json=long), "rate_limit_exceeded")
        assert "400 tokens in a minute" in message
        reply = dora.post(CHAT, json={**ASK, "messages": [{"role": "user", "content": "x" * 600}]})
        assert reply.status_code == 429 and reply.json()["error"]["code"] == "request_too_large"
        assert "retry-after" not in reply.headers, "it never fits"
        streamed = dora.post(CHAT, json={**long, "stream": True})
        assert streamed.status_code == 429, "a stream is refused with a status as well"


@pytest.mark.slow
def test_so_many_at_a_time_and_a_place_is_free_once_one_leaves(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, concurrent_requests=2) as server, httpx.Client(base_url=server.url) as http:
        log_of(http, begin(http, new_chat(http), "abc")["run_id"])  # a run counts until it has ended
        with ExitStack() as streams:
            lines = [streams.enter_context(http.stream("POST", CHAT, json=FOREVER)).iter_lines() for _ in range(2)]
            assert [next(each) for each in lines]
            message, _ = refused(http.post(CHAT, json=ASK), "concurrency_limit_exceeded")
            assert "2 requests under way" in message
        server.until(lambda stats: stats.sequences == 0)
        assert http.post(CHAT, json=ASK).status_code == 200


def test_the_official_client_understands_the_refusal(limited: Server) -> None:
    client = openai.OpenAI(base_url=f"{limited.url}/v1", api_key=key_of(limited, "finn"), max_retries=0)
    with pytest.raises(openai.RateLimitError) as error, client:
        for _ in range(7):
            client.completions.create(model="default", prompt="a", max_tokens=1)
    assert error.value.code == "rate_limit_exceeded"


def test_an_overloaded_server_refuses_all_that_costs(busy: Server, waiting: Any) -> None:
    with httpx.Client(base_url=busy.url, timeout=30) as http:
        chat, sequence = new_chat(http), http.post("/api/sequences", json={"prompt": "a"}).json()["id"]
        waiting(90.0)
        for path in (CHAT, "/v1/completions", "/v1/responses", f"/api/chats/{chat}/runs",
                     f"/api/sequences/{sequence}/generate"):  # fmt: skip
            message, seconds = refused(http.post(path, json={}), "overloaded")
            assert "90 s" in message and "at most 30 s" in message and seconds == 60
        assert http.get("/api/chats").status_code == 200 and http.get("/health").status_code == 200
        assert 'ponder_requests_rejected_total{reason="overload"} 5.0' in http.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_cut_before_anybody_is_refused_and_that_is_told(busy: Server, waiting: Any, stream: bool) -> None:
    thinking = {"thinking": {"max_tokens": 40, "min_tokens": 40}, "max_tokens": 80, "stream": stream}
    with httpx.Client(base_url=busy.url, timeout=30) as http:
        before = http.post(CHAT, json={**ASK, **thinking, "stream": False})
        assert before.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 40
        assert "x-ponder-reduced" not in before.headers
        waiting(10.0)
        options = {"stream_options": {"include_usage": True}} if stream else {}
        reply = http.post(CHAT, json={**ASK, **thinking, **options})
        assert reply.headers["x-ponder-reduced"] == 'thinking="6"'
        last = reply.text.split("data: ")[-2] if stream else reply.text
        assert json.loads(last)["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 6
        strict = http.post(CHAT, json={**ASK, **thinking, "stream": False}, headers={"Prefer": "handling=strict"})
        assert strict.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 40
        assert "x-ponder-reduced" not in strict.headers
        plain = http.post(CHAT, json={**ASK, "reasoning_effort": "none"})
        assert plain.status_code == 200 and "x-ponder-reduced" not in plain.headers, "there is nothing to cut"


def test_a_run_tells_that_it_thinks_less(busy: Server, waiting: Any) -> None:
    with httpx.Client(base_url=busy.url, timeout=30) as http:
        waiting(10.0)
        run = begin(http, new_chat(http), "abc", thinking={"min_tokens": 40, "max_tokens": 50}, max_tokens=80)["run_id"]
        events = {event["type"]: event for event in log_of(http, run)}
        assert events["run.reduced"] == {"type": "run.reduced", "thinking": 6, "models": None}
        assert events["thinking.started"]["max_tokens"] == 6 and events["thinking.done"]["tokens"] <= 6
        assert "run.completed" in events


def test_auto_asks_no_model_that_many_wait_for(both: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    queue_estimates = both.app.state.ponder.meter.queue_estimates
    monkeypatch.setattr(queue_estimates["pebble"], "wait_s", lambda: 20.0)
    ask = {"model": "auto", "messages": [{"role": "user", "content": "Use 2, 3 and 4 to make 24."}], "max_tokens": 8}
    with httpx.Client(base_url=both.url, timeout=60) as http:
        reply = http.post(CHAT, json=ask)
        assert reply.status_code == 200 and reply.json()["model"] == "small"
        assert reply.headers["x-ponder-reduced"] == 'models="small"'
        assert [each["model"] for each in reply.json()["routing"]["tried"]] == ["small"]
