"""`ponder serve` with Redis: processes of two servers that count together, and one that stops while it is read."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.app.chatting import begin, new_chat
from tests.app.cli.test_cli import ponder, serving
from tests.app.cluster.redis_server import RedisServer
from tests.app.conftest import PEBBLE
from tests.app.wire.test_api_workers import metrics

pytestmark = pytest.mark.slow


def test_two_servers_of_two_processes_count_together(tmp_path: Path, schema: str, redis: RedisServer) -> None:
    shared = ("--database", schema, "--redis", redis.address, "--requests-per-minute", "4")
    flags = ("--model", str(PEBBLE), "--engine", "process", "--tool-selection", "model", *shared)
    with ExitStack() as closing:
        started = [
            closing.enter_context(serving(*flags, *more, "--data-dir", name, cwd=tmp_path))
            for name, more in (("a", ("--api-workers", "2")), ("b", ()))
        ]
        (_, first), (second_process, second) = started
        assert metrics(first)["ponder_api_workers"] == 2, "the worker did not start"
        with httpx.Client(base_url=first, timeout=60) as http:
            chat = new_chat(http)
            run = begin(http, chat, "Use 3, 5, 7 and 9 to make 24.", thinking={"min_tokens": 2000}, max_tokens=3000)
            with httpx.stream("GET", f"{second}/api/runs/{run['run_id']}/events", timeout=60) as reply:
                lines = reply.iter_lines()
                assert any(line.startswith("event: thinking.delta") for line in lines)
                second_process.send_signal(signal.SIGTERM)
                left = [line for line in lines if line.startswith("event:")]
            assert second_process.wait(30) == 0 and "event: run.completed" not in left
            assert http.get(f"/api/runs/{run['run_id']}").json()["status"] == "running", "it is not the server's"
            http.post(f"/api/runs/{run['run_id']}/cancel").raise_for_status()
        _, third = closing.enter_context(serving(*flags, "--data-dir", "b", cwd=tmp_path))
        body = {"model": "default", "prompt": "a", "max_tokens": 1}
        urls = (third, first, third, first)
        assert [httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code for url in urls] == [
            200, 200, 200, 429,
        ]  # fmt: skip


def test_a_redis_that_is_not_there_is_told_without_the_password(tmp_path: Path, schema: str) -> None:
    shown = ponder("serve", "--database", schema, "--redis", "redis://:hunter2@127.0.0.1:9/0", cwd=tmp_path)
    assert shown.returncode == 1 and "No Redis answers at the address of --redis" in shown.stderr
    assert "hunter2" not in shown.stderr + shown.stdout
    shown = ponder("serve", "--redis", "redis://localhost", cwd=tmp_path)
    assert shown.returncode == 2 and "database is not" in shown.stderr
