"""A server that is told to stop, and one whose engine's process is killed, as their clients see them."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.app.test_cli import FOREVER, serving

LONG = {**FOREVER, "max_tokens": 1500, "n": 4, "temperature": 0}


class Reader(threading.Thread):
    """Reads one stream; `begun` once its first bytes are there."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.broken: httpx.HTTPError | None = None
        self._url, self._body = url, body
        self._received: list[bytes] = []
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=self._body, timeout=60) as reply:
                for part in reply.iter_bytes():
                    self._received.append(part)
                    self.begun.set()
        except httpx.HTTPError as error:
            self.broken = error

    def events(self) -> list[str]:
        """What came, once the stream is over."""
        self.join(60)
        return b"".join(self._received).decode().split("\n\n")

    def texts(self) -> dict[int, str]:
        """The answers, when the stream has ended as it should."""
        events = self.events()
        assert self.broken is None
        assert events[-2:] == ["data: [DONE]", ""], events[-3:]
        texts: dict[int, str] = {}
        for event in events[:-2]:
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
        return texts


def engine_of(server: int) -> psutil.Process:
    """The process of the server's engine."""
    (found,) = [each for each in psutil.Process(server).children() if "engine.process.child" in each.cmdline()]
    return found


def test_a_killed_engine_is_started_again_and_its_streams_go_on(tmp_path: Path, model: Path) -> None:
    with serving("--model", str(model), "--data-dir", "data", "--engine", "process", cwd=tmp_path) as (process, url):
        undisturbed = Reader(url, LONG).texts()
        assert len(undisturbed) == 4 and all(len(text) > 1000 for text in undisturbed.values())
        reader = Reader(url, LONG)
        assert reader.begun.wait(20)
        killed = engine_of(process.pid)
        killed.kill()
        killed.wait(10)
        reply = httpx.get(f"{url}/health")
        assert reply.json()["status"] == "restarting"
        while reply.status_code == 503:
            reply = httpx.get(f"{url}/health")
        assert reply.json()["status"] == "ok"
        assert reader.texts() == undisturbed
        again = engine_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not again.is_running()


def test_a_killed_server_leaves_no_engine(tmp_path: Path, model: Path) -> None:
    with serving("--model", str(model), "--data-dir", "data", "--engine", "process", cwd=tmp_path) as (process, _):
        engine = engine_of(process.pid)
        (sockets,) = {Path(each.laddr).parent for each in engine.net_connections("unix") if "ponder-" in each.laddr}
        os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs([engine], 20)
        assert not engine.is_running() and not sockets.exists()


def test_sigterm_lets_what_runs_end_and_refuses_what_is_new(tmp_path: Path, model: Path) -> None:
    with serving("--model", str(model), "--data-dir", "data", "--drain-s", "60", cwd=tmp_path) as (process, url):
        reader = Reader(url, LONG)
        assert reader.begun.wait(20)
        process.send_signal(signal.SIGTERM)
        while (health := httpx.get(f"{url}/health")).status_code == 200:
            pass
        assert health.json()["status"] == "draining"
        refused = httpx.post(f"{url}/v1/chat/completions", json=LONG)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) > 0
        assert all(len(text) > 1000 for text in reader.texts().values())
        assert process.wait(20) == 0
