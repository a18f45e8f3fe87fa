"""Remote servers that are slow, lie, drop, break their protocol, redirect or echo the key: nothing gets lost or out."""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.config import changed_settings
from tests.app.conftest import Server
from tests.app.remote.planted import (
    KEY,
    TEXT,
    Json,
    Planted,
    Reply,
    anthropic_events,
    chunk,
    planted_server,
    refuses,
    sends,
    speaks,
    usage,
)

Behaviour = Callable[[Reply], None]
CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
END = chunk({}, "stop")


def ask(http: httpx.Client, model: str = "big", **fields: Any) -> httpx.Response:
    return http.post(CHAT, json={"model": model, "messages": ASKED, **fields})


def error_of(reply: httpx.Response) -> Json:
    error: Json = reply.json()["error"]
    return error


def streamed(reply: httpx.Response) -> tuple[str, Json | None]:
    """The text of a stream, and its error."""
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    text = "".join(c["delta"].get("content") or "" for each in events for c in each.get("choices", ()))
    return text, next((each["error"] for each in events if "error" in each), None)


def waits(planted: Planted, before: tuple[object, ...], ping: bytes = b"") -> Behaviour:
    """Sends these events, and then nothing but pings, until the test is over."""

    def behave(reply: Reply) -> None:
        reply.begin()
        for each in before:
            reply.event(each)
        while not planted.go.wait(0.05):
            reply.send(ping)

    return behave


@pytest.mark.parametrize("ping", [b"", b": ping\n\n", b'data: {"type": "ping"}\n\n', b'data: {"choices": []}\n\n'])
def test_a_remote_that_says_nothing_is_given_up(http: httpx.Client, planted: Planted, ping: bytes) -> None:
    planted.does(waits(planted, (), ping))
    reply = ask(http, "hasty")
    assert reply.status_code == 504 and error_of(reply)["code"] == "remote_timeout"
    assert "sent nothing for 0.3 s" in error_of(reply)["message"] and len(planted.requests) == 1


def test_a_remote_that_stops_in_the_middle_keeps_what_came(http: httpx.Client, planted: Planted) -> None:
    planted.does(waits(planted, (chunk({"content": "Paris"}),)))
    text, error = streamed(ask(http, "hasty", stream=True))
    assert text == "Paris" and error is not None and error["code"] == "remote_timeout"
    assert error_of(ask(http, "hasty"))["code"] == "remote_timeout"


@pytest.mark.parametrize("events", [(), (chunk({"content": "Paris"}),), (chunk({"content": "Paris"}), b"[DONE]")])
def test_a_stream_without_its_end_is_no_answer(http: httpx.Client, planted: Planted, events: tuple[Any, ...]) -> None:
    planted.does(sends(*events))
    text, error = streamed(ask(http, stream=True))
    assert text == ("Paris" if events else "")
    code = error["code"] if error is not None else error_of(ask(http))["code"]
    assert code == "remote_dropped"


def test_a_connection_that_breaks_before_the_first_token_is_tried_again(http: httpx.Client, planted: Planted) -> None:
    def breaks(reply: Reply) -> None:
        reply.begin(content_length="1000")
        reply.send(b": hello\n\n")
        reply.connection.close()

    planted.does(breaks, speaks())
    assert ask(http).json()["choices"][0]["message"]["content"] == TEXT and len(planted.requests) == 2

    def breaks_later(reply: Reply) -> None:
        reply.begin(content_length="1000")
        reply.event(chunk({"content": "Paris"}))
        reply.connection.close()

    planted.does(breaks_later, speaks())
    text, error = streamed(ask(http, stream=True))
    assert text == "Paris" and error is not None and error["code"] == "remote_dropped" and len(planted.requests) == 1


