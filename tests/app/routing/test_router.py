"""A router in front of three real servers: where requests go, what it passes on, and what it does when one dies."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from app.cli.serve import bind
from app.routing.policies import PolicyName
from app.routing.replicas import ReplicaAddress, ReplicaSet
from app.routing.router import OWNER_COOKIE, Router, _whole_events
from tests.app.cli.test_cli import clean_environment, ponder
from tests.app.cli.test_cli import serving as cli_serving
from tests.app.conftest import Server, serving

pytestmark = pytest.mark.slow

FOREVER = {
    "model": "default", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 1500,
    "chat_template_kwargs": {"forever": True},
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


@dataclass
class Routed:
    url: str
    router: Router
    http: httpx.Client

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {each["replica"]: each for each in self.http.get("/replicas").json()["data"]}

    def count(self, name: str, replica: str, **labels: str) -> float:
        """Returns a counter of /metrics."""
        rows = [
            line for line in self.http.get("/metrics").text.splitlines() if line.startswith(f"ponder_router_{name}")
        ]
        wanted = [f'replica="{replica}"', *(f'{key}="{value}"' for key, value in labels.items())]
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if all(each in row for each in wanted))


@contextmanager
def routing(*addresses: ReplicaAddress, policy: PolicyName = "least_loaded", **options: Any) -> Iterator[Routed]:
    own = {name: options.pop(name) for name in ("objectives", "min_remote_tokens") if name in options}
    admin_key = options.pop("admin_key", None)
    router = Router(ReplicaSet(addresses, policy, **{"health_s": 0.1, **options}), admin_key, **own)
    listener = bind("127.0.0.1", 0)
    web = uvicorn.Server(uvicorn.Config(router.app(), log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        until(lambda: web.started)
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Routed(url, router, http)
    finally:
        web.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def three(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Server, ReplicaAddress]]]:
    """Servers that publish K/V events."""
    with ExitStack() as stack:
        made = []
        for at in range(3):
            endpoint, replay = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
            events = {"endpoint": endpoint, "replay_endpoint": replay}
            server = stack.enter_context(serving(model, tmp_path_factory.mktemp(f"replica{at}"), kv_events=events))
            made.append((server, ReplicaAddress(server.url, endpoint, replay)))
        yield made


def where_more_is_cached(routed: Routed, before: dict[str, int]) -> str:
    """Waits until the router knows a prompt's blocks more than `before` of one replica; returns its address. The few
    blocks of the answer before, or of its next turn, may come late from another."""

    def grown() -> list[str]:
        return [url for url, each in routed.replicas().items() if each["cached_blocks"] >= before[url] + 8]

    until(lambda: bool(grown()))
    (found,) = grown()
    return found


def chat(http: httpx.Client, content: str, **more: Any) -> httpx.Response:
    body = {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return http.post("/v1/chat/completions", json=body, headers=more.pop("headers", {}), **more)


def test_a_conversation_goes_back_to_where_its_beginning_is(three: list[tuple[Server, ReplicaAddress]]) -> None:
    servers = {server.url: server for server, _ in three}
    with routing(*(address for _, address in three), policy="prefix_aware") as routed:
        talks = [f"{name} " * 40 for name in ("red", "green", "blue", "black", "white", "grey")]
        seen = dict[str, str]()
        for talk in talks:
            blocks = {url: each["cached_blocks"] for url, each in routed.replicas().items()}
            assert chat(routed.http, talk).status_code == 200
            seen[talk] = where_more_is_cached(routed, blocks)
        assert len(set(seen.values())) == 3  # new prompts spread by what replicas hold
        for talk in (*reversed(talks), *talks):
            before = {url: server.stats().prefix_hit_tokens for url, server in servers.items()}
            assert chat(routed.http, talk + "and then?").status_code == 200
            hit = [url for url, server in servers.items() if server.stats().prefix_hit_tokens >= before[url] + 150]
            assert hit == [seen[talk]]
        assert routed.count("matched_blocks_total", seen[talks[0]]) >= 20


def test_requests_of_a_session_stay_together(three: list[tuple[Server, ReplicaAddress]]) -> None:
    urls = [address.url for _, address in three]
    with routing(*map(ReplicaAddress, urls), policy="round_robin") as routed:
        for _ in range(6):
            assert chat(routed.http, "one", headers={"X-Session-ID": "s1"}).status_code == 200
        counts = [routed.count("requests_total", url) for url in urls]
        assert sorted(counts) == [0, 0, 6]
        for _ in range(3):
            chat(routed.http, "one")
        assert [routed.count("requests_total", url) - n for url, n in zip(urls, counts, strict=True)].count(0) <= 1


def test_openais_client_streams_through_as_the_pieces_come(three: list[tuple[Server, ReplicaAddress]]) -> None:
    with (
        routing(*(address for _, address in three)) as routed,
        openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0, timeout=30) as client,
        client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            max_tokens=1500,
            extra_body={"chat_template_kwargs": {"forever": True}},
        ) as stream,
    ):
        for _ in range(5):
            next(stream)
        running = [server.stats().running for server, _ in three]
        assert sum(running) == 1  # pieces came while it was being written
        stream.close()
        until(lambda: not any(server.stats().running for server, _ in three))  # leaving ends the replica's work


def test_a_refusal_passes_as_it_is(three: list[tuple[Server, ReplicaAddress]]) -> None:
    server, address = three[0]
    body = {"model": "nobody", "messages": [{"role": "user", "content": "hi"}]}
    with routing(address) as routed:
        through, direct = (
            routed.http.post("/v1/chat/completions", json=body),
            httpx.post(f"{server.url}/v1/chat/completions", json=body),
        )
    assert (through.status_code, through.json()) == (direct.status_code, direct.json())


def test_a_browser_stays_at_one_server_by_its_cookie(three: list[tuple[Server, ReplicaAddress]]) -> None:
    urls = [address.url for _, address in three]
    with routing(*map(ReplicaAddress, urls)) as routed:
        origin = {"Origin": routed.url}
        made = routed.http.post("/api/chats", json={}, headers=origin)
        assert made.status_code == 201, made.text
        id = made.json()["id"]
        assert routed.http.cookies[OWNER_COOKIE]
        for _ in range(4):
            assert routed.http.get(f"/api/chats/{id}").status_code == 200
        assert sum(httpx.get(f"{url}/api/chats/{id}").status_code == 200 for url in urls) == 1


def test_a_program_stays_at_one_server_by_its_key(three: list[tuple[Server, ReplicaAddress]]) -> None:
    urls = [address.url for _, address in three]
    with routing(*map(ReplicaAddress, urls)) as routed:
        used = set[tuple[str, ...]]()
        for key in map(str, range(20)):
            before = {url: routed.count("requests_total", url) for url in urls}
            for _ in range(3):
                answer = routed.http.get("/api/chats", headers={"Authorization": f"Bearer {key}"})
                assert OWNER_COOKIE not in answer.cookies
            used.add(tuple(url for url in urls if routed.count("requests_total", url) == before[url] + 3))
        assert all(len(each) == 1 for each in used) and len(used) > 1


def test_a_drained_replica_gets_nothing_new_and_finishes_what_it_runs(
    three: list[tuple[Server, ReplicaAddress]],
) -> None:
    urls = [address.url for _, address in three[:2]]
    with (
        routing(*map(ReplicaAddress, urls), policy="round_robin") as routed,
        httpx.Client(base_url=routed.url) as other,
    ):
        with other.stream("POST", "/v1/chat/completions", json=FOREVER) as stream:
            lines = stream.iter_lines()
            next(lines)
            (busy,) = [url for url, each in routed.replicas().items() if each["in_flight"]]
            drained = routed.http.post("/drain", json={"replica": busy, "timeout_s": 0.1}).json()
            assert (drained["done"], drained["draining"]) == (False, True)
            before = routed.count("requests_total", busy)
            for _ in range(4):
                assert chat(routed.http, "hello").status_code == 200
            assert routed.count("requests_total", busy) == before
            assert next(line for line in lines if line)  # what runs goes on
        assert routed.http.post("/drain", json={"replica": busy}).json()["done"] is True
        assert routed.http.post("/drain", json={"replica": busy, "drain": False}).json()["draining"] is False
        for _ in range(4):
            chat(routed.http, "hello")
        assert routed.count("requests_total", busy) > before


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"replica": "http://nobody"}, 404, "accepted: http://127.0.0.1"),
        ({"replica": "URL", "timeout_s": -1}, 400, "accepted: 0 to 3600"),
        ({"replica": "URL", "drain": 1}, 400, "accepted: true or false"),
        ({"replica": "URL", "soon": True}, 400, "accepted: replica, drain and timeout_s"),
    ],
)
def test_a_drain_that_cannot_be_is_refused(
    body: dict[str, Any], status: int, told: str, three: list[tuple[Server, ReplicaAddress]]
) -> None:
    url = three[0][1].url
    with routing(ReplicaAddress(url)) as routed:
        answer = routed.http.post("/drain", json={**body, "replica": body["replica"].replace("URL", url)})
    assert answer.status_code == status and told in answer.json()["error"]["message"]


def test_admin_routes_want_the_key_where_there_is_one(three: list[tuple[Server, ReplicaAddress]]) -> None:
    with routing(three[0][1], admin_key="secret") as routed:
        for path in ("/metrics", "/replicas"):
            assert routed.http.get(path).status_code == 401
            assert routed.http.get(path, headers={"Authorization": "Bearer secret"}).status_code == 200
    with routing(three[0][1]) as routed:
        assert routed.http.get("/replicas", headers={"X-Forwarded-For": "192.0.2.1"}).status_code == 403


def test_an_adapter_is_not_loaded_by_one_of_many(three: list[tuple[Server, ReplicaAddress]]) -> None:
    with routing(three[0][1]) as routed:
        answer = routed.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "b"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "not_routed"


@contextmanager
def started(model: Path, data: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, which a test can kill."""
    with cli_serving("--model", str(model), "--data-dir", str(data), *options, cwd=data) as (process, url):
        yield process, url


