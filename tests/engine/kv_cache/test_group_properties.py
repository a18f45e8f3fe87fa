"""The stateful property tests of the core with K/V groups, on a device that checks every block that a query sees.

Any order of opening, generating, forking, truncating and preempting, with and without tiers that lose and damage what
they hold, must find in the windowed groups' blocks just the tokens of the window, and give the tokens of a fresh run.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.kv_groups import KVGroups
from tests.engine.core.test_core_properties import CoreMachine
from tests.engine.fake import FakeRunner, Letters
from tests.engine.kv_cache.test_kv_tier_properties import TieredMachine


def groups_of(blocks: int, config: EngineConfig) -> KVGroups:
    """Returns one or two windowed groups, with windows of 1 to 9 tokens that slide or are chunks."""
    number, size = blocks * 7 + config.block_size * 3 + config.max_running, config.block_size
    count = 1 + number % 2
    tables = (0, *range(1, 1 + count))
    return KVGroups(1 + number % 9, number % 3 == 0, 1, count, tables, (0,) * len(tables), size, config.step_tokens)


class GroupMachine(CoreMachine):
    """`CoreMachine` with windowed groups, in a pool for the longest sequence that the other machine has."""

    trees = False

    def make_core(self) -> None:
        if hasattr(self, "core"):
            self.core.close()
        size = self.config.block_size
        groups = groups_of(self.blocks, self.config)
        total = groups.blocks_for(self.limit)
        self.pool = BlockPool(total)
        self.runner = FakeRunner(self.pool, size, queues=self.config.loop == "auto", groups=groups)
        self.core = EngineCore(
            self.config, self.runner, self.pool, Letters, (0,), b"secret", lambda: self.now,
            speculator=self.make_speculator(), groups=groups,
        )  # fmt: skip
        assert groups.max_tokens(total) >= self.limit


class TieredGroupMachine(TieredMachine):
    """`TieredMachine` with windowed groups."""

    trees = False

    def begin(self, blocks: int, config: EngineConfig) -> None:
        self.groups = groups_of(blocks, config)
        super().begin(blocks, config)

    def make_runner(self) -> FakeRunner:
        total = self.groups.blocks_for(self.limit)
        self.pool = BlockPool(total, self.config.kv_tenant_share)
        return FakeRunner(self.pool, self.config.block_size, groups=self.groups)

    def make_core(self) -> None:
        super().make_core()
        self.core = EngineCore(
            self.config, self.runner, self.pool, Letters, (0,), b"secret", lambda: self.now, tiers=self.tiers,
            speculator=self.make_speculator(), groups=self.groups,
        )  # fmt: skip


del CoreMachine, TieredMachine  # their own tests are elsewhere
GroupMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestGroups = pytest.mark.slow(GroupMachine.TestCase)
TieredGroupMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestTieredGroups = pytest.mark.slow(TieredGroupMachine.TestCase)