BROKEN: dict[str, bytes] = {
    "no JSON": b"data: {'a': 1}\n\n", "no object": b"data: [1]\n\n", "NaN": b'data: {"choices": NaN}\n\n',
    "deep": b"data: " + b"[" * 5000 + b"]" * 5000 + b"\n\n", "half a pair": b'data: {"a": "\\ud800"}\n\n',
    "a long line": b"data: " + b"x" * (1 << 21), "long without an end": b"x" * (3 << 20),
    "many": (b": " + b"x" * 1000 + b"\n") * 17_000,
}  # fmt: skip


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_broken_stream_is_an_error_of_ours(http: httpx.Client, planted: Planted, data: bytes) -> None:
    def behave(reply: Reply) -> None:
        reply.begin()
        reply.send(data)

    planted.does(behave)
    reply = ask(http)
    assert reply.status_code == 502 and error_of(reply)["code"] == "remote_invalid", reply.text
    assert len(reply.text) < 1000 and len(planted.requests) == 1


STRANGE = [
    {"choices": "no"}, {"choices": [None]}, {"choices": [{"delta": "x"}]}, {"choices": [{"delta": {"content": 4}}]},
    {"choices": [{"delta": {"tool_calls": [None, {"index": "a"}, {"index": -1, "function": {}}]}}]},
    {"usage": "much"}, {"choices": [{"index": 0, "delta": {"role": "tool", "tool_call_id": "x"}}]}, {},
]  # fmt: skip


def test_events_of_another_shape_are_passed_over(http: httpx.Client, planted: Planted) -> None:
    planted.does(sends(*STRANGE, chunk({"content": TEXT}), END))
    assert ask(http).json()["choices"][0]["message"]["content"] == TEXT
    odd = [{"type": "content_block_start", "index": "x", "content_block": {"type": "tool_use"}}, {"type": 3}, *STRANGE]
    odd.append({"type": "content_block_start", "index": 5, "content_block": {"type": "tool_result", "content": "x"}})
    planted.does(sends(*odd, *anthropic_events((TEXT,))))
    assert ask(http, "claude").json()["choices"][0]["message"]["content"] == TEXT


def test_a_compressed_body_is_refused(http: httpx.Client, planted: Planted) -> None:
    def bomb(reply: Reply) -> None:
        reply.begin(content_encoding="gzip")
        reply.send(gzip.compress(b"data: " + b"x" * (1 << 24)))

    planted.does(bomb)
    assert error_of(ask(http))["code"] == "remote_invalid"


def test_redirects_are_not_followed(http: httpx.Client, planted: Planted) -> None:
    with planted_server() as elsewhere:
        for status in (301, 302, 307, 308):
            planted.does(refuses(status, "", location=f"{elsewhere.url}/v1/chat/completions"))
            assert error_of(ask(http))["code"] == "remote_redirected"
        assert not elsewhere.requests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "code", "ours", "requests"),
    [
        (400, "remote_refused", 502, 1), (401, "remote_unauthorized", 502, 1), (404, "remote_refused", 502, 1),
        (429, "remote_rate_limited", 429, 3), (500, "remote_failed", 502, 3), (503, "remote_overloaded", 503, 3),
    ],
)  # fmt: skip
def test_a_refusal_is_mapped_bounded_and_without_the_key(
    http: httpx.Client, planted: Planted, status: int, code: str, ours: int, requests: int
) -> None:
    planted.does(refuses(status, f"Bad request with the header Authorization: Bearer {KEY} " + "x" * 300_000))
    reply = ask(http)
    assert (reply.status_code, error_of(reply)["code"], len(planted.requests)) == (ours, code, requests)
    assert KEY not in reply.text and KEY[:12] not in reply.text and len(error_of(reply)["message"]) < 400
    assert "Bad request" in reply.text


@pytest.mark.slow
def test_a_passing_failure_is_retried_with_backoff(http: httpx.Client, planted: Planted) -> None:
    planted.does(refuses(500), refuses(429, retry_after="1"), speaks())
    began = time.monotonic()
    assert ask(http).status_code == 200 and len(planted.requests) == 3
    assert time.monotonic() - began >= 1.2
    planted.does(refuses(429, retry_after="3000"))
    reply = ask(http)
    assert reply.status_code == 429 and reply.headers["retry-after"] == "3000" and len(planted.requests) == 1


