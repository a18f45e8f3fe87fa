"""Runs over HTTP: a log that every reader sees whole, once, and that always ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from app.runs.events import TERMINAL
from engine import Span
from tests.app.conftest import Server

Event = tuple[int, str, dict[str, Any]]


def events(
    http: httpx.Client, run_id: str, after: int | str = 0, headers: dict[str, str] | None = None
) -> Iterator[Event]:
    with http.stream("GET", f"/api/runs/{run_id}/events?after={after}", headers=headers) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-cache, no-transform"
        assert reply.headers["x-accel-buffering"] == "no"
        seq, kind = 0, ""
        for line in reply.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                seq = int(value)
            elif name == "event":
                kind = value
            elif name == "data":
                data = json.loads(value)
                assert data["type"] == kind
                yield seq, kind, data


class BusyEngine:
    """Every place in the engine's batch taken while the `with` lasts: what comes then waits, and cannot end.

    Steps are slowed down too: else the batch may come to its end, or to the pool's, before a slow machine's test does.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._scope = AsyncExitStack()
        self._step = server.engine._core.step

    def _slow_step(self) -> None:
        time.sleep(0.01)
        self._step()

    async def _hold(self) -> None:
        engine = self._server.engine
        prompt = engine.tokenizer.encode("x")
        for _ in range(engine.config.max_running):
            seq = await self._scope.enter_async_context(await engine.open(prompt))
            self._scope.callback(seq.generate(Span(max_tokens=1500, ignore_eos=True)).close)

    def __enter__(self) -> None:
        setattr(self._server.engine._core, "step", self._slow_step)  # noqa: B010  # a method, to mypy
        self._server.on_loop(self._hold())
        most = self._server.engine.config.max_running
        self._server.until(lambda stats: stats.running == most)  # older sequences would still go before those that wait

    def __exit__(self, *_: object) -> None:
        setattr(self._server.engine._core, "step", self._step)  # noqa: B010
        self._server.on_loop(self._scope.aclose())


@pytest.fixture
def chat(http: httpx.Client) -> str:
    reply = http.post("/api/chats", json={})
    assert reply.status_code == 201
    return str(reply.json()["id"])


def start(http: httpx.Client, chat: str, content: str = "hello", **options: Any) -> str:
    reply = http.post(f"/api/chats/{chat}/runs", json={"content": content, **options})
    assert reply.status_code == 202, reply.text
    return str(reply.json()["run_id"])


def test_a_run_tells_its_story_in_order(http: httpx.Client, chat: str, nothing_lost: None) -> None:
    log = list(events(http, start(http, chat, thinking=True)))
    assert [seq for seq, _, _ in log] == list(range(1, len(log) + 1))
    kinds = [kind for _, kind, _ in log]
    assert kinds[:3] == ["run.queued", "run.started", "thinking.started"]
    assert kinds[-3:] == ["answer.done", "metrics", "run.completed"]
    assert log[1][2]["strategy"] is None and log[-2][2]["seconds"] > log[-2][2]["ttft_s"] > 0
    assert kinds.index("thinking.done") < kinds.index("answer.delta")
    thinking = "".join(d["text"] for _, k, d in log if k == "thinking.delta")
    answer = "".join(d["text"] for _, k, d in log if k == "answer.delta")
    assert thinking.isupper() and answer.islower()
    done = next(d for _, k, d in log if k == "answer.done")
    assert done["text"] == answer and done["finish_reason"] in ("stop", "length")
    usage = log[-1][2]["usage"]
    assert usage["completion_tokens"] > usage["reasoning_tokens"] > 0
    stored = http.get(f"/api/chats/{chat}").json()
    question, reply = stored["messages"]
    assert (question["role"], question["content"]) == ("user", "hello")
    assert (reply["content"], reply["thinking"], reply["status"]) == (answer, thinking, "completed")
    assert reply["usage"] == usage and reply["tokens_per_s"] > 0 and reply["thinking_s"] > 0
    assert stored["active_run_id"] is None and stored["title"] == "hello"


