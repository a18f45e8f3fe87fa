"""Tests the scheduler's promises, one a test, on the device that checks its own cache."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.kv_cache.block_pool import BlockPool
from engine.params import GREEDY, Span
from tests.engine.fake import FakeRunner, Letters

SIZE = 4


class Bench:
    """A core with a fake device and a clock that a test moves."""

    def __init__(self, blocks: int = 64, budget: int = 8, running: int = 8, **options: object) -> None:
        self.now = 0.0
        config = EngineConfig("fake", block_size=SIZE, max_batch_tokens=budget, max_running=running, **options)  # type: ignore[arg-type]  # test options
        self.pool = BlockPool(blocks, config.kv_tenant_share)
        self.runner = self.make_runner()
        self.core = EngineCore(config, self.runner, self.pool, Letters, (), b"secret", lambda: self.now)

    def make_runner(self) -> FakeRunner:
        return FakeRunner(self.pool, SIZE)

    def open(self, id: int, length: int, *, first: int = 1, priority: int = 0, tenant: str = "") -> None:
        """A sequence of `length` tokens; `first` makes its prefix its own."""
        tokens = (first % 4, first // 4 % 4, first // 16, *([1] * length))[:length]
        self.core.handle(m.Open(id, tokens, tenant, priority, None))

    def generate(self, id: int, count: int) -> None:
        self.core.handle(m.Generate(id, 100 + id, Span(GREEDY, max_tokens=count), 0, count))

    def step(self, times: int = 1) -> list[list[tuple[int, int]]]:
        """Runs steps; returns the rows of each, as (sequence, tokens) pairs."""
        before = len(self.runner.batches)
        for _ in range(times):
            self.core.step()
        return self.runner.batches[before:]

    def drain(self) -> None:
        while self.core.has_work:
            self.core.step()


def test_a_prefill_is_chunked_to_the_budget_and_decodes_go_first() -> None:
    bench = Bench(budget=8)
    bench.open(1, 3, first=1)
    bench.generate(1, 9)
    bench.step()
    bench.open(2, 20, first=2)
    bench.generate(2, 2)
    assert bench.step(3) == [[(1, 1), (2, 7)], [(1, 1), (2, 7)], [(1, 1), (2, 6)]]


def test_logits_of_prompts_are_read_in_pieces() -> None:
    """Each takes a vocabulary of memory: a step's are few, however long the prompts are."""
    bench = Bench(blocks=600, budget=4000)
    for id, length in ((1, 700), (2, 300), (3, 400)):
        bench.open(id, length, first=id)
        span = Span(GREEDY, max_tokens=1, prompt_logprobs=0 if id < 3 else None)
        bench.core.handle(m.Generate(id, 100 + id, span, 0, 1))
    assert bench.step(2) == [[(1, 512), (2, 1), (3, 400)], [(1, 188), (2, 299)]]


def test_a_twin_waits_for_the_prefix_that_is_being_computed_and_then_shares_it() -> None:
    bench = Bench(budget=8)
    for id in (1, 2):
        bench.open(id, 14)
        bench.generate(id, 1)
    assert bench.step(3) == [[(1, 8)], [(1, 6)], [(2, 2)]]
    assert bench.core.stats().prefix_hit_tokens == 12


def test_a_full_hit_recomputes_exactly_one_token() -> None:
    bench = Bench()
    bench.open(1, 8)
    bench.generate(1, 1)
    bench.drain()
    bench.open(2, 8)
    bench.generate(2, 1)
    assert bench.step() == [[(2, 1)]]
    assert bench.core.stats().prefix_hit_tokens == 7


def test_tenants_share_no_blocks() -> None:
    bench = Bench(budget=64)
    for id, tenant in ((1, "a"), (2, "b"), (3, "a")):
        bench.open(id, 9, tenant=tenant)
        bench.generate(id, 1)
        bench.drain()
    assert bench.runner.batches == [[(1, 9)], [(2, 9)], [(3, 1)]]


def test_a_fork_shares_full_blocks_and_copies_at_most_one_block_a_child() -> None:
    bench = Bench(budget=64)
    bench.open(1, 10)
    bench.generate(1, 1)
    bench.drain()
    used = bench.pool.used
    bench.core.handle(m.Fork(1, (2, 3, 4), 1))
    assert bench.pool.used == used
    for id in (2, 3, 4):
        bench.generate(id, 1)
    bench.drain()
    assert bench.pool.used == used + 3  # the parent keeps its partial block


