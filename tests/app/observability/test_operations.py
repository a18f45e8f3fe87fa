"""Tests what an operator sees: health, metrics, who is let in, and what a stream's bytes and headers are."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from app.config import LOCAL_USER, Settings
from app.db.run_store import Place
from app.db.store import Store
from app.middleware import CsrfGuard, is_loopback
from app.openai import event_stream
from app.openai.event_stream import EventStream
from app.server import create_app
from engine import Engine, EngineConfig, Span
from retrieval import Library
from tests.app.conftest import DTYPE, Server, all_is_back
from tests.retrieval.words import WordEmbedder

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def metrics(http: httpx.Client) -> dict[tuple[str, str], float]:
    """Samples by name and labels, as Prometheus' own parser reads them."""
    text = http.get("/metrics").text
    return {
        (s.name, ",".join(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_metrics_count_what_happens(http: httpx.Client, server: Server, nothing_lost: None) -> None:
    all_is_back(server)  # an answer that an earlier test left would be counted too
    before = metrics(http)
    http.post("/v1/chat/completions", json={**BODY, "ignore_eos": True})
    http.post("/v1/chat/completions", json={**BODY, "temperature": -1})
    after = metrics(http)

    def grown(name: str, labels: str = "") -> float:
        return after[name, labels] - before.get((name, labels), 0)

    assert grown("ponder_generation_tokens_total") == 4
    assert grown("ponder_time_to_first_token_seconds_count", "endpoint=chat") == 1
    assert grown("ponder_inter_token_latency_seconds_count", "endpoint=chat") == 3
    assert grown("ponder_requests_total", "endpoint=chat,outcome=completed") == 1
    assert grown("ponder_request_duration_seconds_count", "endpoint=chat") == 1
    assert after["ponder_requests_running", ""] == 0 and after["ponder_requests_in_flight", ""] == 0
    blocks = [after["ponder_kv_blocks", f"state={state}"] for state in ("used", "cached", "free")]
    assert blocks[0] == 0 and sum(blocks) == 600
    assert grown("ponder_slo_requests_total", "endpoint=chat,result=met") == 1
    assert [after["ponder_kv_blocks", f"state=adapter_{use}"] for use in ("pinned", "used", "idle")] == [0, 0, 0]
    sizes = [after["ponder_kv_bytes", f"state={state}"] for state in ("used", "cached", "free")]
    number_bytes = getattr(torch, DTYPE).itemsize
    assert sum(sizes) == 600 * 16 * 2 * 1 * 16 * number_bytes  # blocks of 16 tokens; K and V of one layer and head
    assert after["ponder_backlog_answers", ""] == 0 and after["ponder_expected_wait_seconds", ""] == 0
    assert after["process_resident_memory_bytes", ""] > 1 << 20 and after["process_open_fds", ""] > 0
    assert ("ponder_cost_per_million_tokens", "") not in after, "no price is known"
    for name in ("prompt_tokens", "prefix_cache_query_tokens", "prefix_cache_hit_tokens", "preemptions"):
        assert (f"ponder_{name}_total", "") in after


async def test_goodput_is_what_came_in_time_and_a_price_makes_a_cost(model: Path, tmp_path: Path) -> None:
    settings = Settings(model=str(model), data_dir=tmp_path, slo_ttft_ms=1e-6, price_per_hour=3.6, power_watts=360)
    async with await Engine.start(EngineConfig(model=str(model), device="cpu", dtype="float32")) as engine:
        app = create_app(engine, settings)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
        ):
            for _ in range(2):
                assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
            text = (await http.get("/metrics")).text
            energy = app.state.ponder.meter.energy()
    assert 'ponder_slo_requests_total{endpoint="chat",result="missed"} 2.0' in text
    (cost,) = [line for line in text.splitlines() if line.startswith("ponder_cost_per_million_tokens ")]
    assert float(cost.split()[1]) > 0
    assert (energy["watts"], energy["source"]) == (360, "power_watts")
    # 3.6 an hour and 360 W: a tenth of a watt-hour for each unit, and a thousandth of the tokens.
    assert energy["wh_per_thousand_tokens"] == pytest.approx(float(cost.split()[1]) / 10, rel=0.3)


async def test_no_users_words_are_labels(http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json={**BODY, "model": "label-bomb", "user": "label-bomb"})
    http.post("/v1/label-bomb", headers={"X-Request-ID": "label-bomb", "User-Agent": "label-bomb"})
    assert "label-bomb" not in http.get("/metrics").text


def test_a_stream_is_not_buffered_on_its_way(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-cache, no-transform"
        assert reply.headers["x-accel-buffering"] == "no"
        events = [event for event in reply.read().split(b"\n\n") if event != b": ping"]
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        assert json.loads(event.removeprefix(b"data: "))["object"] == "chat.completion.chunk"


async def test_pauses_are_bridged_by_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "PING_S", 0.01)
    pinged = asyncio.Event()
    sent: list[dict[str, Any]] = []

    async def slow() -> AsyncGenerator[bytes, None]:
        await pinged.wait()
        yield b"data: 1\n\n"

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body") == b": ping\n\n":
            pinged.set()

    async def receive() -> Any:
        await asyncio.Event().wait()

    await EventStream(slow())({"type": "http"}, receive, send)
    bodies = [m.get("body") for m in sent]
    assert sent[0]["type"] == "http.response.start" and b"content-length" not in dict(sent[0]["headers"])
    assert bodies[1] == b": ping\n\n" and bodies[-3:] == [b"data: 1\n\n", b"data: [DONE]\n\n", b""]


@pytest.mark.parametrize(
    ("host", "let_in"),
    [
        ("127.0.0.1:80", True), ("localhost", True), ("[::1]:8000", True), ("127.9.9.9", True), ("a.localhost", True),
        ("evil.example", False), ("127.0.0.1.evil.example", False), ("10.0.0.1", False), ("", False), ("[", False),
    ],
)  # fmt: skip
def test_a_loopback_server_answers_to_loopback_names_alone(http: httpx.Client, host: str, let_in: bool) -> None:
    assert http.get("/health", headers={"Host": host}).status_code == (200 if let_in else 403)


def test_another_origins_page_cannot_change_anything(http: httpx.Client, server: Server) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert http.post("/api/chats", headers={"Origin": origin}).status_code == 403
    assert http.post("/api/chats", headers={"Origin": server.url}).status_code == 201
    reply = http.get("/v1/models", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in reply.headers


async def test_what_the_operator_lists_is_let_in(model: Path, tmp_path: Path) -> None:
    settings = Settings(
        model=str(model), data_dir=tmp_path, cors_origins=("https://a.example",), allowed_hosts=("chat.example",),
        served_model_name="mine",
    )  # fmt: skip
    async with await Engine.start(EngineConfig(model=str(model), device="cpu", kv_blocks=300)) as engine:
        transport = httpx.ASGITransport(create_app(engine, settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://chat.example") as http:
            headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
            reply = await http.options("/v1/chat/completions", headers=headers)
            assert reply.headers["access-control-allow-origin"] == "https://a.example"
            body = {**BODY, "model": "mine"}
            reply = await http.post("/v1/chat/completions", json=body, headers={"Origin": "https://a.example"})
            assert reply.status_code == 200 and reply.json()["model"] == "mine"
            assert (await http.get("/health", headers={"Host": "other.example"})).status_code == 403
            await engine.stop()
            health = await http.get("/health")
            assert health.status_code == 503
            stopped = await http.post("/v1/chat/completions", json=body)
            assert stopped.status_code == 503 and stopped.json()["error"]["code"] == "engine_stopped"
            assert (await http.get("/metrics")).status_code == 503


async def test_a_full_queue_answers_429_and_when_to_come_back(model: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(model), device="cpu", kv_blocks=300, max_running=1, max_waiting=1)
    async with await Engine.start(config) as engine:
        app = create_app(engine, Settings(model=str(model), data_dir=tmp_path))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            prompt = engine.tokenizer.encode("0")
            others = [await engine.open(prompt) for _ in range(2)]
            streams = [seq.generate(Span(max_tokens=1900)) for seq in others]
            for body in (BODY, {**BODY, "stream": True}):
                reply = await http.post("/v1/chat/completions", json=body)
                assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
                assert reply.json()["error"]["code"] == "queue_full"
            for running in streams:
                running.close()
            assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200


async def test_a_start_ends_the_runs_that_an_earlier_server_left(model: Path, tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    chat = await store.chats.create(LOCAL_USER)
    await store.runs.begin(LOCAL_USER, chat["id"], "run_1", Place("question", at_leaf=True), {})
    await store.close()
    async with await Engine.start(EngineConfig(model=str(model), device="cpu", kv_blocks=300)) as engine:
        app = create_app(engine, Settings(model=str(model), data_dir=tmp_path))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
        ):
            log = (await http.get("/api/runs/run_1/events")).text
            assert "event: run.failed" in log and "server_restarted" in log
            stored = (await http.get(f"/api/chats/{chat['id']}")).json()
            assert stored["active_run_id"] is None and stored["messages"][1]["status"] == "failed"
            again = await http.post(f"/api/chats/{chat['id']}/runs", json={"content": "again"})
            assert again.status_code == 202


async def test_a_closed_data_directory_is_free_though_a_child_has_copies_of_its_locks(tmp_path: Path) -> None:
    """A child that another thread starts has them between its fork and its exec."""
    store = await Store.open(tmp_path)
    library = Library.open(tmp_path / "documents", WordEmbedder())
    locks = [int(each.name) for each in list(Path("/proc/self/fd").iterdir()) if _is_lock(each, tmp_path)]
    assert len(locks) == 2
    copies = [os.dup(lock) for lock in locks]
    try:
        library.close()
        await store.close()
        Library.open(tmp_path / "documents", WordEmbedder()).close()
        await (await Store.open(tmp_path)).close()
    finally:
        for copy in copies:
            os.close(copy)


def _is_lock(descriptor: Path, folder: Path) -> bool:
    try:
        target = descriptor.readlink()
    except OSError:  # that of the listing itself
        return False
    return target.name == "lock" and target.is_relative_to(folder)


def test_bound_to_the_network_any_name_will_do_unless_names_are_listed() -> None:
    assert not CsrfGuard(None, bound="0.0.0.0", allowed_hosts=(), cors_origins=()).check_host  # type: ignore[arg-type]  # unused
    assert CsrfGuard(None, bound="0.0.0.0", allowed_hosts=("a",), cors_origins=()).check_host  # type: ignore[arg-type]  # unused
    assert is_loopback("::1") and not is_loopback("localhost.evil.example")


async def test_stopping_the_server_ends_its_runs_and_their_readers(model: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(model), device="cpu", kv_blocks=300, max_running=1)
    settings = Settings(model=str(model), data_dir=tmp_path)
    async with await Engine.start(config) as engine:
        app = create_app(engine, settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            async with app.router.lifespan_context(app):
                held = await engine.open(engine.tokenizer.encode("0"))  # the only place: the run waits behind it
                with held.generate(Span(max_tokens=1900)):
                    chat = (await http.post("/api/chats")).json()["id"]
                    run = (await http.post(f"/api/chats/{chat}/runs", json={"content": "x"})).json()["run_id"]
                    reader = asyncio.create_task(http.get(f"/api/runs/{run}/events"))
                    await app.state.ponder.runs.stop()
                    log = (await reader).text
                    assert log.count("event: run.failed") == 1 and "server_stopping" in log
                    refused = await http.post(f"/api/chats/{chat}/runs", json={"content": "x"})
                    assert refused.status_code == 503
            async with create_app(engine, settings).router.lifespan_context(app):
                pass
    store = await Store.open(tmp_path)
    assert (await store.chats.whole(LOCAL_USER, chat))[1][1]["status"] == "failed"
    await store.close()
