"""A connection that breaks, anywhere in the bytes: who comes back with the last number has all, and nothing twice."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from random import Random
from urllib.parse import urlsplit

import httpx
import pytest

from tests.app.conftest import Server
from tests.app.runs.test_runs import start

CUTS = 100


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def torn(url: str, path: str, last: int, bytes_left: int) -> tuple[list[tuple[int, str]], bool]:
    """The whole events of a stream that is cut off after `bytes_left` bytes of its body, and whether it had ended."""
    host = urlsplit(url)
    assert host.hostname is not None and host.port is not None
    with socket.create_connection((host.hostname, host.port), timeout=30) as wire:
        head = f"GET {path} HTTP/1.1\r\nHost: {host.netloc}\r\nLast-Event-ID: {last}\r\nConnection: close\r\n\r\n"
        wire.sendall(head.encode())
        heard = b""
        while b"\r\n\r\n" not in heard:
            byte = wire.recv(1)
            assert byte, f"the server hung up: {heard!r}"
            heard += byte
        body, ended = b"", False
        while len(body) < bytes_left:
            piece = wire.recv(min(64, bytes_left - len(body)))
            if not piece:
                ended = True
                break
            body += piece
    return whole_events(body), ended


def whole_events(chunked: bytes) -> list[tuple[int, str]]:
    """The events that came whole, out of HTTP's chunks."""
    text = b""
    while b"\r\n" in chunked:
        size, rest = chunked.split(b"\r\n", 1)
        text += rest[: int(size or b"0", 16)]
        chunked = rest[int(size or b"0", 16) + 2 :]
    events = []
    for block in text.decode("utf-8", "ignore").replace("\r\n", "\n").split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "id" in fields:
            events.append((int(fields["id"]), fields["data"]))
    return events


def test_a_hundred_cuts_lose_and_double_nothing(http: httpx.Client, server: Server) -> None:
    random = Random(5)
    seen: dict[int, str] = {}
    cuts = 0
    while cuts < CUTS:
        chat = http.post("/api/chats", json={}).json()["id"]
        run = start(http, chat, thinking=True, max_tokens=400)
        seen.clear()
        ended = False
        while not ended:
            had = max(seen, default=0)
            events, ended = torn(server.url, f"/api/runs/{run}/events", had, random.randint(1, 700))
            for seq, data in events:
                assert seq == max(seen, default=0) + 1, "an event came twice, or was left out"
                seen[seq] = data
            cuts += not ended
        assert json.loads(seen[max(seen)])["type"] == "run.completed"
        whole, _ = torn(server.url, f"/api/runs/{run}/events", 0, 10**9)
        assert dict(whole) == seen
        snapshot = http.get(f"/api/runs/{run}").json()
        told = [json.loads(data) for data in seen.values()]
        assert snapshot["answer"] == "".join(e["text"] for e in told if e["type"] == "answer.delta")
        assert snapshot["thinking"] == "".join(e["text"] for e in told if e["type"] == "thinking.delta")


def test_stop_from_a_second_connection_ends_what_the_first_one_reads(pebble: Server) -> None:
    with httpx.Client(base_url=pebble.url, timeout=60) as http:
        chat = http.post("/api/chats", json={}).json()["id"]
        run = start(http, chat, content="Use 3, 5, 7 and 9 to make 24.", thinking={"min_tokens": 1000}, temperature=1.5)
        with http.stream("GET", f"/api/runs/{run}/events") as reply:
            lines = reply.iter_lines()
            assert any(line == "event: thinking.delta" for line in lines)
            with httpx.Client(base_url=pebble.url, timeout=60) as other:
                assert other.post(f"/api/runs/{run}/cancel").status_code == 202
                assert pebble.stats().running == 0, "the engine is idle when Stop is answered"
            assert [line for line in lines if line.startswith("event:")][-1] == "event: run.cancelled"
