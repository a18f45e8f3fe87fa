"""Tests what one tenant may have of the cache when others want it too, and that it may have everything when they do
not."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import EngineConfig, InvalidParameter
from engine.core import messages as m
from engine.kv_cache.eviction import EvictionOrder
from tests.engine.core.test_scheduler import Bench


def ask(bench: Bench, id: int, length: int, tenant: str, count: int = 1) -> None:
    bench.open(id, length, first=id, tenant=tenant)
    bench.generate(id, count)
    bench.drain()
    bench.core.handle(m.Close(id))
    bench.core.check()


def again(bench: Bench, id: int, length: int, tenant: str, *, first: int) -> int:
    """Tokens that must be computed of a prompt that was asked before as `first`."""
    bench.open(id, length, first=first, tenant=tenant)
    bench.generate(id, 1)
    ran = sum(count for _, count in bench.step()[0])
    bench.drain()
    bench.core.handle(m.Close(id))
    return ran


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_who_has_more_than_its_share_loses_blocks_before_others_that_are_older(share: float) -> None:
    bench = Bench(blocks=12, budget=64, kv_tenant_share=share)
    ask(bench, 1, 13, "b")  # three full blocks, and the oldest
    ask(bench, 2, 29, "a")  # seven
    ask(bench, 3, 13, "c")  # two more than there are empty
    assert again(bench, 4, 13, "b", first=1) == (1 if share < 1 else 9)


def test_a_tenant_alone_may_have_everything() -> None:
    bench = Bench(blocks=10, budget=64, kv_tenant_share=0.2)
    for id in (1, 2):
        ask(bench, id, 17, "a")
    assert bench.pool.cached == 8
    assert again(bench, 3, 17, "a", first=1) == 1


def test_idle_sequences_of_who_has_too_much_lose_their_kv_first() -> None:
    bench = Bench(blocks=10, budget=64, kv_tenant_share=0.5)
    for id, tenant in ((1, "b"), (2, "a"), (3, "a")):
        bench.open(id, 12, first=id, tenant=tenant)
        bench.generate(id, 1)
        bench.drain()
    bench.open(4, 11, first=4, tenant="c")
    bench.generate(4, 1)
    bench.drain()
    assert bench.core._sequences[1].table and not bench.core._sequences[2].table


def test_running_sequences_of_who_has_too_much_give_way_first() -> None:
    bench = Bench(blocks=12, budget=64, kv_tenant_share=0.5)
    for id, length, tenant in ((1, 30, "a"), (2, 7, "b")):
        bench.open(id, length, first=id, tenant=tenant)
        bench.generate(id, 14)
    while bench.core.stats().preemptions == 0:
        bench.step()
    assert 1 in bench.core._scheduler.waiting and 2 in bench.core._scheduler.running  # though 2 is the youngest
    bench.drain()
    finished = [r.request for r in bench.core.take_replies() if isinstance(r, m.OutputPiece) and r.output.finish_reason]
    assert sorted(finished) == [101, 102]


def test_an_order_gives_up_what_a_group_has_too_much_of() -> None:
    order = EvictionOrder(4, share=0.5)
    for key in (b"b1", b"a1", b"a2", b"a3"):
        order.put(key, group=key[:1])
    assert [order.pop() for _ in range(5)] == [b"a1", b"b1", b"a2", b"a3", None]


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_other_shares_are_refused(share: float) -> None:
    with pytest.raises(InvalidParameter, match="up to 1"):
        EngineConfig(str(Path("none")), kv_tenant_share=share)
