"""A server in a process of its own, with its memory, descriptors and threads."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.load.drive import PEBBLE
from bench.parts import Json
from bench.serve.load_client import LoadTarget


@dataclass(frozen=True, slots=True)
class BenchServer:
    process: subprocess.Popen[bytes]
    url: str

    @property
    def target(self) -> LoadTarget:
        return LoadTarget("ponder", f"{self.url}/v1", "default")

    def family(self) -> list[int]:
        """The process and all that descend from it."""
        found, ahead = [], [self.process.pid]
        while ahead:
            pid = ahead.pop()
            found.append(pid)
            for task in _listed(f"/proc/{pid}/task"):
                ahead += [int(child) for child in _read(f"/proc/{pid}/task/{task}/children").split()]
        return found

    def held(self) -> Json:
        """Returns the present resources of all of its processes together."""
        family = self.family()
        pss = [re.search(r"^Pss:\s+(\d+) kB", _read(f"/proc/{pid}/smaps_rollup"), re.MULTILINE) for pid in family]
        return {
            "pss_mib": sum(int(each[1]) for each in pss if each) / 1024,  # shared pages count once
            "descriptors": sum(len(_listed(f"/proc/{pid}/fd")) for pid in family),
            "threads": sum(len(_listed(f"/proc/{pid}/task")) for pid in family),
            "processes": len(family),
        }

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def serving(scratch: Path, *options: str, data: Path | None = None) -> Iterator[BenchServer]:
    """`ponder serve` of the bundled model, once it answers. Its log is `server.log` in `scratch`, and so is its data
    unless that is given a place of its own.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "app.cli", "serve", "--model", str(PEBBLE), "--port", str(port), *options]
    with (scratch / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--data-dir", str(data or scratch)], stdout=log, stderr=log, start_new_session=True
        )
    server = BenchServer(process, f"http://127.0.0.1:{port}")
    try:
        until(server.healthy, 60, lambda: process.poll() is None)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(true: Callable[[], bool], seconds: float, alive: Callable[[], bool] = lambda: True) -> float:
    """Wait for something to become true; how long that took. Raises TimeoutError."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > seconds or not alive():
            raise TimeoutError("it did not become true")
        time.sleep(0.05)
    return time.monotonic() - began


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
