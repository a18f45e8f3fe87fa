"""Tests what an operator is told of a server, and changes in it, on the real engine."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import Settings, changed_settings
from app.observability.time_windows import BIN_S, BINS, SAMPLE, TimeWindows, WindowSample, percentiles
from engine import Stats
from tests.app import postgres
from tests.app.chatting import ask, begin, log_of, new_chat
from tests.app.conftest import NewDatabase, Server
from tests.app.keyed import asking_for_keys, client_of, key_of
from tests.app.library import error

DATABASES = postgres.DATABASES_SLOW

Json = dict[str, Any]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory, new_database: NewDatabase) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("keyed")
    with new_database() as address, asking_for_keys(model, data, database=address) as server:
        yield server


@pytest.fixture
def operator(keyed: Server) -> Iterator[httpx.Client]:
    with client_of(keyed, key_of(keyed, "local")) as client:
        yield client


def stats(http: httpx.Client) -> Json:
    reply = http.get("/api/operator/stats")
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_stats_tell_of_what_passed(operator: httpx.Client) -> None:
    before = stats(operator)["windows"][0]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi " * 30}], "max_tokens": 8, "ignore_eos": True}
    for _ in range(2):
        assert operator.post("/v1/chat/completions", json=body).status_code == 200
    error(operator.get("/api/chats/nope"), 404, "chat_not_found")
    told = stats(operator)
    minute, quarter = told["windows"]
    assert (minute["seconds"], quarter["seconds"]) == (60, 900)
    for window in (minute, quarter):
        for kind, least in (("ttft_s", 2), ("inter_token_s", 14), ("duration_s", 2)):
            count, *latencies = (window[kind][name] for name in ("count", "p50", "p95", "p99"))
            assert count >= least and 0 < latencies[0] <= latencies[1] <= latencies[2] < 30
        assert window["generated_tokens_per_s"] > 0 and window["prompt_tokens_per_s"] > 0
        assert 0 < window["prefix_hit_rate"] <= 1
    assert minute["requests"]["completed"] - before["requests"].get("completed", 0) == 2
    assert minute["errors"]["chat_not_found"] - before["errors"].get("chat_not_found", 0) == 1
    (served,) = told["models"]
    assert served["name"] == "tiny" and served["waiting"] == 0 and not served["stopped"]
    assert sum(served["blocks"].values()) == 600 and served["blocks"]["cached"] > 0
    assert told["memory_bytes"] > 10_000_000 and told["uptime_s"] > 0 and told["answering"] == 0
    points = told["series"]["points"]
    assert len(points) * told["series"]["step_s"] == BINS * BIN_S
    assert points[-1]["generated_tokens_per_s"] + points[-2]["generated_tokens_per_s"] > 0
    assert any(point["ttft_p50_s"] for point in points) and points[0]["ttft_p50_s"] is None
    assert told["settings"]["auth"] == "keys" and "port" not in told["settings"]
    assert served["bottleneck"]["limit"] == "idle" and told["cost_per_million_tokens"] is None
    (local,) = [user for user in operator.get("/api/operator/users").json()["users"] if user["id"] == "local"]
    written = 2 * (minute["generated_tokens_per_s"] > 0) * 8
    assert local["used"]["requests_today"] >= 2 and local["used"]["tokens_this_month"] >= written + 2 * 30


def test_runs_are_told_without_what_was_said(keyed: Server, operator: httpx.Client) -> None:
    with client_of(keyed, key_of(keyed, "alice")) as alice:
        made = ask(alice, new_chat(alice), "my secret question", max_tokens=5)
        failed = begin(alice, new_chat(alice), "x" * 2047)["run_id"]
        (*_, last) = log_of(alice, failed)
    told = operator.get("/api/operator/runs").json()
    assert "secret" not in json.dumps(told)
    assert made["content"] not in [value for each in told["runs"] for value in each.values()]
    newest, one = told["runs"][:2]
    assert (newest["id"], newest["status"], newest["error_code"]) == (failed, "failed", last["code"])
    assert (one["user"], one["model"], one["status"], one["error_code"]) == ("alice", "tiny", "completed", None)
    assert one["ended_at"] >= one["created_at"] and one["ttft_s"] > 0 and 0 < one["completion_tokens"] <= 5
    assert told["by_status"]["completed"] >= 1 and told["by_status"]["failed"] >= 1
    assert stats(operator)["windows"][0]["errors"][last["code"]] >= 1
    assert len(operator.get("/api/operator/runs?limit=1").json()["runs"]) == 1
    error(operator.get("/api/operator/runs?limit=0"), 400, "invalid_value", "limit")


def test_users_are_made_renamed_and_promoted(operator: httpx.Client) -> None:
    made = operator.post("/api/operator/users", json={"id": "mei", "name": "Mei 美"})
    assert made.status_code == 201 and (made.json()["name"], made.json()["role"]) == ("Mei 美", "user")
    error(operator.post("/api/operator/users", json={"id": "mei"}), 409, "id_taken", "id")
    changed = operator.patch("/api/operator/users/mei", json={"role": "operator"}).json()
    assert (changed["name"], changed["role"]) == ("Mei 美", "operator")
    assert "mei" in [each["id"] for each in operator.get("/api/operator/users").json()["users"]]
    error(operator.patch("/api/operator/users/nobody", json={"role": "user"}), 404, "user_not_found")
    error(operator.patch("/api/operator/users/local", json={"role": "user"}), 409, "own_role", "role")


def test_keys_are_made_told_once_and_revoked(keyed: Server, operator: httpx.Client) -> None:
    user = f"user-{next(_numbers)}"
    operator.post("/api/operator/users", json={"id": user})
    made = operator.post("/api/operator/keys", json={"user": user, "name": "laptop", "expires_s": 60})
    assert made.status_code == 201 and made.headers["cache-control"] == "no-store"
    key = made.json()
    with client_of(keyed, key["key"]) as client:
        assert client.get("/api/session").json()["user"]["id"] == user
        listed = operator.get("/api/operator/keys", params={"user": user}).json()["keys"]
        assert listed == [{**{n: v for n, v in key.items() if n != "key"}, "used_at": listed[0]["used_at"]}]
        assert listed[0]["used_at"] is not None and listed[0]["expires_at"] - listed[0]["created_at"] == 60
        assert key["key"] not in operator.get("/api/operator/keys").text
        revoked = operator.delete(f"/api/operator/keys/{key['id']}").json()
        assert revoked["state"] == "revoked" and not revoked["current"]
        assert client.get("/api/chats").status_code == 401
    assert operator.get("/api/operator/keys", params={"user": user}).json()["keys"][0]["state"] == "revoked"
    error(operator.delete("/api/operator/keys/nope"), 404, "key_not_found")


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "users", {}, "id"),
        ("POST", "users", {"id": "A B"}, "id"),
        ("POST", "users", {"id": "a\n"}, "id"),
        ("POST", "users", {"id": "ok", "name": "a\nb"}, "name"),
        ("POST", "users", {"id": "ok", "name": "  "}, "name"),
        ("POST", "users", {"id": "ok", "role": "root"}, "role"),
        ("PATCH", "users/local", {}, None),
        ("PATCH", "users/local", {"id": "x"}, "id"),
        ("POST", "keys", {}, "user"),
        ("POST", "keys", {"user": "nobody"}, "user"),
        ("POST", "keys", {"user": "local", "name": "\x07"}, "name"),
        ("POST", "keys", {"user": "local", "expires_s": 0}, "expires_s"),
        ("POST", "keys", {"user": "local", "expires_s": 1e12}, "expires_s"),
    ],
    ids=str,
)
def test_a_bad_body_is_told(operator: httpx.Client, method: str, path: str, body: Json, param: str | None) -> None:
    reply = operator.request(method, f"/api/operator/{path}", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_tools_are_told_with_who_may_use_them(keyed: Server, operator: httpx.Client) -> None:
    with client_of(keyed, key_of(keyed, "alice")) as alice:
        alice.put("/api/permissions", json={"classes": ["none", "read"]})
    told = operator.get("/api/operator/tools").json()
    assert {"name", "permission", "origin", "approval"} <= set(told["tools"][0])
    allowed = {each["user"]: each["classes"] for each in told["users"]}
    assert allowed["alice"] == ["none", "read"] and allowed["local"] == ["none", "read", "write", "network", "execute"]


def test_metrics_are_for_whoever_has_a_key(keyed: Server, operator: httpx.Client) -> None:
    assert httpx.get(f"{keyed.url}/metrics").status_code == 401
    with client_of(keyed, key_of(keyed, "scraper")) as scraper:
        assert "ponder_kv_blocks" in scraper.get("/metrics").text


def test_settings_are_told_without_secrets(tmp_path: Path) -> None:
    mcp = {"files": {"command": ("x",), "env": {"TOKEN": "hush"}}}
    settings = Settings(data_dir=tmp_path, mcp=mcp, searxng="https://me:hush@search.example", port=8000)
    told = changed_settings(settings)
    assert "hush" not in json.dumps(told)
    assert told == {"data_dir": str(tmp_path), "mcp": {"files": "…"}, "searxng": "https://…@search.example"}


def test_percentiles_are_those_of_all_that_passed() -> None:
    first, second = WindowSample(), WindowSample()
    for value in range(1, 101):
        (first if value <= 40 else second).add(float(value))
    assert percentiles([first, second]) == {"count": 100, "p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([WindowSample()]) is None
    busy = WindowSample()
    for value in range(40 * SAMPLE):
        busy.add(float(value))
    told = percentiles([busy, first])
    assert len(busy.values) == SAMPLE and told is not None and told["count"] == 40 * SAMPLE + 40
    assert abs(statistics.mean(busy.values) - 20 * SAMPLE) < 8 * SAMPLE, "the sample is not uniform"


def test_windows_slide_and_hold_no_more_than_a_quarter_of_an_hour() -> None:
    clock = [10_000.0]
    windows = TimeWindows(lambda: clock[0])
    windows.counted("a", Stats(blocks_total=10, blocks_used=5))
    for step in range(400):
        windows.observed("ttft", 1.0 if step < 380 else 3.0)
        windows.error("queue_full")
        windows.series()  # what is kept of one look must be right at the next
        clock[0] += BIN_S
    windows.counted("a", Stats(blocks_total=10, generated_tokens=1000, prefix_query_tokens=8, prefix_hit_tokens=6))
    minute, quarter = windows.window(60), windows.window(900)
    assert minute["ttft_s"]["p50"] == 3 and quarter["ttft_s"]["p50"] == 1 and quarter["ttft_s"]["p99"] == 3
    assert minute["errors"]["queue_full"] == 11 and quarter["errors"]["queue_full"] == BINS - 1
    points = windows.series()["points"]
    assert len(points) == 60 and points[0]["errors"] == 3 and sum(point["errors"] for point in points) >= BINS - 3
    clock[0] += 1000
    assert windows.window(900)["ttft_s"] is None and windows.window(900)["errors"] == {}
    assert all(point["ttft_p50_s"] is None and not point["errors"] for point in windows.series()["points"])


def test_tokens_are_counted_in_the_time_in_which_they_were_made() -> None:
    clock = [10_000.0]
    windows = TimeWindows(lambda: clock[0])
    windows.counted("a", Stats(blocks_total=4))
    for made in (100, 200, 300):
        windows.busy(1)
        clock[0] += BIN_S
        windows.counted("a", Stats(blocks_total=4, blocks_used=1, generated_tokens=made, prompt_tokens=made // 10))
    assert windows.window(60)["generated_tokens_per_s"] == 300 / (3 * BIN_S)
    assert windows.window(60)["prompt_tokens_per_s"] == 30 / (3 * BIN_S)
    point = max(windows.series()["points"], key=lambda point: point["generated_tokens_per_s"])
    assert point["blocks_share"] == 0.25 and point["in_flight"] == 1
