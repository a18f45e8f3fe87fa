"""Tests prefix warming in the core: when it runs, what it may take, and what it leaves."""

from __future__ import annotations

import pytest

from engine.core import messages as m
from engine.core.prefix_warming import IDLE_S, MAX_PREFIXES
from tests.engine.core.test_scheduler import SIZE, Bench


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    """The tokens that `Bench.open` gives a sequence."""
    return (first % 4, first // 4 % 4, first // 16, *([1] * length))[:length]


def warm(bench: Bench, length: int, *, first: int = 1, priority: int = 0, tenant: str = "") -> None:
    bench.core.handle(m.Warm(prompt(length, first), tenant, priority))


def idle(bench: Bench) -> None:
    """Lets the core warm whatever waits."""
    bench.now += IDLE_S
    bench.drain()
    bench.core.check()


def cached(bench: Bench, length: int, *, first: int = 1, tenant: str = "", id: int = 900) -> int:
    """Tokens of a prompt that a request finds cached."""
    bench.open(id, length, first=first, tenant=tenant)
    bench.generate(id, 1)
    bench.drain()
    found = next(r.output.cached_tokens for r in bench.core.take_replies() if isinstance(r, m.OutputPiece))
    bench.core.handle(m.Close(id))
    return found


def test_a_prefix_is_warmed_in_whole_blocks_and_a_request_finds_it() -> None:
    bench = Bench(budget=32)
    warm(bench, 22)
    idle(bench)
    assert sum(count for batch in bench.runner.batches for _, count in batch) == 20
    assert cached(bench, 30) == 20
    stats = bench.core.stats()
    assert (stats.warmed_tokens, stats.warmed_hit_tokens) == (20, 20)


def test_each_warmed_token_counts_as_a_hit_once_and_not_as_a_prompts() -> None:
    bench = Bench(budget=32)
    warm(bench, 20)
    idle(bench)
    assert bench.core.stats().prompt_tokens == 0
    assert bench.core.stats().prefix_query_tokens == 0
    cached(bench, 24, id=900)
    cached(bench, 24, id=901)
    stats = bench.core.stats()
    assert stats.warmed_hit_tokens == 20
    assert stats.prompt_tokens == 4 + 1  # a full hit recomputes a token


def test_nothing_is_warmed_until_the_core_was_idle_for_a_while() -> None:
    bench = Bench()
    warm(bench, 20)
    assert bench.core.next_deadline() == IDLE_S
    bench.now = IDLE_S / 2
    bench.open(1, 3, first=2)
    bench.generate(1, 1)
    bench.drain()
    assert bench.core.next_deadline() == IDLE_S / 2 + IDLE_S
    assert bench.core.stats().warmed_tokens == 0


def test_nothing_is_warmed_while_a_sequence_runs() -> None:
    bench = Bench()
    bench.open(1, 3, first=2)
    bench.generate(1, 50)
    bench.step()
    warm(bench, 20)
    bench.now += 10 * IDLE_S
    assert bench.core.next_deadline() is None
    assert all(batch == [(1, 1)] for batch in bench.step(40))


def test_a_request_that_arrives_meanwhile_waits_for_no_further_chunk() -> None:
    bench = Bench(blocks=128, budget=512)
    warm(bench, 200)
    bench.now += IDLE_S
    bench.core.step()
    assert bench.core.stats().warmed_tokens == 16  # nothing is known of the device's speed: the smallest chunk
    bench.open(1, 3, first=2)
    bench.generate(1, 3)
    assert bench.step(3) == [[(1, 3)], [(1, 1)], [(1, 1)]]
    assert bench.pool.used == 2  # the sequence's own
    idle(bench)
    assert bench.core.stats().warmed_tokens == 200  # the chunk of before was found in the cache


def test_the_chats_next_request_drops_what_is_left() -> None:
    bench = Bench(blocks=128)
    warm(bench, 64)
    warm(bench, 64, first=3)
    assert cached(bench, 70) == 0
    idle(bench)
    assert bench.core.stats().warmed_tokens == 64  # the other's alone


def test_another_tenant_does_not_find_it() -> None:
    bench = Bench(budget=32)
    warm(bench, 20, tenant="ana")
    idle(bench)
    assert cached(bench, 24, tenant="bob", id=900) == 0
    assert cached(bench, 24, tenant="ana", id=901) == 20


def test_what_is_cached_already_is_not_computed_again() -> None:
    bench = Bench(budget=32)
    cached(bench, 24)
    ran = len(bench.runner.batches)
    warm(bench, 24)
    idle(bench)
    assert len(bench.runner.batches) == ran


def test_blocks_of_open_sequences_are_never_taken() -> None:
    bench = Bench(blocks=8, budget=64)
    bench.open(1, 6 * SIZE - 1, first=2)
    bench.generate(1, 1)
    bench.drain()  # it is idle, and keeps its K/V
    warm(bench, 20)
    idle(bench)
    assert bench.core.stats().warmed_tokens == 2 * SIZE
    bench.generate(1, 1)
    assert bench.step() == [[(1, 1)]]


@pytest.mark.parametrize("finds", [1, 2])
def test_content_that_was_used_again_is_not_evicted_for_it(finds: int) -> None:
    bench = Bench(blocks=8, budget=64)
    for id in range(finds):
        cached(bench, 7 * SIZE, first=2, id=10 + id)
    warm(bench, 7 * SIZE)
    idle(bench)
    taken, left = {1: (7, 1), 2: (1, 7)}[finds]  # used once, and older; or used again
    assert bench.core.stats().warmed_tokens == taken * SIZE
    assert cached(bench, 7 * SIZE + 1, first=2) == left * SIZE


def test_a_lower_class_takes_no_content_of_a_higher_one() -> None:
    bench = Bench(blocks=8, budget=64)
    cached(bench, 8 * SIZE - 1, first=2)
    warm(bench, 7 * SIZE, priority=1)
    idle(bench)
    assert bench.core.stats().warmed_tokens <= SIZE


def test_the_oldest_is_dropped_when_too_many_wait() -> None:
    bench = Bench(blocks=512, budget=64)
    for first in range(1, MAX_PREFIXES + 2):
        warm(bench, SIZE, first=first)
    idle(bench)
    assert bench.core.stats().warmed_tokens == MAX_PREFIXES * SIZE
    assert cached(bench, SIZE + 1, first=1) == 0


def test_less_than_a_block_is_no_work() -> None:
    bench = Bench()
    warm(bench, SIZE - 1)
    assert bench.core.next_deadline() is None
