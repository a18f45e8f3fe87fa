"""Streams over HTTP: a server on the null model that keeps time, one API worker, and a reader in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil


def streams(where: str, *, count: int = 64, rate: float = 200.0, tokens: int = 1200) -> dict[str, Any]:
    """`count` chat streams of a model that writes `rate` tokens a second each: the gaps as their reader sees them."""
    with _server(where, 1 / rate, count) as (process, port):
        reader = [sys.executable, "-m", "bench.overhead.reader", str(port), str(count)]
        subprocess.run([*reader, "100"], check=True, capture_output=True)  # the first requests pay for first calls
        before = _cpu(process)
        read = subprocess.run([*reader, str(tokens)], check=True, capture_output=True, text=True)
        used = _cpu(process)
    figures: dict[str, Any] = json.loads(read.stdout)
    shares = {name: (used[name] - before[name]) / figures["seconds"] for name in used}
    return {"engine": where, "rate": rate, **figures, "cpu": shares}


def _cpu(process: psutil.Process) -> dict[str, float]:
    """CPU seconds so far of the server's process, and of its engine's where that has one."""
    each = {"server": process}
    for child in process.children():
        if "engine.ipc.child" in child.cmdline():
            each["engine"] = child
    return {name: sum(p.cpu_times()[:2]) for name, p in each.items()}


@contextmanager
def _server(where: str, step_s: float, rows: int) -> Iterator[tuple[psutil.Process, int]]:
    command = [sys.executable, "-m", "bench.overhead.server", where, str(step_s), str(rows)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdin is not None
            yield psutil.Process(process.pid), int(process.stdout.readline())
            process.stdin.close()
            process.wait(20)
        finally:
            process.kill()
