"""The real server in a process of its own, as a user starts it, and the wire between it and the browser.

A test may slow its engine down, hold or break it (see `real_main`), kill it, start it again on the same port and data,
and cut the wire: a TCP relay on a port of its own, so that what is cut is a connection and not a call.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.retrieval.made import pdf

REPOSITORY = Path(__file__).parents[3]
PEBBLE = REPOSITORY / "models/pebble"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, as a network that went away does


class Wire:
    """A relay to a server's port. Cut, it resets what is open and what comes; mute, what the server would answer."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._whole = True
        self._mute = False
        self.bytes = 0  # relayed to the browser
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole = False
        self.drop()

    def mute(self) -> None:
        """Returns what the browser sends arrives, what the server answers does not."""
        self._mute = True

    def mend(self) -> None:
        self._whole, self._mute = True, False

    def drop(self) -> None:
        """Reset what is open; the wire stays whole."""
        with self._lock:
            for end in self._open:
                _reset(end)
            self._open.clear()

    @property
    def connections(self) -> int:
        """Returns how many are open, seen from the browser."""
        with self._lock:
            return len(self._open) // 2

    def close(self) -> None:
        self._listener.close()
        self.drop()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._whole:
                _reset(near)
                continue
            try:
                far = socket.create_connection(self._to)
            except OSError:  # there is no server now
                _reset(near)
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {near, far}
            threading.Thread(target=self._relay, args=(near, far), daemon=True).start()

    def _relay(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was cut
            while True:
                for end in select.select([near, far], [], [])[0]:
                    data = end.recv(65536)
                    if not data or (self._mute and end is far):
                        raise OSError
                    (near if end is far else far).sendall(data)
                    self.bytes += len(data) if end is far else 0
        with self._lock:
            self._open -= {near, far}
        for end in (near, far):
            end.close()


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        end.shutdown(socket.SHUT_RDWR)
    end.close()


class RealServer:
    """A server of `flags` with its data in `folder`. `url` is the wire's, `direct` the server's own address."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.plugins = folder / "plugins"
        self.plugins.mkdir(parents=True, exist_ok=True)
        self._knobs = folder / "knobs.json"
        self._flags = flags
        self.turn()
        with socket.socket() as chosen:
            chosen.bind(("127.0.0.1", 0))
            self.port = int(chosen.getsockname()[1])
        self.direct = f"http://127.0.0.1:{self.port}"
        self.wire = Wire(self.port)
        self.url = self.wire.url
        self._process: subprocess.Popen[str] | None = None
        self.http = httpx.Client(base_url=self.direct, timeout=60)

    def turn(self, **knobs: Any) -> None:
        """Set the engine's knobs; those not named are as at first."""
        new = self._knobs.with_suffix(".new")
        new.write_text(json.dumps(knobs), "utf-8")
        new.replace(self._knobs)

    def start(self) -> None:
        command = [
            sys.executable, "-m", "tests.e2e.support.real_main", str(self._knobs), "serve", "--port", str(self.port),
            "--data-dir", str(self.folder / "data"), "--plugins", str(self.plugins), "--threads", "1", "--no-sandbox",
            "--speculation", "off", *self._flags,  # unless a test asks for it a step is a token: tests pace by steps
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ}
        )
        said: list[str] = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said.append(line)
            if re.search(r"Ponder is ready at", line):
                # What it says from now on nobody reads, and a full pipe would stop it.
                threading.Thread(target=self._process.stdout.read, daemon=True).start()
                return
        raise AssertionError("the server ended before it was ready:\n" + "".join(said))

    def kill(self) -> None:
        """Kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    # -- what a client does

    def ask(self, content: str, chat: str | None = None, **fields: Any) -> tuple[str, str]:
        """Begin an answer; the chat and the run."""
        chat = chat or str(self.http.post("/api/chats", json={}).json()["id"])
        reply = self.http.post(f"/api/chats/{chat}/runs", json={"content": content, **fields})
        assert reply.status_code == 202, reply.text
        return chat, str(reply.json()["run_id"])

    def snapshot(self, run: str) -> dict[str, Any]:
        return dict(self.http.get(f"/api/runs/{run}").json())

    def log(self, run: str) -> list[dict[str, Any]]:
        """A run's events so far."""
        text = self.http.get(f"/api/runs/{run}/events?follow=false").text
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]

    def as_new(self) -> None:
        """Whole again and idle, whatever a test did to it."""
        self.wire.mend()
        self.turn()
        if not self._healthy():
            self.kill()
            self.start()
        for chat in self.http.get("/api/chats").json()["chats"]:
            for run in self.http.get(f"/api/chats/{chat['id']}").json()["active_run_ids"]:
                self.http.post(f"/api/runs/{run}/cancel", json={})

    def _healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False


@contextlib.contextmanager
def running(folder: Path, *flags: str) -> Iterator[RealServer]:
    server = RealServer(folder, *flags)
    server.start()
    try:
        yield server
    finally:
        server.http.close()
        server.wire.close()
        server.turn()
        server.stop()


MAX_UPLOAD = 1 << 20  # bytes, of the server of documents


@contextlib.contextmanager
def with_documents(folder: Path) -> Iterator[RealServer]:
    """A server of the bundled model in which what reads, embeds and draws has been started."""
    with running(folder, "--model", str(PEBBLE), "--max-upload", str(MAX_UPLOAD)) as server:
        first = add(server, "first.pdf", pdf([["The first."]]))
        assert server.http.get(f"/api/documents/{first}/pages/1").status_code == 200
        yield server


def add(server: RealServer, name: str, content: str | bytes) -> int:
    """The number of the document that a file becomes."""
    reply = server.http.post("/api/documents", files={"file": (name, content)}, data={"wait": "50"})
    assert reply.status_code == 201, reply.text
    while any(job["status"] == "running" for job in server.http.get("/api/jobs").json()["jobs"]):
        time.sleep(0.02)  # a page that looks now would show it as one of its own
    return int(reply.json()["documents"][0]["id"])


def forget_documents(server: RealServer) -> None:
    for job in server.http.get("/api/jobs").json()["jobs"]:
        if job["status"] == "running":
            server.http.post(f"/api/jobs/{job['id']}/cancel")
    for shelf in server.http.get("/api/collections").json()["collections"]:
        server.http.delete(f"/api/collections/{shelf['id']}")
