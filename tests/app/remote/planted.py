"""A planted server on the loopback with OpenAI's and Anthropic's APIs, which behaves as a test says, and keeps all that
it was sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
KEY = "sk-planted-0123456789abcdef"
TEXT = "Paris is the capital."


class Reply(BaseHTTPRequestHandler):
    """One request to the planted server; a behaviour writes its reply."""

    server: _Server

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        sent = self.rfile.read(length)
        is_json = self.headers.get("content-type", "").startswith("application/json")
        self.body: Json = json.loads(sent) if is_json else {"form": sent.decode("latin-1")}
        planted = self.server.planted
        planted.requests.append((self.path, dict(self.headers), self.body))
        try:
            planted.behave(self)
        except (BrokenPipeError, ConnectionResetError):
            planted.left.set()

    def begin(self, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content_type": "text/event-stream", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def event(self, value: object) -> None:
        self.send(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")

    def send(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def refuse(self, status: int, text: str, **headers: str) -> None:
        self.begin(status, content_type="application/json", content_length=str(len(text.encode())), **headers)
        self.send(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    planted: Planted


class Planted:
    """`behave` writes each reply; `requests` are what came: path, headers and body."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[tuple[str, Json, Json]] = []
        self.behave: Callable[[Reply], None] = speaks()
        self.left = threading.Event()  # a client closed the connection while it was written to
        self.go = threading.Event()  # for behaviours that wait

    @property
    def received(self) -> str:
        """Everything that was sent to it, as one text."""
        return json.dumps(self.requests, ensure_ascii=False)

    def does(self, *behaviours: Callable[[Reply], None]) -> None:
        """Behaves so in turn; the last goes on."""
        left = list(behaviours)

        def behave(reply: Reply) -> None:
            (left.pop(0) if len(left) > 1 else left[0])(reply)

        self.requests.clear()
        self.left.clear()
        self.behave = behave

    @property
    def body(self) -> Json:
        """The newest request's."""
        return self.requests[-1][2]


@contextmanager
def planted_server() -> Iterator[Planted]:
    server = _Server(("127.0.0.1", 0), Reply)
    server.planted = Planted(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.planted
    finally:
        server.planted.go.set()
        server.shutdown()
        server.server_close()


def chunk(delta: Json, finish: str | None = None) -> Json:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage(prompt: int = 12, completion: int = 5) -> Json:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def tool_call(name: str, arguments: str, index: int = 0, id: str = "call_x") -> Json:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}


def speaks(*texts: str, last: Json | None = None, finish: str = "stop") -> Callable[[Reply], None]:
    """Answers with these texts, in either API's events."""

    def behave(reply: Reply) -> None:
        reply.begin()
        said = texts or (TEXT[:10], TEXT[10:])
        if reply.path.endswith("/messages"):
            for each in anthropic_events(said):
                reply.event(each)
            return
        for text in said:
            reply.event(chunk({"content": text}))
        reply.event(chunk({}, finish))
        reply.event(last or usage())
        reply.event(b"[DONE]")

    return behave


def sends(*events: object) -> Callable[[Reply], None]:
    """Sends these events, and ends."""

    def behave(reply: Reply) -> None:
        reply.begin()
        for each in events:
            reply.event(each)

    return behave


def refuses(status: int, text: str = "{}", **headers: str) -> Callable[[Reply], None]:
    return lambda reply: reply.refuse(status, text, **headers)


def anthropic_events(texts: tuple[str, ...]) -> list[Json]:
    return [
        {"type": "message_start", "message": {"usage": {"input_tokens": 12, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}} for text in texts),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]
