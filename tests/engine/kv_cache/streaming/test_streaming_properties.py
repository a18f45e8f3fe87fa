"""A stateful property test of endless sequences beside others, with forks, cuts, crashes and a pool that is too small.

What a sequence sees is a function of its text: its sinks and the end that the rule leaves. The device checks that the
cache holds those tokens at those positions and nothing else. K/V that was moved is read by the sequence that moved it,
and its forks, alone: no digest names it, so nobody else finds it.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from engine.config import EngineConfig
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.step import Row, Step
from engine.kv_cache.block_pool import BlockPool
from engine.params import GREEDY, Span, StreamingWindow
from tests.engine.core.test_core_properties import CoreMachine, pick, tokens
from tests.engine.fake import FakeRunner, Letters


class WatchedMoves(FakeRunner):
    """Follows which slots hold K/V that was moved, or that was computed from such."""

    def __init__(self, pool: BlockPool, size: int, *, queues: bool) -> None:
        super().__init__(pool, size, queues=queues)
        self.moved: set[int] = set()
        self.moves = 0

    def run(self, step: Step) -> torch.Tensor:
        size = self._size
        for row in step.rows:
            for source, to in row.copies:
                for at in range(size):
                    self._mark(to * size + at, source * size + at in self.moved)
        for row in step.rows:
            if row.move is not None:
                self.moves += 1
                for _, to in row.move.pairs(row.seq.table, size):
                    self._mark(to, True)
        for row in step.rows:
            self._follow(row)
        found = super().run(step)
        named = {slot // size for slot in self.moved if self._pool._content[slot // size] is not None}
        assert not named, "a digest names K/V that depends on forgotten tokens"
        return found

    def _follow(self, row: Row) -> None:
        table, size = row.seq.table, self._size
        slots = [table[at // size] * size + at % size for at in range(row.end + len(row.draft))]
        reads = any(slot in self.moved for slot in slots[: row.start])
        assert not reads or row.seq.moved, "K/V that was moved is read by another"
        for slot in slots[max(row.start, row.seq.kv_len) :]:
            self._mark(slot, reads)

    def _mark(self, slot: int, moved: bool) -> None:
        (self.moved.add if moved else self.moved.discard)(slot)


class StreamingMachine(CoreMachine):
    """The same core, with a window in some sequences."""

    runner: WatchedMoves

    @initialize(
        blocks=st.integers(8, 24), size=st.sampled_from([1, 2, 4]), budget=st.integers(1, 9),
        running=st.integers(1, 5), prefix_cache=st.booleans(), loop=st.sampled_from(("plain", "overlapped", "auto")),
        wrong=st.sampled_from([None, 30]), sinks=st.integers(0, 2), pairs=st.integers(1, 2),
    )  # fmt: skip
    def start(
        self, blocks: int, size: int, budget: int, running: int, prefix_cache: bool, loop: str, wrong: int | None,
        sinks: int, pairs: int,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.wrong = wrong
        self.trees = False
        self.window = StreamingWindow(sinks * size, 2 * pairs * size)
        self.endless: set[int] = set()
        config = EngineConfig(
            "fake", block_size=size, max_batch_tokens=budget, max_running=running, prefix_cache=prefix_cache,
            loop=loop, context_shift=True,  # type: ignore[arg-type]
        )  # fmt: skip
        self.begin(blocks, config)

    def make_core(self) -> None:
        if hasattr(self, "core"):
            self.core.close()
        self.pool = BlockPool(self.blocks)
        self.runner = WatchedMoves(self.pool, self.config.block_size, queues=self.config.loop == "auto")
        self.core = EngineCore(
            self.config, self.runner, self.pool, Letters, (0,), b"secret", lambda: self.now,
            speculator=self.make_speculator(),
        )  # fmt: skip

    def is_endless(self, sequence: int) -> bool:
        while sequence in self.parents:
            sequence = self.parents[sequence]
        return sequence in self.endless

    def seen_by(self, sequence: int) -> list[int]:
        text = self.expected[sequence]
        if not self.is_endless(sequence):
            return text
        gone = self.window.forgotten(len(text))
        return [*text[: self.window.sinks], *text[self.window.sinks + gone :]]

    def start_span(self, sequence: int, count: int, prompt: bool, stop: tuple[str, ...] = ()) -> None:
        if not self.is_endless(sequence):
            super().start_span(sequence, count, prompt, stop)
        elif self.expected[sequence]:
            request, span = next(self.ids), Span(GREEDY, max_tokens=count, stop=stop)
            self.send(m.Generate(sequence, request, span, 0, count))
            self.spans[request], self.stops[request], self.texts[request] = (sequence, count), stop, ""

    @rule(given=st.lists(st.integers(1, 2), min_size=1, max_size=40), tenant=st.sampled_from(["", "", "other"]))
    def open_endless(self, given: list[int], tenant: str) -> None:
        sequence = next(self.ids)
        self.send(m.Open(sequence, tuple(given), tenant, 0, None, streaming=self.window))
        self.expected[sequence] = list(given)
        self.endless.add(sequence)
        self.start_span(sequence, 30, False)

    @rule(pick=pick, count=st.integers(1, 60))
    def go_on(self, pick: int, count: int) -> None:
        sequence = self.usable(pick)
        if self.is_endless(sequence):
            self.start_span(sequence, count, False)

    @rule(pick=pick, back=st.integers(0, 40), added=st.lists(st.integers(1, 2), max_size=30), count=st.integers(0, 9))
    def cut_back(self, pick: int, back: int, added: list[int], count: int) -> None:
        sequence = self.usable(pick)
        if self.is_endless(sequence):
            length = max(0, len(self.expected[sequence]) - back)
            self.send(m.Truncate(sequence, length))
            del self.expected[sequence][length:]
            self.send(m.Append(sequence, tuple(added)))
            self.expected[sequence] += added
            if count:
                self.start_span(sequence, count, False)

    @rule(pick=pick, added=tokens)
    def append(self, pick: int, added: list[int]) -> None:
        if self.is_endless(self.usable(pick)):
            sequence = self.usable(pick)
            self.send(m.Append(sequence, tuple(added)))
            self.expected[sequence] += added
        else:
            super().append(pick, added)

    @rule(pick=pick, candidates=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3))
    def score(self, pick: int, candidates: list[list[int]]) -> None:
        if not self.is_endless(self.usable(pick)):
            super().score(pick, candidates)


TestStreaming = pytest.mark.slow(StreamingMachine.TestCase)
TestStreaming.settings = settings(max_examples=100, stateful_step_count=40)
