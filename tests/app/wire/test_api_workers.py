"""A server of several processes, as its clients see it: one server, whichever process answers, and whichever dies."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from app.db.account_store import Accounts
from app.db.quotas import Quota
from tests.app.cli.test_cli import FOREVER, ROOT, clean_environment, ponder, serving
from tests.app.wire.test_stopping import LONG, Reader, engine_of, running

pytestmark = pytest.mark.slow

SHORT = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
PLAIN = {"model": "default", "prompt": "hi", "max_tokens": 8, "temperature": 0}
FLAGS = ("--data-dir", "data", "--engine", "process", "--api-workers", "3")


def workers_of(server: int) -> list[psutil.Process]:
    return running(server, "app.workers.api_worker")


def holders(server: int, url: str) -> Counter[int]:
    """Connections to the server, by the process that has them."""
    port = urlsplit(url).port
    counts = Counter[int]()
    for process in [psutil.Process(server), *workers_of(server)]:
        for each in process.net_connections("tcp"):
            if each.laddr.port == port and each.status == "ESTABLISHED":
                counts[process.pid] += 1
    return counts


def spread_readers(url: str, server: int, body: dict[str, Any]) -> list[Reader]:
    """Streams of which each process has one."""
    readers = []
    for _ in range(60):
        readers.append(Reader(url, body))
        assert readers[-1].begun.wait(20)
        if len(holders(server, url)) == 3:
            return readers
    raise AssertionError(holders(server, url))


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def settled(url: str) -> dict[str, float]:
    """The metrics once nothing is under way."""
    deadline = time.monotonic() + 20
    while (found := metrics(url))["ponder_requests_in_flight"] or found["ponder_sequences_open"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with serving("--model", str(model), *FLAGS, cwd=tmp_path_factory.mktemp("several")) as served:
        yield served


def test_all_processes_answer_alike_and_are_counted_together(several: tuple[subprocess.Popen[str], str]) -> None:
    _process, url = several
    before = settled(url)

    def one(number: int) -> str:
        with httpx.Client(base_url=url, timeout=30) as client:
            if number % 2:
                reply = client.post("/v1/chat/completions", json=SHORT)
                return str(reply.json()["choices"][0]["message"])
            return str(client.post("/v1/completions", json=PLAIN).json()["choices"])

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(one, range(60)))) == 2
    after = settled(url)
    for endpoint in ("chat", "completions"):
        for name in (
            f'ponder_requests_total{{endpoint="{endpoint}",outcome="completed"}}',
            f'ponder_time_to_first_token_seconds_count{{endpoint="{endpoint}"}}',
        ):
            assert after[name] - before.get(name, 0) == 30
    assert after["ponder_backlog_answers"] == 0 and after["ponder_api_workers"] == 3


def test_errors_are_those_of_one_process(several: tuple[subprocess.Popen[str], str]) -> None:
    _, url = several
    for path, body, status, code in (
        ("/v1/chat/completions", {**SHORT, "temperature": 9}, 400, "invalid_value"),
        ("/v1/chat/completions", {**SHORT, "model": "other"}, 404, "model_not_found"),
        ("/v1/completions", {"prompt": "a"}, 400, "missing_required_parameter"),
    ):
        for _ in range(6):
            reply = httpx.post(url + path, json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    wrong = [httpx.post(f"{url}/v1/messages?beta=true", json={**SHORT, "temperature": 9}) for _ in range(6)]
    assert {(reply.status_code, reply.json()["error"]["type"]) for reply in wrong} == {(400, "invalid_request_error")}
    assert {httpx.get(f"{url}/v1/models/none").status_code for _ in range(6)} == {404}
    assert {httpx.delete(f"{url}/v1/completions").status_code for _ in range(6)} == {405}
    foreign = {"Origin": "http://elsewhere.example"}
    assert {httpx.post(f"{url}/v1/completions", json={}, headers=foreign).status_code for _ in range(6)} == {403}


def test_thinking_that_one_process_signed_is_accepted_by_all(several: tuple[subprocess.Popen[str], str]) -> None:
    _, url = several
    thinking = {"type": "enabled", "budget_tokens": 8}
    asked: dict[str, Any] = {**SHORT, "max_tokens": 40, "thinking": thinking}
    for _ in range(6):
        blocks = httpx.post(f"{url}/v1/messages", json=asked).json()["content"]
        assert blocks[0]["type"] == "thinking"
        hi: list[Any] = asked["messages"]
        again = [*hi, {"role": "assistant", "content": blocks}, *hi]
        assert httpx.post(f"{url}/v1/messages/count_tokens", json={"model": "default", "messages": again}).is_success


def raw(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20)


def replies(connection: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Status and body of so many replies that tell their lengths."""
    found, data = list[tuple[int, bytes]](), b""
    while len(found) < count:
        if match := re.search(rb"HTTP/1.1 (\d+).*?content-length: (\d+).*?\r\n\r\n", data, re.DOTALL | re.IGNORECASE):
            length = int(match[2])
            if len(data) >= match.end() + length:
                found.append((int(match[1]), data[match.end() : match.end() + length]))
                data = data[match.end() + length :]
                continue
        more = connection.recv(1 << 16)
        assert more, (found, data)
        data += more
    return found


