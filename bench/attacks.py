"""Measures whether users are served while others hold what they can: `python -m bench.attacks`.

A server of its own, and answers of a few tokens requested one after another: with nobody else there, and while each
kind of attacker holds its connections, in one run. Attackers are sockets of this process; the model is small, so that
the server dominates the times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from app.wire import raise_file_limit
from bench import hardware, report
from bench.sandbox import spread

_ASK = {
    "model": "default", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16, "ignore_eos": True,
    "temperature": 0,
}  # fmt: skip
_LONG = {**_ASK, "max_tokens": 400, "stream": True}
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def _asks(body: dict[str, Any]) -> bytes:
    sent = json.dumps(body).encode()
    return _HEAD + b"Content-Length: %d\r\n\r\n" % len(sent) + sent


ATTACKS: dict[str, tuple[float, bytes]] = {  # by name: the share of the connections, and the bytes that each sends
    "idle": (1.0, b""),
    "slow heads": (0.2, _HEAD + b"X-Slow: "),
    "slow bodies": (0.2, _HEAD + b"Content-Length: 100000\r\n\r\n{"),
    "deaf readers": (0.002, _asks(_LONG)),
    "long heads": (0.2, _HEAD + b"X: " + b"a" * 31_000),
    "garbage": (0.2, b"\x16\x03\x01" + b"\x00" * 500),
}


@contextmanager
def served(model: str) -> Iterator[tuple[str, int]]:
    """A server's address and its process."""
    with tempfile.TemporaryDirectory() as data, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), "--device", "cpu", "--model", model]
        process = subprocess.Popen([*command, "--data-dir", data], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None and "ready" in process.stdout.readline()
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait(30)


def measure(model: str, connections: int, answers: int) -> dict[str, Any]:  # Any: plain JSON
    """All figures; times in milliseconds of a whole answer."""
    raise_file_limit()
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200
    if connections > room:
        raise SystemExit(f"--connections is {connections}; accepted: at most {room}, as this process may open files.")
    before, parts = os.getloadavg(), dict[str, Any]()
    with served(model) as (url, pid), httpx.Client(base_url=url, timeout=120) as client:
        expected = _answered(client, 10)[1]
        for name, (share, sent) in ATTACKS.items():
            quiet, _ = _answered(client, answers)
            with ExitStack() as lines:
                count = max(1, round(connections * share))
                held = [lines.enter_context(_line(url, sent)) for _ in range(count)]
                times, texts = _answered(client, answers)
                parts[name] = {
                    "connections": len(held), "answers": len(times), "same_text": texts == expected,
                    "quiet_ms": spread(quiet), "attacked_ms": spread(times),
                    "median_ratio": round(spread(times)["p50"] / spread(quiet)["p50"], 3),
                    "memory_mib": _memory_mib(pid),
                }  # fmt: skip
            _until(lambda: len(os.listdir(f"/proc/{pid}/fd")) < 200)
    return {
        "date": datetime.date.today().isoformat(),
        "command": f"python -m bench.attacks --connections {connections} --answers {answers}",
        "slug": f"attacks-{hardware.slug()}",
        "hardware": hardware.describe(),
        "load": {"before": before, "after": os.getloadavg()},
        "parts": parts,
    }


def _answered(client: httpx.Client, count: int) -> tuple[list[float], set[str]]:
    times, texts = list[float](), set[str]()
    for _ in range(count):
        began = time.perf_counter()
        reply = client.post("/v1/chat/completions", json=_ASK).raise_for_status()
        times.append((time.perf_counter() - began) * 1e3)
        texts.add(reply.json()["choices"][0]["message"]["content"])
    return times, texts


@contextmanager
def _line(url: str, sent: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as line:
        line.sendall(sent)
        yield line


def _memory_mib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def _until(condition: Callable[[], bool]) -> None:
    """Wait for the server to meet the condition, at most a minute."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/pebble-draft")
    parser.add_argument("--connections", type=int, default=10_000, help="that the largest attack holds")
    parser.add_argument("--answers", type=int, default=40, help="asked for in each part, 10 or more")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results")
    given = parser.parse_args()
    if given.answers < 10:
        parser.error(f"--answers is {given.answers}; accepted: 10 and more, for a spread to mean something.")
    results = measure(given.model, given.connections, given.answers)
    print(json.dumps(results, indent=1))
    if given.write:
        print(f"Kept in {report.save(results).relative_to(report.ROOT)}.")


if __name__ == "__main__":
    main()
