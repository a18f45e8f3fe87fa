"""A server that is told to stop, and one whose engine's process is killed, as their clients see them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from app.answering.model_registry import ModelRegistry
from app.sequences import persistence
from app.sequences.persistence import PersistedSequences, file_of, take_up
from app.sequences.registry import Sequences
from tests.app.cli.test_cli import FOREVER, serving

pytestmark = pytest.mark.slow

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
        """Returns what came but the pings of long pauses, once the stream is over."""
        self.join(60)
        events = b"".join(self._received).decode().split("\n\n")
        return [event for event in events if event != ": ping"]

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


def running(server: int, module: str) -> list[psutil.Process]:
    """Returns the children of a server that run `module`; others, such as its sandboxes, may end meanwhile."""
    found = []
    for child in psutil.Process(server).children():
        with suppress(psutil.NoSuchProcess):
            if module in child.cmdline():
                found.append(child)
    return found


def engine_of(server: int) -> psutil.Process:
    """The process of the server's engine."""
    (found,) = running(server, "engine.ipc.child")
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


def test_sequences_go_on_after_a_restart_where_they_were(tmp_path: Path, model: Path) -> None:
    flags = ("--model", str(model), "--data-dir", "data", "--dtype", "float32", "--kv-disk-bytes", "64MiB")
    span = {"max_tokens": 20, "temperature": 1.0, "seed": 4, "ignore_eos": True}

    def written(client: httpx.Client, id: str) -> tuple[list[int], int]:
        """Tokens that a span wrote, and how many before it needed no reading."""
        reply = client.post(f"/api/sequences/{id}/generate", json=span).raise_for_status()
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
        told = [json.loads(line) for line in lines]
        cached = told[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        return [token for each in told for token in each.get("tokens", [])], cached

    with serving(*flags, cwd=tmp_path) as (process, url), httpx.Client(base_url=url) as client:
        root = client.post("/api/sequences", json={"prompt": "1234567 " * 20, "lease_s": 500}).json()["id"]
        written(client, root)
        (fork,) = [each["id"] for each in client.post(f"/api/sequences/{root}/fork", json={}).json()["sequences"]]
        written(client, fork)
        states = client.get("/api/sequences").json()["sequences"]
        tokens = {id: client.get(f"/api/sequences/{id}").json()["tokens"] for id in (root, fork)}
        expected = {}
        for id in (root, fork):
            expected[id], _ = written(client, id)
            client.post(f"/api/sequences/{id}/truncate", json={"length": len(tokens[id])}).raise_for_status()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    file = tmp_path / "data/sequences.msgpack"
    assert file.stat().st_mode & 0o777 == 0o600
    with serving(*flags, cwd=tmp_path) as (process, url), httpx.Client(base_url=url) as client:
        assert not file.exists()
        changing = {"expires_at": 0}
        assert [each | changing for each in client.get("/api/sequences").json()["sequences"]] == [
            each | changing for each in states
        ]
        for id in (root, fork):
            assert client.get(f"/api/sequences/{id}").json()["tokens"] == tokens[id]
            again, cached = written(client, id)
            assert again == expected[id] and cached > 150
        assert client.delete(f"/api/sequences/{root}").status_code == 204
        assert client.get("/api/sequences").json()["sequences"] == []
        assert "ponder_sequences_open 0.0" in httpx.get(f"{url}/metrics").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not file.exists()


def test_kept_sequences_that_cannot_go_on_are_told_in_the_log_and_dropped(tmp_path: Path, model: Path) -> None:
    (tmp_path / "data").mkdir()
    one = PersistedSequences("seq-1", "local", "tiny", 0.0, 60.0, None, b"no snapshot")
    other = msgspec.structs.replace(one, id="seq-2", model="gone")
    file_of(tmp_path / "data").write_bytes(msgspec.msgpack.encode([one, other]))
    with serving("--model", str(model), "--data-dir", "data", cwd=tmp_path) as (process, url):
        assert httpx.get(f"{url}/api/sequences").json()["sequences"] == []
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert all(f"the sequence {id} cannot go on: " in log for id in ("seq-1", "seq-2"))


async def test_a_damaged_file_of_sequences_is_told_and_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file_of(tmp_path).write_bytes(b"damaged")
    held = Sequences(most=1, most_tokens=1, longest_lease_s=1.0)
    assert await take_up(held, ModelRegistry.__new__(ModelRegistry), file_of(tmp_path)) == 0
    assert "is damaged: the sequences that it kept are lost" in caplog.text
    assert not list(tmp_path.iterdir())


class Stuck:
    """A sequence that says what it is, at once or never."""

    closed = False

    def __init__(self, answers: bool) -> None:
        self._answers = answers

    def __len__(self) -> int:
        return 1

    async def snapshot(self) -> bytes:
        if not self._answers:
            await asyncio.Event().wait()
        return b"a snapshot"

    def close(self) -> None:
        self.closed = True


async def test_a_stopping_server_is_held_up_neither_by_an_engine_nor_by_a_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistence, "KEEPING_S", 0.1)
    served: Any = SimpleNamespace(name="tiny")
    handles: list[Any] = [Stuck(True), Stuck(False)]
    with Sequences(most=5, most_tokens=50, longest_lease_s=60.0) as held:
        for number, handle in enumerate(handles):
            held.take_up(f"seq-{number}", "ana", served, handle, 60.0, 1.0, None)
        assert await persistence.keep(held, file_of(tmp_path)) == 1
        assert "1 sequences are kept, and there was no time for the rest" in caplog.text
        (one,) = msgspec.msgpack.decode(file_of(tmp_path).read_bytes(), type=list[PersistedSequences])
        assert (one.id, one.user, one.snapshot) == ("seq-0", "ana", b"a snapshot")
        assert await persistence.keep(held, tmp_path / "missing" / "file") == 0
        assert "cannot be written" in caplog.text
    file_of(tmp_path).unlink()
    file_of(tmp_path).mkdir()  # what cannot be read
    assert await take_up(held, ModelRegistry.__new__(ModelRegistry), file_of(tmp_path)) == 0
    assert "cannot be read and removed" in caplog.text