def test_a_long_prompt_tells_how_far_it_is_read(http: httpx.Client, chat: str) -> None:
    told = [data for _, _, data in events(http, start(http, chat, "x" * 1500, max_tokens=20))]
    read = [data for data in told if data["type"] == "prefill.progress"]
    assert read and all(0 <= data["cached"] < data["processed"] < data["total"] for data in read)
    kinds = [data["type"] for data in told]
    assert kinds.index("run.started") < kinds.index("prefill.progress") < kinds.index("answer.delta")


def test_a_reader_may_come_back_anywhere(http: httpx.Client, chat: str) -> None:
    run = start(http, chat, thinking=True)
    whole = list(events(http, run))
    for after in range(len(whole) + 1):
        assert list(events(http, run, after)) == whole[after:]
        assert list(events(http, run, headers={"Last-Event-ID": str(after)})) == whole[after:]
    # A browser reconnects to the address it first used, and says what it has seen in the header.
    assert list(events(http, run, 1, headers={"Last-Event-ID": "3"})) == whole[3:]


def test_two_readers_of_a_growing_log_see_the_same(http: httpx.Client, chat: str, server: Server) -> None:
    logs: list[list[Event]] = [[], []]
    reading = threading.Barrier(3)

    def read(log: list[Event]) -> None:
        with httpx.Client(base_url=server.url, timeout=30) as own:
            for event in events(own, run):
                if not log:
                    reading.wait(20)
                log.append(event)

    threads = [threading.Thread(target=read, args=(log,)) for log in logs]
    with BusyEngine(server):
        run = start(http, chat, thinking=True)
        for thread in threads:
            thread.start()
        reading.wait(20)
    for thread in threads:
        thread.join(30)
    assert logs[0] == logs[1] and logs[0][-1][1] in TERMINAL


def test_closing_the_page_does_not_stop_a_run(http: httpx.Client, chat: str) -> None:
    run = start(http, chat, thinking=True)
    for _ in events(http, run):
        break
    assert list(events(http, run))[-1][1] == "run.completed"


def test_cancel_ends_a_run(http: httpx.Client, chat: str, server: Server, nothing_lost: None) -> None:
    with BusyEngine(server):
        run = start(http, chat, "go on")
        assert http.post(f"/api/runs/{run}/cancel").status_code == 202
    log = list(events(http, run))
    assert log[-1][1] == "run.cancelled"
    assert sum(kind in TERMINAL for _, kind, _ in log) == 1
    assert http.post(f"/api/runs/{run}/cancel").status_code == 202  # again, and after the end
    assert list(events(http, run)) == log
    snapshot = http.get(f"/api/runs/{run}").json()
    assert snapshot["status"] == log[-1][1].removeprefix("run.") and snapshot["last_seq"] == log[-1][0]
    message = http.get(f"/api/chats/{chat}").json()["messages"][1]
    assert message["status"] == snapshot["status"] and message["content"] == snapshot["answer"]


def test_a_chat_makes_one_answer_at_a_time(http: httpx.Client, chat: str, server: Server) -> None:
    with BusyEngine(server):
        run = start(http, chat)
        assert http.get(f"/api/chats/{chat}").json()["active_run_id"] == run
        assert [each["id"] for each in http.get("/api/chats").json()["chats"] if each["running"]] == [chat]
        again = http.post(f"/api/chats/{chat}/runs", json={"content": "more"})
        assert again.status_code == 409 and again.json()["error"]["code"] == "chat_busy"
        assert http.get(f"/api/runs/{run}").json()["status"] == "running"
    list(events(http, run))
    assert not any(each["running"] for each in http.get("/api/chats").json()["chats"])
    start(http, chat, "more")


