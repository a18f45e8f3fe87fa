"""Clients that hold on to what they get, over real sockets: their connections end, and who is served is not harmed.

Most of it on an application of a few lines, so that what is seen is the connection's; times are made short, and nothing
is asserted about them.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from app.cli.serve import bind
from app.wire import HEAD_BYTES, Patience, connections_allowed, protocol_of, raise_file_limit
from app.wire.connection import CHUNK_BYTES, FREE_CHUNKS
from tests.app.conftest import Server, serving

pytestmark = pytest.mark.slow

SHORT = Patience(connections=40, head_s=1.5, body_s=1.0, body_rate=1000, read_s=0.5)
PIECE = b"x" * 65_536


class Application:
    """`/long` is an answer without an end, `/echo` says how long a body is, anything else is empty."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        self.left = 0  # clients that went while their body was read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, scope["path"] in ("/echo", "/long")
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            size, more = size + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        self.begun.set()
        while scope["path"] == "/long" and not gone.done():
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            await asyncio.sleep(0)
        gone.cancel()
        self.ended.set()
        await send({"type": "http.response.body", "body": str(size).encode()})


@contextmanager
def connected(application: Any, patience: Patience) -> Iterator[int]:
    """The port of a server of it, in a thread."""
    listener = bind("127.0.0.1", 0)
    listener.listen()  # what comes before the server has started waits for it
    config = uvicorn.Config(
        application, lifespan="off", log_config=None, http=protocol_of(patience), ws="none",
        h11_max_incomplete_event_size=HEAD_BYTES, timeout_keep_alive=30,
    )  # fmt: skip
    web = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: web.run(sockets=[listener]), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        web.should_exit = web.force_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def application() -> Application:
    return Application()


@pytest.fixture(scope="module")
def port(application: Application) -> Iterator[int]:
    with connected(application, SHORT) as port:
        yield port


