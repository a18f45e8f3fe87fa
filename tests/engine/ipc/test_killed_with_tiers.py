"""An engine whose process is killed finds its K/V on its disk, and goes on with the same tokens."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from engine import GREEDY, Engine, Span
from engine.ipc.supervisor import SupervisedLink
from tests.engine.kv_cache.test_kv_tiers import config, prompt

SPAN = Span(GREEDY, max_tokens=12, ignore_eos=True)


@pytest.mark.slow
async def test_blocks_on_disk_outlive_a_process_that_is_killed(random_model: Path, tmp_path: Path) -> None:
    plain = config(random_model, kv_blocks=200, prefix_cache=False)
    async with await Engine.start(plain) as engine, await engine.open(prompt(0, 60)) as seq:
        expected = [(await seq.generate_all(SPAN)).token_ids for _ in range(2)]
    tiered = replace(plain, prefix_cache=True, kv_disk_bytes=64 << 20, kv_dir=str(tmp_path), runs_in="process")
    async with await Engine.start(tiered) as engine, await engine.open(prompt(0, 60)) as seq:
        assert (await seq.generate_all(SPAN)).token_ids == expected[0]
        await seq.snapshot()
        while (await engine.stats()).tiers.written_blocks < 18:
            pass  # the disk is written to beside
        link = engine._link
        assert isinstance(link, SupervisedLink)
        os.kill(link.pid, signal.SIGKILL)
        again = await seq.generate_all(SPAN)
        assert again.token_ids == expected[1]
        assert (await engine.stats()).tiers.disk_hit_blocks == 71 // 4