def request(method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"\r\n" + data


def test_a_connection_may_ask_for_anything_in_any_order(several: tuple[subprocess.Popen[str], str]) -> None:
    _, url = several
    title = "x" * 40
    for number in range(8):  # whichever process accepts it
        with raw(url) as connection:
            connection.sendall(request("POST", "/v1/chat/completions", SHORT))
            ((status, answer),) = replies(connection, 1)
            assert status == 200
            connection.sendall(request("POST", "/api/folders", {"name": f"{title}{number}"}))
            ((status, chat),) = replies(connection, 1)
            assert status < 300 and json.loads(chat)["name"] == f"{title}{number}"
            connection.sendall(request("POST", "/v1/chat/completions", SHORT))
            ((status, again),) = replies(connection, 1)
            assert status == 200
            assert json.loads(again)["choices"] == json.loads(answer)["choices"]


def test_requests_that_wait_in_a_connection_are_answered_in_order(several: tuple[subprocess.Popen[str], str]) -> None:
    _, url = several
    for _ in range(8):
        with raw(url) as connection:
            connection.sendall(
                request("POST", "/v1/chat/completions", SHORT) + request("GET", "/health")
                + request("GET", "/v1/models") + request("GET", "/v1/nothing")
            )  # fmt: skip
            (first, _), (second, health), (third, models), (fourth, _) = replies(connection, 4)
            assert (first, second, third, fourth) == (200, 200, 200, 404)
            assert json.loads(health)["status"] == "ok" and json.loads(models)["object"] == "list"


def test_heads_and_bodies_in_pieces_reach_whoever_answers(several: tuple[subprocess.Popen[str], str]) -> None:
    _, url = several
    long = {"title": "y" * 150, "ignored": "z" * 600_000}
    for sent, status in (
        (request("POST", "/v1/chat/completions", SHORT), 200), (request("GET", "/health"), 200),
        (request("POST", "/api/chats", long), 400),
    ):  # fmt: skip
        for _ in range(4):
            with raw(url) as connection:
                for part in (sent[:3], sent[3:40], sent[40:100_000], sent[100_000:]):
                    connection.sendall(part)
                    time.sleep(0.01)
                ((found, _),) = replies(connection, 1)
                assert found == status
    with raw(url) as connection:
        connection.sendall(b"this is no HTTP\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


def test_what_a_client_leaves_ends(several: tuple[subprocess.Popen[str], str]) -> None:
    _process, url = several
    before = settled(url).get('ponder_requests_total{endpoint="chat",outcome="cancelled"}', 0)
    with httpx.Client(base_url=url) as client:
        for _ in range(6):
            with client.stream("POST", "/v1/chat/completions", json=FOREVER) as reply:
                next(reply.iter_bytes())
    assert settled(url)['ponder_requests_total{endpoint="chat",outcome="cancelled"}'] - before == 6


def test_a_killed_worker_takes_its_own_answers_with_it_and_nothing_else(
    several: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = several
    undisturbed = Reader(url, LONG).texts()
    before = settled(url)
    readers = spread_readers(url, process.pid, LONG)
    victim = workers_of(process.pid)[0]
    lost = holders(process.pid, url)[victim.pid]
    victim.kill()
    for reader in readers:
        reader.join(60)
    whole = [reader for reader in readers if reader.broken is None]
    assert len(readers) - len(whole) == lost
    assert all(reader.texts() == undisturbed for reader in whole)
    after = settled(url)
    failed = 'ponder_requests_total{endpoint="chat",outcome="failed"}'
    assert after[failed] - before.get(failed, 0) == lost and after["ponder_backlog_answers"] == 0
    while len(workers_of(process.pid)) < 2 or metrics(url)["ponder_api_workers"] < 3:
        time.sleep(0.02)
    assert after["ponder_api_worker_restarts_total"] == before["ponder_api_worker_restarts_total"] + 1
    spread_readers(url, process.pid, SHORT | {"stream": True, "max_tokens": 400})


def test_a_killed_engine_is_started_again_for_all_processes(several: tuple[subprocess.Popen[str], str]) -> None:
    process, url = several
    undisturbed = Reader(url, LONG).texts()
    readers = spread_readers(url, process.pid, LONG)
    engine_of(process.pid).kill()
    assert all(reader.texts() == undisturbed for reader in readers)
    settled(url)


def test_sigterm_lets_all_processes_finish(tmp_path: Path, model: Path) -> None:
    with serving("--model", str(model), *FLAGS, "--drain-s", "60", cwd=tmp_path) as (process, url):
        readers = spread_readers(url, process.pid, LONG)
        workers = workers_of(process.pid)
        process.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/health").json()["status"] != "draining":
            pass
        for _ in range(12):
            refused = httpx.post(f"{url}/v1/chat/completions", json=LONG)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert all(len(text) > 1000 for reader in readers for text in reader.texts().values())
        assert process.wait(20) == 0
        assert not any(worker.is_running() for worker in workers)


def test_at_once_every_stream_gets_its_last_event(tmp_path: Path, model: Path) -> None:
    with serving("--model", str(model), *FLAGS, cwd=tmp_path) as (process, url):
        readers = spread_readers(url, process.pid, FOREVER)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        for reader in readers:
            assert json.loads(reader.events()[-3].removeprefix("data: "))["error"]["code"] == "engine_stopped"


def test_workers_end_with_a_killed_home(tmp_path: Path, model: Path) -> None:
    with serving("--model", str(model), *FLAGS, cwd=tmp_path) as (process, _):
        left = [*workers_of(process.pid), engine_of(process.pid)]
        assert len(left) == 3
        process.kill()
        psutil.wait_procs(left, 20)
        assert not any(each.is_running() for each in left)


def test_limits_of_a_key_hold_over_all_processes(tmp_path: Path, model: Path) -> None:
    accounts = Accounts.open(tmp_path / "data")
    accounts.ensure_user("ana", None)
    few, many, at_once = (
        accounts.create_key("ana", "a test", None, quota=quota)[1]
        for quota in (Quota(requests_per_minute=7), Quota(tokens_per_minute=100), Quota(concurrent_requests=2))
    )
    accounts.close()
    flags = ("--model", str(model), *FLAGS, "--auth", "keys")
    with serving(*flags, cwd=tmp_path) as (_process, url):

        def ask(key: str, body: dict[str, Any] = SHORT) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30)

        assert {httpx.post(f"{url}/v1/chat/completions", json=SHORT).status_code for _ in range(8)} == {401}
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(ask, [few] * 24))
        assert Counter(reply.status_code for reply in told) == {200: 7, 429: 17}
        assert {reply.json()["error"]["code"] for reply in told if reply.status_code == 429} == {"rate_limit_exceeded"}
        spent = 0
        while (reply := ask(many)).status_code == 200:
            spent += reply.json()["usage"]["total_tokens"]
            assert int(reply.headers["x-ratelimit-limit-tokens"]) == 100
        assert reply.status_code == 429 and 100 - 40 <= spent <= 100 + 40
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(lambda _: ask(at_once, {**LONG, "stream": False}), range(8)))
        assert Counter(reply.status_code for reply in told) == {200: 2, 429: 6}
        refused = {reply.json()["error"]["code"] for reply in told if reply.status_code == 429}
        assert refused == {"concurrency_limit_exceeded"}


def test_several_processes_need_an_engine_that_all_can_reach(tmp_path: Path) -> None:
    shown = ponder("serve", "--api-workers", "2", cwd=tmp_path)
    assert shown.returncode == 2 and "accepted: --engine process beside it, or 1" in shown.stderr


def test_a_worker_loads_no_more_than_it_needs() -> None:
    code = (
        "import sys, app.workers.api_worker, engine.ipc.attached_client\n"
        "print([name for name in ('torch', 'app.server') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert shown.stdout == "[]\n", shown.stderr