def test_a_killed_replica_ends_streams_with_an_error_and_others_answer_from_then_on(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        started(model, tmp_path / "a") as (first, a),
        started(model, tmp_path / "b") as (second, b),
        routing(ReplicaAddress(a), ReplicaAddress(b), health_s=3600) as routed,
    ):
        with routed.http.stream("POST", "/v1/chat/completions", json={**FOREVER, "max_tokens": 1900}) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            (lost,) = [url for url, each in routed.replicas().items() if each["in_flight"]]
            (first if lost == a else second).kill()
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
        assert events[-1]["error"]["code"] == "replica_lost"
        assert all("choices" in event for event in events[:-1])
        assert routed.count("broken_streams_total", lost) == 1
        routed.router.replicas.replicas[lost].up = True  # as a health check just before its death left it
        for _ in range(3):
            assert chat(routed.http, "hello").status_code == 200
        other = b if lost == a else a
        assert routed.count("retries_total", lost) == 1 and routed.count("requests_total", other) == 3
        assert not routed.replicas()[lost]["up"]


@contextmanager
def breaking() -> Iterator[str]:
    """A server that reads requests and closes the connection without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65_536)

        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_request_without_an_answer_is_tried_again_but_not_what_may_have_changed_something(
    three: list[tuple[Server, ReplicaAddress]],
) -> None:
    with (
        breaking() as broken,
        routing(ReplicaAddress(broken), ReplicaAddress(three[0][1].url), health_s=3600) as routed,
    ):
        replica = routed.router.replicas.replicas[broken]
        for _ in range(4):  # of equals the first by name goes first: either may
            replica.up = True
            assert chat(routed.http, "hello").status_code == 200
        routed.router.replicas.policy = "random"
        for _ in range(8):
            replica.up = True
            assert chat(routed.http, "hello").status_code == 200
        assert routed.count("retries_total", broken) >= 1
        routed.router.replicas.shared_state = True
        statuses = set[int]()
        for at in range(12):
            replica.up = True
            key = {"Authorization": f"Bearer key-{at}"}
            statuses.add(routed.http.post("/api/chats", json={}, headers=key).status_code)
        assert statuses == {201, 503}


@pytest.mark.parametrize(
    ("data", "whole"),
    [(b"data: 1\n\ndata: 2", b"data: 1\n\n"), (b"data: 1\r\n\r\ndata", b"data: 1\r\n\r\n"), (b"data: 1\n", b""),
     (b"a\n\nb\n\n", b"a\n\nb\n\n")],
)  # fmt: skip
def test_only_whole_events_are_passed_on(data: bytes, whole: bytes) -> None:
    assert _whole_events(data) == (whole, data[len(whole) :])


def test_whose_data_is_away_is_told_so_and_goes_on_elsewhere_with_shared_state(
    three: list[tuple[Server, ReplicaAddress]],
) -> None:
    gone, alive = ReplicaAddress(f"http://127.0.0.1:{free_port()}"), ReplicaAddress(three[0][1].url)
    keys = [{"Authorization": f"Bearer key-{at}"} for at in range(12)]
    with routing(gone, alive) as routed:
        statuses = [routed.http.get("/api/chats", headers=key).status_code for key in keys]
        assert set(statuses) == {200, 503}
    with routing(gone, alive, shared_state=True) as routed:
        assert [routed.http.get("/api/chats", headers=key).status_code for key in keys] == [200] * len(keys)


def test_no_replica_is_a_503_that_says_when_to_come_back() -> None:
    with routing(ReplicaAddress(f"http://127.0.0.1:{free_port()}")) as routed:
        answer = chat(routed.http, "hello")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert answer.headers["retry-after"] == "5"
        assert routed.http.get("/health").status_code == 503


def test_the_command_routes_and_ends_on_a_signal(three: list[tuple[Server, ReplicaAddress]], tmp_path: Path) -> None:
    address = three[0][1]
    command = [sys.executable, "-m", "app.cli", "route", "--port", "0", "--replica"]
    given = f"{address.url},{address.events},{address.replay}"
    process = subprocess.Popen(
        [*command, given], cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.fullmatch(r"Ponder routes at (http://\S+) by prefix_aware\n", line)
        assert ready, (line, process.stderr and process.stderr.read())
        with httpx.Client(base_url=ready.group(1), timeout=60) as http:
            assert chat(http, "hello").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--replica", "ftp://x"], "accepted: http://HOST:PORT"),
        (["--replica", "http://a:1", "--replica", "http://a:1/"], "is there twice"),
        (["--replica", "http://a:1", "--policy", "prefix_aware"], "has no K/V events"),
    ],
)
def test_what_is_no_replica_is_refused_before_anything_begins(options: list[str], told: str, tmp_path: Path) -> None:
    done = ponder("route", *options, cwd=tmp_path)
    assert done.returncode == 1 and told in done.stderr
