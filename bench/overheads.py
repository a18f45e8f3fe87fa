"""Costs that should be next to nothing: a fork of a live sequence, and a server that nobody talks to."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from engine import GREEDY, Engine, EngineConfig, Span


async def fork(model: Path) -> dict[str, Any]:  # Any: plain JSON
    """Microseconds for a fork of a 1,000-token sequence with live K/V: the caller's part, and the core's with it."""
    async with await Engine.start(EngineConfig(str(model))) as engine, await engine.open([11, 12] * 500) as seq:
        await seq.generate_all(Span(GREEDY, max_tokens=1, ignore_eos=True))
        call, both = [], []
        for _ in range(20):
            await engine.stats()
            start = time.perf_counter()
            kids = [seq.fork()[0] for _ in range(50)]
            call.append((time.perf_counter() - start) / len(kids))
            await engine.stats()  # commands keep their order: the core has done all forks when this is answered
            both.append((time.perf_counter() - start) / len(kids))
            for kid in kids:
                kid.close()
    return {"call_us": statistics.median(call) * 1e6, "with_core_us": statistics.median(both) * 1e6}


def idle(model: Path, seconds: float = 10.0) -> dict[str, Any]:  # Any: plain JSON
    """CPU seconds that a started server uses while nobody talks to it, for `seconds`."""
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "app.cli", "serve", "--port", "0", "--model", str(model), "--data-dir", data]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            try:
                assert server.stdout is not None
                for line in server.stdout:
                    if "ready at" in line:
                        break
                else:
                    raise RuntimeError("the server ended before it was ready")
                process = psutil.Process(server.pid)
                asyncio.run(asyncio.sleep(2))  # leftovers of the start are not idling
                before = process.cpu_times()
                time.sleep(seconds)
                after = process.cpu_times()
            finally:
                server.terminate()
    used = max(0.0, after.user + after.system - before.user - before.system)
    return {"seconds": seconds, "cpu_seconds": used, "cpu_share": used / seconds}
