"""Sequences that wait for a tool: the TTL of their KV pins, the order of reclaiming, and the way back."""

from __future__ import annotations

from engine.core import messages as m
from engine.kv_cache.allocation import LEARNT, MARGIN, NAMES, KVPins
from tests.engine.core.test_scheduler import Bench


def learnt(name: str, *seconds: float) -> KVPins:
    pins = KVPins()
    for each in seconds:
        pins.waited([name], each)
    return pins


def test_a_pin_lasts_as_long_as_nearly_all_waits_for_the_same_tool() -> None:
    pins = learnt("search", *([1.0] * 40), 2.0, 50.0)
    assert pins.ttl_s(["search"], 60.0) == MARGIN * 1.0
    assert pins.ttl_s(["other"], 60.0) == 60.0


def test_a_tool_that_takes_longer_than_may_be_held_is_not_waited_for() -> None:
    assert learnt("approval", *([300.0] * LEARNT)).ttl_s(["approval"], 60.0) == 0.0


def test_several_tools_are_waited_for_as_long_as_the_slowest_and_teach_about_that_one() -> None:
    pins = learnt("fast", *([0.1] * LEARNT))
    for _ in range(LEARNT):
        pins.waited(["slow"], 4.0)
    assert pins.ttl_s(["fast", "slow"], 60.0) == MARGIN * 4.0
    for _ in range(LEARNT):
        pins.waited(["fast", "slow"], 8.0)
    assert pins.expected("fast") == MARGIN * 0.1 and pins.expected("slow") == MARGIN * 8.0


def test_no_more_names_are_remembered_than_there_is_room_for() -> None:
    pins = KVPins()
    for at in range(NAMES + 10):
        for _ in range(LEARNT):
            pins.waited([f"tool {at}"], 1.0)
    assert pins.expected("tool 0") is None and pins.expected(f"tool {NAMES + 9}") is not None


def idle(bench: Bench, *ids: int) -> None:
    for id in ids:
        bench.open(id, 7, first=id)
        bench.generate(id, 1)
        bench.drain()


def test_kv_of_a_lapsed_pin_goes_first_and_of_a_live_one_last() -> None:
    bench = Bench(blocks=8, budget=32)
    idle(bench, 1, 2, 3)
    bench.core.handle(m.Hold(2, 5.0))
    bench.core.handle(m.Hold(1, 60.0))
    bench.now = 10.0
    order: list[int] = []
    scheduler = bench.core._scheduler
    while scheduler.idle:
        before = set(scheduler.idle)
        scheduler._reclaim(bench.core._sequences[1])
        order += before - set(scheduler.idle)
    assert order == [2, 3, 1]


def test_who_waits_does_not_take_held_kv_while_others_run() -> None:
    bench = Bench(blocks=9, budget=32)
    idle(bench, 1)
    bench.core.handle(m.Hold(1, 60.0))
    bench.open(2, 16, first=2)
    bench.generate(2, 4)
    bench.step()
    bench.open(3, 12, first=3)
    bench.generate(3, 1)
    bench.step()
    assert 3 in bench.core._scheduler.waiting and 1 in bench.core._scheduler.idle
    bench.drain()  # 2 is done, and nobody runs: now it may
    assert not bench.core._scheduler.waiting


def test_what_is_held_and_goes_on_is_counted_and_teaches_how_long_its_tool_takes() -> None:
    bench = Bench(budget=32)
    bench.open(1, 7)
    for _ in range(LEARNT):
        bench.generate(1, 1)
        bench.drain()
        bench.core.handle(m.Hold(1, 60.0, ("search",)))
        assert bench.core.stats().held == 1
        bench.now += 2.0
    bench.generate(1, 1)
    bench.drain()
    stats = bench.core.stats()
    assert (stats.resumed, stats.resumed_late, stats.held) == (LEARNT, 0, 0)
    assert stats.resumed_tokens == stats.resumed_reused_tokens == sum(range(7, 7 + LEARNT))
    bench.core.handle(m.Hold(1, 60.0, ("search",)))
    assert bench.core._sequences[1].pinned_until == bench.now + MARGIN * 2.0