def test_an_error_within_the_stream_ends_it(http: httpx.Client, planted: Planted) -> None:
    failing = {"error": {"message": f"overloaded, key {KEY}"}}
    planted.does(sends(chunk({"content": "Paris"}), failing))
    text, error = streamed(ask(http, stream=True))
    assert text == "Paris" and error is not None and error["code"] == "remote_failed" and KEY not in str(error)
    planted.does(sends({"type": "error", **failing}))
    assert error_of(ask(http, "claude"))["code"] == "remote_failed"
    for event in (chunk({}, "content_filter"), {"type": "message_delta", "delta": {"stop_reason": "refusal"}}):
        planted.does(sends(event))
        assert error_of(ask(http, "claude" if "type" in event else "big"))["code"] == "remote_filtered"


def test_a_server_that_is_not_there_is_unavailable(remotes: Server, http: httpx.Client) -> None:
    with planted_server() as gone:
        client = remotes.app.state.ponder.models.remotes["open"]
        there = client.settings
    client.settings = client.client._settings = there.model_copy(update={"url": f"{gone.url}/v1"})
    try:
        reply = ask(http, "open")
    finally:
        client.settings = client.client._settings = there
    assert reply.status_code == 503 and error_of(reply)["code"] == "remote_unavailable"


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("part", ["content", "reasoning_content"])
def test_an_answer_that_echoes_the_key_is_redacted(http: httpx.Client, planted: Planted, size: int, part: str) -> None:
    said = f"Your key is {KEY}, and sk-planted is its beginning. {KEY[:9]}"
    pieces = [said[at : at + size] for at in range(0, len(said), size)]
    planted.does(sends(*(chunk({part: piece}) for piece in pieces), END))
    message = ask(http).json()["choices"][0]["message"]
    assert message[part] == said.replace(KEY, "[redacted]")


def test_the_key_is_nowhere_in_logs_metrics_or_settings(
    remotes: Server, http: httpx.Client, planted: Planted, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        planted.does(speaks(KEY), refuses(401, KEY))
        ask(http), ask(http)
    remote = remotes.app.state.ponder.models.remotes["big"]
    shown = [caplog.text, repr(remote.settings), str(changed_settings(remotes.app.state.ponder.settings))]
    assert "sent to the remote model big: 1 messages, 30 characters" in caplog.text
    assert all(KEY not in each for each in (*shown, http.get("/metrics").text))
    assert ASKED[0]["content"] not in caplog.text


LIES = [(10**12, 10**12), (-4, -9), (0, 0), ("many", None), (True, 2.5)]


@pytest.mark.parametrize("claimed", LIES)
def test_usage_that_cannot_be_true_is_estimated(http: httpx.Client, planted: Planted, claimed: tuple[Any, Any]) -> None:
    planted.does(speaks("word " * 100, last=usage(*claimed)))
    counted = ask(http).json()["usage"]
    assert counted["completion_tokens"] == 125 and counted["prompt_tokens"] == 8


def test_a_client_that_leaves_ends_the_remotes_work(remotes: Server, http: httpx.Client, planted: Planted) -> None:
    planted.does(waits(planted, (chunk({"content": "Paris"}),), b": still here\n\n"))
    with http.stream("POST", CHAT, json={"model": "big", "messages": ASKED, "stream": True}) as reply:
        assert any("Pari" in line for line in reply.iter_lines())
    assert planted.left.wait(10)
    assert not remotes.app.state.ponder.models.remotes["big"].spending._reserved[0]


def test_a_deadline_ends_the_answer_as_it_is(http: httpx.Client, planted: Planted) -> None:
    planted.does(waits(planted, (chunk({"content": "Paris"}),)))
    choice = ask(http, deadline_s=0.5).json()["choices"][0]
    assert choice["message"]["content"] == "Paris" and choice["finish_reason"] == "length"
    planted.does(waits(planted, ()))
    assert ask(http, deadline_s=0.5).status_code == 408
