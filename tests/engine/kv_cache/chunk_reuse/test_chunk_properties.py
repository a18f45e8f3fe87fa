"""A stateful property test of reused chunks: of two tenants, with prompts that name chunks and prompts that do not.

Each copied token is the prompt's own, at its position (the device checks all that it reads); it comes from a block of
the same tenant, model and adapter; and a prompt that names no chunk reads no K/V that was copied, or computed after a
copy. All else that holds of the core holds with chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from engine.config import ChunkReuseConfig, EngineConfig
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.step import Row, Step
from engine.kv_cache.block_pool import BlockPool
from tests.engine.core.test_core_properties import CoreMachine
from tests.engine.fake import FakeRunner, Letters

PASSAGES = (
    *([1, 2, 2, 1, 1, 2, 1, 1], [2, 1, 1, 2, 2, 2, 1, 2, 1], [2, 2, 2, 1, 2, 1, 1, 1, 2, 1, 2]),
    [1, 1, 2, 1, 2, 2, 2, 1, 1, 1],
)


class WatchedRunner(FakeRunner):
    """Follows which slots hold K/V that was copied from another place, or that depends on such."""

    def __init__(self, pool: BlockPool, size: int, *, queues: bool) -> None:
        super().__init__(pool, size, queues=queues)
        self.approximate: set[int] = set()
        self.copied = 0

    def run(self, step: Step) -> torch.Tensor:
        for row in step.rows:
            for source, to in row.copies:
                for at in range(self._size):
                    self._mark(to * self._size + at, source * self._size + at in self.approximate)
            if row.move is not None:
                for block in row.move.blocks:
                    content = self._pool._content[block]
                    assert content is not None and content.root == row.seq.root, "another tenant's chunk is copied"
                for _, to in row.move.pairs(row.seq.table, self._size):
                    self._mark(to, True)
                    self.copied += 1
        for row in step.rows:
            self._follow(row)
        return super().run(step)

    def _follow(self, row: Row) -> None:
        table, size = row.seq.table, self._size
        end = row.end + len(row.draft)
        slots = [table[at // size] * size + at % size for at in range(end)]
        reads = any(slot in self.approximate for slot in slots[: row.start])
        for at in range(row.start, end):
            if at >= row.seq.kv_len:
                self._mark(slots[at], reads)
            reads |= slots[at] in self.approximate
        assert not reads or row.seq.approximate_from is not None, "an exact sequence reads approximate K/V"

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        found = [source in self.approximate for source, _ in pairs]
        for (_, to), approximate in zip(pairs, found, strict=True):
            self._mark(to, approximate)
        super().move_kv(pairs)

    def _mark(self, slot: int, approximate: bool) -> None:
        (self.approximate.add if approximate else self.approximate.discard)(slot)


class ChunkMachine(CoreMachine):
    """The same core, with chunks in some prompts."""

    runner: WatchedRunner

    @initialize(
        blocks=st.integers(8, 60), size=st.sampled_from([1, 2, 4]), budget=st.integers(1, 9), running=st.integers(1, 5),
        head=st.integers(1, 3), loop=st.sampled_from(("plain", "overlapped")), wrong=st.sampled_from([None, 30]),
    )  # fmt: skip
    def start(self, blocks: int, size: int, budget: int, running: int, head: int, loop: str, wrong: int | None) -> None:
        self.now = 0.0
        self.wrong = wrong
        config = EngineConfig(
            "fake", block_size=size, max_batch_tokens=budget, max_running=running, loop=loop,  # type: ignore[arg-type]
            chunk_reuse=ChunkReuseConfig(recompute_tokens=head),
        )  # fmt: skip
        self.begin(blocks, config)

    def make_core(self) -> None:
        if hasattr(self, "core"):
            self.core.close()
        self.pool = BlockPool(self.blocks)
        self.runner = WatchedRunner(self.pool, self.config.block_size, queues=False)
        self.core = EngineCore(
            self.config, self.runner, self.pool, Letters, (0,), b"secret", lambda: self.now,
            speculator=self.make_speculator(),
        )  # fmt: skip

    @rule(
        chosen=st.lists(st.integers(0, len(PASSAGES) - 1), min_size=1, max_size=4),
        first=st.lists(st.integers(1, 2), max_size=3), tenant=st.sampled_from(["", "", "other"]),
        count=st.integers(1, 8),
    )  # fmt: skip
    def ask(self, chosen: list[int], first: list[int], tenant: str, count: int) -> None:
        tokens, spans = list(first), []
        for each in chosen:
            if len(tokens) + len(PASSAGES[each]) < self.limit - 2:
                spans.append((len(tokens), len(tokens) + len(PASSAGES[each])))
                tokens += PASSAGES[each]
        if not tokens:
            return
        sequence = next(self.ids)
        tokens.append(2)
        self.send(m.Open(sequence, tuple(tokens), tenant, 0, None, chunks=tuple(spans)))
        self.expected[sequence] = list(tokens)
        self.start_span(sequence, count, False)


TestChunks = pytest.mark.slow(ChunkMachine.TestCase)
TestChunks.settings = settings(max_examples=60, stateful_step_count=40)
