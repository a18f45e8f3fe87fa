"""The property test of the tiers, on a device that is told of steps ahead: no block is loaded that it still uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from engine.config import EngineConfig
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.step import Step
from engine.kv_cache.block_pool import BlockPool
from engine.params import GREEDY, Span
from tests.engine.fake import FakeRunner, Letters
from tests.engine.kv_below import Told, tiers_below
from tests.engine.kv_cache.test_kv_tier_properties import TieredMachine


class QueuedRunner(FakeRunner):
    """Steps, and copies down, are only begun: they use their blocks until they are waited for. What a step draws is
    waited for before the next one is told, or after that, if that one follows it."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        super().__init__(pool, block_size, queues=True)
        self._begun: dict[int, set[int]] = {}  # by number: the blocks that are used
        self._number = 0
        self._drew: list[int] = []

    def run(self, step: Step) -> torch.Tensor:
        waited = self._drew if step.sampled is None else self._drew[:-1]
        self._wait_for(waited[-1] if waited else 0)
        logits = super().run(step)
        self._begin({block for row in step.rows for block in row.seq.table})
        if len(logits):
            self._drew.append(self._number)
        return logits

    def save(self, pairs: list[tuple[int, torch.Tensor]]) -> None:
        super().save(pairs)
        self._begin({block for block, _ in pairs})

    def saved(self) -> None:
        self._begun.clear()

    def queued(self) -> Callable[[], None]:
        by_now = self._number

        return lambda: self._wait_for(by_now)

    def load(self, block: int, payload: torch.Tensor | memoryview) -> None:
        if any(block in blocks for blocks in self._begun.values()):
            self.races.append(block)
        super().load(block, payload)

    def _wait_for(self, number: int) -> None:
        self._begun = {each: blocks for each, blocks in self._begun.items() if each > number}

    def _begin(self, blocks: set[int]) -> None:
        self._number += 1
        self._begun[self._number] = blocks


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_block_comes_up_after_the_prefill_that_used_it_and_was_cancelled(tier: str, tmp_path: Path) -> None:
    pool = BlockPool(6)
    runner, worker = QueuedRunner(pool, 4), Told()
    rows, keep = (20, True) if tier == "host" else (6, False)
    tiers, _ = tiers_below(pool, runner, worker, rows, keep=keep, directory=tmp_path, files=20)
    settings = EngineConfig("fake", block_size=4, max_batch_tokens=8)
    core = EngineCore(settings, runner, pool, Letters, (0,), b"secret", tiers=tiers)

    def start(id: int, prompt: tuple[int, ...]) -> None:
        core.handle(m.Open(id, prompt, "", 0, None))
        core.handle(m.Generate(id, id, Span(GREEDY, max_tokens=1, ignore_eos=True), 0, 1))

    def finish() -> None:
        for _ in range(20):
            core.step()
            worker.work()
            core.handle(m.TransferDone())
        assert not core.has_work

    for id, prompt in ((1, (1, 2) * 10), (2, (2, 2, 1) * 7)):  # the second takes the place of the first
        start(id, prompt)
        finish()
        core.handle(m.Close(id))
    start(3, (1, 1, 2, 2) * 5)
    core.step()  # the device is told of a part of the prompt,
    core.step()  # and of the next
    core.handle(m.Close(3))
    start(4, (1, 2) * 10)
    finish()
    assert core.stats().tiers.host_hit_blocks + core.stats().tiers.disk_hit_blocks > 0
    assert not runner.races
    core.check()
    core.close()


class QueuedMachine(TieredMachine):
    """`TieredMachine` on that device."""

    def make_runner(self) -> FakeRunner:
        return QueuedRunner(self.pool, self.config.block_size)

    def step(self, times: int) -> None:
        for _ in range(times):
            super().step(1)
            self.worker.work(2)  # while the device is at it


del TieredMachine  # its own test is elsewhere
QueuedMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestQueuedCore = pytest.mark.slow(QueuedMachine.TestCase)