@contextmanager
def line(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as open_line:
        yield open_line


def rest(open_line: socket.socket) -> bytes:
    """All that comes until the server closes."""
    parts = []
    try:
        while part := open_line.recv(65_536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def drip(open_line: socket.socket, what: bytes) -> None:
    """Send it over and over, slowly, until the connection ends."""
    ended = threading.Event()

    def send() -> None:
        try:
            while not ended.wait(0.02):
                open_line.sendall(what)
        except OSError:
            pass

    threading.Thread(target=send, daemon=True).start()


def error_of(reply: bytes) -> tuple[int, str]:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"nosniff" in head and b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def test_who_says_nothing_is_not_waited_for(port: int) -> None:
    with line(port) as silent:
        assert rest(silent) == b""


@pytest.mark.parametrize("drips", [False, True])
def test_headers_have_to_come_in_time_however_they_drip(port: int, drips: bool) -> None:
    with line(port) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        if drips:
            drip(slow, b"x")
        assert error_of(rest(slow)) == (408, "request_timeout")


def test_a_second_request_has_no_more_time_than_the_first(port: int) -> None:
    with line(port) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert slow.recv(10_000).startswith(b"HTTP/1.1 200")
        slow.sendall(b"GET / HTTP/1.1\r\nHost: ")
        drip(slow, b"x")
        assert b"HTTP/1.1 408" in rest(slow)


CHUNKED = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize("chunks", [300_000, FREE_CHUNKS + 100], ids=["many", "few too many"])
def test_a_body_of_tiny_chunks_is_refused_by_their_number(port: int, chunks: int) -> None:
    with line(port) as tiny:
        with suppress(ConnectionError):  # it is refused before all of it is sent
            tiny.sendall(CHUNKED + b"\r\n" + b"1\r\nx\r\n" * chunks)
        assert error_of(rest(tiny)) == (400, "too_many_chunks")


def test_chunks_of_a_size_and_a_few_tiny_ones_are_read(port: int) -> None:
    sizes = [1] * FREE_CHUNKS + [CHUNK_BYTES] * 3000
    with line(port) as fine:
        fine.sendall(CHUNKED + b"Connection: close\r\n\r\n")
        for size in sizes:
            fine.sendall(b"%x\r\n%b\r\n" % (size, b"x" * size))
        fine.sendall(b"0\r\n\r\n")
        assert b"\r\n%d\r\n" % sum(sizes) in rest(fine)


@pytest.mark.parametrize("order", [1, -1])
def test_a_length_that_is_said_twice_is_refused_and_the_connection_ends(port: int, order: int) -> None:
    lengths = [b"Content-Length: 4\r\n", b"Transfer-Encoding: chunked\r\n"][::order]
    with line(port) as smuggler:
        smuggler.sendall(
            b"POST /echo HTTP/1.1\r\nHost: a\r\n%b%b\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n" % (*lengths,)
        )
        reply = rest(smuggler)
        assert error_of(reply) == (400, "invalid_http") and reply.count(b"HTTP/1.1 ") == 1
        assert b"both Content-Length and Transfer-Encoding" in reply


def test_a_body_has_to_come_at_a_rate(port: int, application: Application) -> None:
    before = application.left
    with line(port) as slow:
        slow.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n")
        drip(slow, b"x")
        assert error_of(rest(slow)) == (408, "request_timeout")
    with line(port) as fast:
        fast.sendall(b"POST /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 100000\r\n\r\n")
        drip(fast, b"x" * 2000)
        assert rest(fast).endswith(b"100000\r\n0\r\n\r\n")
    assert application.left == before + 1, "the application hears of it"


def test_what_follows_an_answer_has_to_come_at_a_rate_too(port: int) -> None:
    with line(port) as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n")
        drip(slow, b"x")
        assert rest(slow).startswith(b"HTTP/1.1 200")


def test_an_answer_that_nobody_reads_ends(port: int, application: Application) -> None:
    application.begun.clear()
    application.ended.clear()
    with line(port) as deaf:
        deaf.sendall(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n")
        assert application.begun.wait(20)
        assert application.ended.wait(20)


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /" + b"a" * 2 * HEAD_BYTES, 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"X-Bomb: 1\r\n" * 8000, 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 2 * HEAD_BYTES, 431, "headers_too_large"),
        (b"\x16\x03\x01\x02\x00\x01", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "invalid_http"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "invalid_http"),
        (b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_http"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_request_is_told_so(port: int, head: bytes, status: int, code: str) -> None:
    with line(port) as odd:
        odd.sendall(head)
        assert error_of(rest(odd)) == (status, code)


def test_idle_connections_make_room_for_those_that_ask(application: Application) -> None:
    patient = Patience(connections=40, head_s=600)
    with connected(application, patient) as port, ExitStack() as lines:
        held = [lines.enter_context(line(port)) for _ in range(200)]
        for number in range(60):
            reply = httpx.get(f"http://127.0.0.1:{port}/{number}")
            assert reply.status_code == 200
        ended = 0
        for each in held:
            each.setblocking(False)
            try:
                ended += each.recv(1) == b""
            except ConnectionResetError:
                ended += 1
            except BlockingIOError:
                pass
        assert ended >= 160, "the others had to go"


def test_where_all_connections_are_busy_one_more_is_told_so(application: Application) -> None:
    with connected(application, Patience(connections=20)) as port, ExitStack() as lines:
        for _ in range(20):
            busy = lines.enter_context(line(port))
            busy.sendall(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n")
            assert busy.recv(10).startswith(b"HTTP/1.1 2")
        assert error_of(rest(lines.enter_context(line(port)))) == (503, "too_many_connections")


def test_users_are_served_while_others_hold_what_they_can(model: Path, tmp_path: Path) -> None:
    """A thousand idle connections, slow heads, slow bodies and deaf readers, and thirty answers in the midst."""
    ask = {"model": "default", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 8, "temperature": 0}
    forever = {**ask, "max_tokens": 1500, "stream": True, "chat_template_kwargs": {"forever": True}}
    body = json.dumps(forever).encode()
    raise_file_limit()
    with serving(model, tmp_path, patience=Patience(connections=1200, read_s=2)) as server, ExitStack() as lines:
        port = int(server.url.rpartition(":")[2])
        for _ in range(1000):
            lines.enter_context(line(port))
        for _ in range(100):
            lines.enter_context(line(port)).sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX: ")
        for _ in range(50):
            lines.enter_context(line(port)).sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n{"
            )
        for _ in range(4):
            lines.enter_context(line(port)).sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
        told = set()
        for _ in range(30):
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=60)
            assert reply.status_code == 200
            told.add(reply.json()["choices"][0]["message"]["content"])
        assert len(told) == 1
        assert httpx.get(f"{server.url}/health").status_code == 200
        lines.close()
        server.until(lambda stats: stats.sequences == 0)


def test_the_limit_of_connections_leaves_files_for_the_rest() -> None:
    assert connections_allowed(None, 1024) == 512
    assert connections_allowed(100, 1 << 20) == 100
    assert connections_allowed(None, 1 << 20) == 20_000
    assert connections_allowed(None, 64) == 16


def test_every_answer_tells_a_browser_what_not_to_do(server: Server) -> None:
    asked = [("GET", "/health"), ("GET", "/v1/models"), ("GET", "/nothing"), ("GET", "/api/nothing"),
             ("POST", "/v1/chat/completions"), ("GET", "/openapi.json"), ("GET", "/metrics")]  # fmt: skip
    replies = [httpx.request(method, f"{server.url}{path}") for method, path in asked]
    replies.append(httpx.get(f"{server.url}/health", headers={"Host": "evil.example"}))  # refused before any route
    assert {reply.status_code for reply in replies} >= {200, 400, 403, 404}
    for reply in replies:
        assert reply.headers["x-content-type-options"] == "nosniff", reply.url
        assert reply.headers["x-frame-options"] == "DENY" and reply.headers["referrer-policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
        assert reply.headers.get_list("content-security-policy") == [reply.headers["content-security-policy"]]