def test_the_youngest_of_the_lowest_class_is_preempted_and_finishes_later() -> None:
    bench = Bench(blocks=9, budget=32)
    for id, priority in ((1, 0), (2, 1), (3, 0)):
        bench.open(id, 7, first=id, priority=priority)
        bench.generate(id, 12)
    while bench.core.stats().preemptions == 0:
        bench.step()
    assert 2 not in [id for id, _ in bench.runner.batches[-1]]
    bench.drain()
    finished = [r.request for r in bench.core.take_replies() if isinstance(r, m.OutputPiece) and r.output.finish_reason]
    assert sorted(finished) == [101, 102, 103]
    assert bench.core.stats().recomputed_tokens > 0


def test_a_waiting_sequence_of_low_priority_is_lifted_by_age() -> None:
    bench = Bench(running=1, ageing_s=10.0)
    bench.open(1, 3, first=1, priority=3)
    bench.generate(1, 1)
    bench.now = 31.0
    bench.open(2, 3, first=2, priority=0)
    bench.generate(2, 1)
    assert bench.step(2) == [[(1, 3)], [(2, 3)]]


def test_kv_kept_by_a_waiting_sequence_is_taken_when_another_cannot_run_without() -> None:
    bench = Bench(blocks=6, running=1)
    bench.open(1, 11, first=1, priority=1)
    bench.generate(1, 1)
    bench.drain()  # 1 is idle and keeps three blocks
    bench.open(2, 16, first=2)
    bench.generate(2, 8)  # needs all six in the end
    bench.generate(1, 2)
    bench.drain()
    finished = [r.request for r in bench.core.take_replies() if isinstance(r, m.OutputPiece) and r.output.finish_reason]
    assert finished == [101, 102, 101]


def test_idle_kv_goes_before_running_kv_and_held_kv_last() -> None:
    bench = Bench(blocks=8, budget=32)
    for id in (1, 2):
        bench.open(id, 7, first=id)
        bench.generate(id, 1)
        bench.drain()
    bench.core.handle(m.Hold(1, 60.0))
    bench.open(3, 20, first=3)
    bench.generate(3, 1)
    bench.drain()
    assert bench.core.stats().preemptions == 0
    bench.generate(2, 1)
    assert bench.step() == [[(2, 4)]]  # its one full block was found again, the rest is recomputed
    bench.generate(1, 1)
    assert bench.step() == [[(1, 1)]]  # the held one lost nothing


def test_closing_a_parent_closes_its_descendants_and_frees_their_blocks() -> None:
    bench = Bench()
    bench.open(1, 9)
    bench.core.handle(m.Fork(1, (2,), 1))
    bench.core.handle(m.Fork(2, (3,), 2))
    for id in (1, 2, 3):
        bench.generate(id, 50)
    bench.step(3)
    bench.core.handle(m.Close(1))
    assert bench.pool.used == 0 and not bench.core.has_work
    closed = [r.request for r in bench.core.take_replies() if isinstance(r, m.Closed)]
    assert sorted(closed) == [101, 102, 103]


def test_a_deadline_ends_the_span_and_closes_the_scope() -> None:
    bench = Bench()
    bench.core.handle(m.Open(1, (1, 2, 3), "", 0, 5.0))
    bench.core.handle(m.Fork(1, (2,), 1))
    bench.generate(2, 50)
    bench.step(2)
    assert bench.core.next_deadline() == 5.0
    bench.now = 5.0
    bench.step()
    last = bench.core.take_replies()[-1]
    assert isinstance(last, m.OutputPiece) and last.output.finish_reason == "deadline"
    assert bench.pool.used == 0 and bench.core.stats().sequences == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_without_the_prefix_cache_everything_is_computed(prefix_cache: bool) -> None:
    bench = Bench(budget=64, prefix_cache=prefix_cache)
    for id in (1, 2):
        bench.open(id, 9)
        bench.generate(id, 1)
        bench.drain()
    assert bench.runner.batches[1] == [(2, 1 if prefix_cache else 9)]