def test_a_conversation_goes_on_with_what_was_said(http: httpx.Client, chat: str) -> None:
    first = list(events(http, start(http, chat, "one")))[-1][2]["usage"]
    second = list(events(http, start(http, chat, "two")))[-1][2]["usage"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["completion_tokens"]
    assert second["cached_tokens"] > 0
    assert [m["role"] for m in http.get(f"/api/chats/{chat}").json()["messages"]] == ["user", "assistant"] * 2


def test_a_conversation_too_long_says_what_to_do(http: httpx.Client, chat: str) -> None:
    list(events(http, start(http, chat, "x" * 1500, max_tokens=1)))
    log = list(events(http, start(http, chat, "x" * 1500)))
    _, kind, data = log[-1]
    assert kind == "run.failed" and data["code"] == "context_length_exceeded" and not data["retryable"]
    assert "2048" in data["message"] and "new chat" in data["message"]
    assert http.get(f"/api/chats/{chat}").json()["messages"][3]["error"] == data["message"]


def test_a_question_too_long_for_the_model_is_not_taken(http: httpx.Client, chat: str) -> None:
    for text in ("x" * 3000, "語" * 1000):
        reply = http.post(f"/api/chats/{chat}/runs", json={"content": text})
        told = reply.json()["error"]
        assert (reply.status_code, told["param"], told["code"]) == (400, "content", "context_length_exceeded")
        assert "the prompt has 3000" in told["message"] and "at most 2047" in told["message"]
    assert http.get(f"/api/chats/{chat}").json()["messages"] == []


def test_chats_are_listed_newest_first_and_deleted_with_their_runs(http: httpx.Client, chat: str) -> None:
    other = http.post("/api/chats").json()["id"]
    run = start(http, chat)
    assert [c["id"] for c in http.get("/api/chats").json()["chats"]][:2] == [chat, other]
    assert http.delete(f"/api/chats/{chat}").status_code == 200
    assert http.get(f"/api/chats/{chat}").status_code == 404
    assert http.get(f"/api/runs/{run}/events").status_code == 404
    assert http.delete(f"/api/chats/{chat}").status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "content"), ({"content": ""}, "content"), ({"content": "  "}, "content"), ({"content": 3}, "content"),
        ({"content": "x", "temperature": 9}, "temperature"), ({"content": "x", "max_tokens": 0}, "max_tokens"),
        ({"content": "x", "thinking": "yes"}, "thinking"), ({"content": "x", "moddel": "y"}, "moddel"),
        ({"content": "x", "thinking": {"max_tokens": 1}}, "thinking.max_tokens"),
        ({"content": "x", "thinking": False, "reasoning_effort": "low"}, "reasoning_effort"),
        ({"content": "x", "strategy": "guess"}, "strategy"),
        ({"content": "x", "strategy_options": {}}, "strategy_options"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_question_is_refused_by_name(http: httpx.Client, chat: str, body: dict[str, Any], param: str) -> None:
    reply = http.post(f"/api/chats/{chat}/runs", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    assert http.get(f"/api/chats/{chat}").json()["messages"] == []


def test_what_is_not_there_is_404(http: httpx.Client, chat: str) -> None:
    assert http.post("/api/chats/nope/runs", json={"content": "x"}).status_code == 404
    for path in ("/api/runs/nope", "/api/runs/nope/events", "/api/chats/nope"):
        assert http.get(path).status_code == 404
    assert http.post("/api/runs/nope/cancel").status_code == 404
    run = start(http, chat)
    for query, param in (("after=-1", "after"), ("follow=no", "follow"), ("wait=1", "wait")):
        reply = http.get(f"/api/runs/{run}/events?{query}")
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_a_log_can_be_read_as_far_as_it_is(http: httpx.Client, server: Server, chat: str) -> None:
    with BusyEngine(server):
        run = start(http, chat)
        while not (there := list(events(http, run, after="0&follow=false"))):  # it begins after it was accepted
            pass
        assert there[-1][1] not in TERMINAL  # the run goes on, the response does not
    whole = list(events(http, run))
    assert whole[: len(there)] == there
    assert list(events(http, run, after=f"{whole[2][0]}&follow=false")) == whole[3:]


def test_the_page_learns_what_it_talks_to(http: httpx.Client) -> None:
    about = http.get("/api/server").json()
    assert about["model"] == "tiny" and about["max_model_len"] == 2048 and about["device"] == "cpu"
    assert about["about"] == "A table of transitions." and about["starters"] == ["Say something."]
