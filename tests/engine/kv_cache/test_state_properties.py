"""The stateful property tests of the core with recurrent states, on a device that checks every state it advances.

Any order of opening, generating, forking, truncating and preempting, with few slots, with and without tiers that lose
and damage what they hold, must start each row at the state of just the tokens before it.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from engine.core.engine_core import EngineCore
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.state_checkpoints import StateCheckpoints
from tests.engine.core.test_core_properties import CoreMachine
from tests.engine.fake import FakeRunner, FakeStates, Letters
from tests.engine.kv_below import Disk, tiers_below
from tests.engine.kv_cache.test_kv_tier_properties import TieredMachine


class StateMachine(CoreMachine):
    """`CoreMachine` on a model with recurrent layers: one slot to five."""

    trees = False

    def make_core(self) -> None:
        if hasattr(self, "core"):
            self.core.close()
        self.pool, self.slots = BlockPool(self.blocks), BlockPool(1 + self.blocks % 5)
        queues, size = self.config.loop == "auto", self.config.block_size
        self.runner = FakeRunner(self.pool, size, queues=queues, states=FakeStates(self.slots))
        states = StateCheckpoints(self.slots, size, publishes=self.config.prefix_cache)
        states._interval = 2 * size  # so that short prompts have some
        self.core = EngineCore(
            self.config, self.runner, self.pool, Letters, (0,), b"secret", lambda: self.now, states=states,
            speculator=self.make_speculator(),
        )  # fmt: skip

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "core"):
            assert self.slots.used == 0, "states leaked"


class TieredStateMachine(TieredMachine):
    """`TieredMachine` with tiers below the states, too."""

    state_disk: Disk | None = None

    def make_runner(self) -> FakeRunner:
        self.slots = BlockPool(1 + self.blocks % 5, self.config.kv_tenant_share)
        self.fake_states = FakeStates(self.slots)
        return FakeRunner(self.pool, self.config.block_size, states=self.fake_states)

    def make_core(self) -> None:
        if self.state_disk is not None:
            self.state_disk.close()
        super().make_core()
        tiers, self.state_disk = tiers_below(
            self.slots,
            self.fake_states,
            self.worker,
            self.rows,
            keep=self.keep,
            directory=self.directory / "states" if self.most_files else None,
            files=self.most_files,
            clock=lambda: self.now,
        )
        size = self.config.block_size
        states = StateCheckpoints(self.slots, size, publishes=self.config.prefix_cache, tiers=tiers)
        states._interval = 2 * size
        self.core = EngineCore(
            self.config, self.runner, self.pool, Letters, (0,), b"secret", lambda: self.now, tiers=self.tiers,
            states=states, speculator=self.make_speculator(),
        )  # fmt: skip

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "core"):
            assert self.slots.used == 0, "states leaked"


del CoreMachine, TieredMachine  # their own tests are elsewhere
StateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestStates = StateMachine.TestCase
TieredStateMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestTieredStates = pytest.mark.slow(TieredStateMachine.TestCase)
