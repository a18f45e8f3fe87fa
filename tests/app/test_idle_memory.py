"""Memory is taken as it is used: an idle server is small, and a K/V pool costs what was written to it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from engine import GREEDY, Engine, EngineConfig, Span
from engine.kernels.buffers import zeros

if TYPE_CHECKING:
    from psutil import Process

psutil = pytest.importorskip("psutil", reason="psutil is not installed")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20


def resident(process: Process) -> int:
    """Bytes of a process and its children, shared pages by their share."""
    return sum(each.memory_full_info().pss for each in (process, *process.children(recursive=True)))


def settle(process: Process, *, within: float = 30) -> None:
    """Returns once a process has started and ended no child for a second; fails after `within` seconds.

    A child counts its parent's memory as its own until it runs a program, and cannot be read once it ended.
    """
    until = time.monotonic() + within
    before: list[Process] = []
    while (now := process.children(recursive=True)) != before:
        assert time.monotonic() < until, now
        before = now
        time.sleep(1)


def test_zeros_take_no_memory_until_they_are_written() -> None:
    me = psutil.Process()
    before = me.memory_info().rss
    pool = zeros(256, MB, dtype=torch.uint8, device="cpu")
    assert me.memory_info().rss - before < 32 * MB
    assert pool[::16, :: MB // 4].sum() == 0
    pool[:128] = 1
    assert 128 * MB <= me.memory_info().rss - before < 256 * MB
    assert pool[128:, :8].sum() == 0


async def test_a_pool_grows_as_it_is_used(model: Path) -> None:
    me = psutil.Process()
    blocks = 400_000  # of 2 KiB in this model
    before = me.memory_info().rss
    async with await Engine.start(EngineConfig(str(model), dtype="float32", kv_blocks=blocks)) as engine:
        grown = me.memory_info().rss - before
        async with await engine.open(list(range(100, 200))) as seq:
            await seq.generate_all(Span(GREEDY, max_tokens=8))
        assert (await engine.stats()).blocks_free + (await engine.stats()).blocks_cached >= blocks - 8
        assert grown < 250 * MB  # of 800 MB: libraries that the engine imports, and the pool's bookkeeping


@pytest.mark.slow
def test_an_idle_server_is_under_700_mb(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app.cli", "serve", "--port", "0", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert any("ready at" in line for line in server.stdout)
            process = psutil.Process(server.pid)
            settle(process)  # sandboxes are tried and kept ready
            assert resident(process) < 700 * 10**6
        finally:
            server.terminate()
