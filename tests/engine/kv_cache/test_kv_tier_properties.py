"""The stateful property test of the core, with tiers below the pool: whatever is copied, damaged or refused, every
span gets the same tokens as a fresh run, and nothing is left behind.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.kv_cache.block_pool import BlockPool
from tests.engine.core.test_core_properties import CoreMachine
from tests.engine.fake import FakeRunner, Letters
from tests.engine.kv_below import Disk, Told, tiers_below


class TieredMachine(CoreMachine):
    """`CoreMachine` with a worker that works when a rule says so, and a disk that fails when one says so."""

    disk: Disk | None

    @initialize(
        blocks=st.integers(5, 14),
        size=st.sampled_from([1, 2, 4, 4]),
        budget=st.integers(1, 9),
        running=st.integers(1, 5),
        rows=st.sampled_from([1, 1, 2, 4, 12]),
        files=st.sampled_from([0, 0, 3, 40]),
        keep=st.booleans(),
        share=st.sampled_from([0.3, 1.0]),
        wrong=st.sampled_from([None, None, 0, 60]),
    )
    def start(
        self,
        blocks: int,
        size: int,
        budget: int,
        running: int,
        rows: int,
        files: int,
        keep: bool,
        share: float,
        wrong: int | None,
    ) -> None:
        self.now, self.wrong = 0.0, wrong
        self.directory = Path(tempfile.mkdtemp(prefix="ponder-tiers-"))
        self.rows, self.most_files, self.keep = rows, files, keep or not files
        self.disk = None
        self.begin(
            blocks,
            EngineConfig("fake", block_size=size, max_batch_tokens=budget, max_running=running, kv_tenant_share=share),
        )

    def make_runner(self) -> FakeRunner:
        return FakeRunner(self.pool, self.config.block_size)

    def make_core(self) -> None:
        """A fresh core, over an earlier one's files."""
        if self.disk is not None:
            self.disk.close()
        self.pool = BlockPool(self.blocks, self.config.kv_tenant_share)
        self.runner = self.make_runner()
        self.worker = Told()
        self.tiers, self.disk = tiers_below(
            self.pool,
            self.runner,
            self.worker,
            self.rows,
            keep=self.keep,
            directory=self.directory if self.most_files else None,
            files=self.most_files,
            clock=lambda: self.now,
        )
        self.core = EngineCore(
            self.config, self.runner, self.pool, Letters, (0,), b"secret", lambda: self.now, tiers=self.tiers,
            speculator=self.make_speculator(),
        )  # fmt: skip

    @rule(count=st.integers(1, 6))
    def work(self, count: int) -> None:
        self.worker.work(count)

    @precondition(lambda self: getattr(self, "disk", None) is not None)
    @rule(full=st.booleans())
    def fill(self, full: bool) -> None:
        assert self.disk is not None
        self.disk.full = full

    @precondition(lambda self: getattr(self, "disk", None) is not None)
    @rule(which=st.integers(0, 100), how=st.sampled_from(["cut", "flip", "remove"]))
    def damage(self, which: int, how: str) -> None:
        assert self.disk is not None
        files = self.disk.files()
        if not files:
            return
        path = files[which % len(files)]
        image = path.read_bytes()
        if not image:  # cut to nothing before
            return
        match how:
            case "cut":
                path.write_bytes(image[: which % len(image)])
            case "flip":
                at = which % len(image)
                path.write_bytes(image[:at] + bytes([image[at] ^ 1]) + image[at + 1 :])
            case _:
                path.unlink()

    def step(self, times: int) -> None:
        for _ in range(times):
            if not self.core.has_work:
                self.worker.work(1)
                self.core._scheduler.take_loaded()
            super().step(1)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        try:
            for _ in range(3000):
                if not (self.spans or self.scores):
                    break
                self.step(1)
            self.worker.close()
            self.core._scheduler.take_loaded()
            super().teardown()
            assert self.pool.used == 0 and not self.tiers.blocks, "blocks leaked"
            self.core.close()
            if self.disk is not None:
                assert len(self.disk.files()) <= self.tiers._max_files, "there are more files than there may be"
        finally:
            shutil.rmtree(self.directory)


del CoreMachine  # its own test is elsewhere
TieredMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestTieredCore = pytest.mark.slow(TieredMachine.TestCase)
