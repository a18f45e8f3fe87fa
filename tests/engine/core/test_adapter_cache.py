"""Residency of adapters on the real core: each row runs with its own, waits end, and nobody waits for another's load.

The model is a fake that records its sets of adapters; the clock moves a tenth of a second a step.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig, LoopName
from engine.core import messages as m
from engine.core.adapter_cache import ADAPTER_WAIT_S, AdapterCache
from engine.core.adapters import CoreAdapters
from engine.core.engine_core import EngineCore
from engine.core.request import NO_ADAPTER
from engine.core.step import Step
from engine.errors import CheckpointError
from engine.kv_cache.block_pool import BlockPool
from engine.params import GREEDY, Span
from tests.engine.fake import FakeRunner, Letters

STEP_S = 0.1
WAIT = round(ADAPTER_WAIT_S / STEP_S)  # steps


@dataclass(frozen=True)
class _Adapter:
    digest: str
    whole: bool = True

    def bare(self) -> _Adapter:
        return _Adapter(self.digest, whole=False)


class _Model:
    """Adapters that are their path. `broken` ones cannot be read, and `gate` holds up reads."""

    def __init__(self) -> None:
        self.resident: dict[int, str] = {}
        self.reads: list[str] = []
        self.broken: dict[str, str] = {}
        self.sizes: dict[str, int] = {}  # in bytes
        self.gate = threading.Event()
        self.gate.set()

    def adapter_bytes(self, adapter: _Adapter) -> int:
        return self.sizes.get(adapter.digest, 0)

    def read_adapter(self, adapter: str, base: str = "") -> _Adapter:
        self.gate.wait()
        self.reads.append(adapter)
        if self.broken.get(adapter) == "gone":
            raise CheckpointError("there is no directory.")
        return _Adapter(adapter + self.broken.get(adapter, ""))

    def with_adapters(self, adapters: Mapping[int, _Adapter], before: Any = None) -> dict[int, str]:  # Any: protocol's
        known = set() if before is None else set(before.values())
        assert all(each.whole or each.digest in known for each in adapters.values()), "matrices are lost"
        return {slot: each.digest for slot, each in adapters.items()}

    def use_adapters(self, adapters: dict[int, str]) -> None:
        self.resident = adapters


class _Runner(FakeRunner):
    """Checks that every row has a slot of its own adapter."""

    model: _Model
    core: EngineCore

    def run(self, step: Step) -> torch.Tensor:
        for row in step.rows:
            if row.seq.adapter != NO_ADAPTER:
                name, _ = self.core._adapters.name_of(row.seq)
                assert self.model.resident.get(row.seq.adapter_slot) == name, "a row runs with another's adapter"
        return super().run(step)


class Bench:
    """A core with adapters that are called by their numbers."""

    def __init__(
        self, known: int, slots: int, *, host: int | None = None, pinned: tuple[str, ...] = (), blocks: int = 64,
        sizes: tuple[int, ...] = (), **options: Any,
    ):  # fmt: skip
        """`sizes` of adapters in blocks. Any: fields of EngineConfig."""
        self.now, self.model, self.posted = 0.0, _Model(), SimpleQueue[m.Command]()
        config = EngineConfig("fake", block_size=4, **{"max_running": 2, "max_batch_tokens": 32, **options})
        self.pool = pool = BlockPool(blocks)
        self.model.sizes = {str(at): size for at, size in enumerate(sizes)}
        runner = _Runner(pool, 4, queues=config.loop == "auto")
        cache = AdapterCache(self.model, slots, host, clock=lambda: self.now)
        self.adapters = CoreAdapters(cache, pinned)
        self.adapters.load_all({str(at): str(at) for at in range(known)})
        self.adapters.share(pool, 1)
        make: Any = Letters  # any decoder
        self.core = EngineCore(
            config, runner, pool, make, (0,), b"secret", lambda: self.now, adapters=self.adapters
        )  # fmt: skip
        runner.model, runner.core = self.model, self.core
        self.core.post_with(self.posted.put)
        self.ids = count(1)
        self.step_at = 0
        self.ended: dict[int, tuple[int, m.Reply]] = {}  # by sequence: the step, and its last reply
        self.began: dict[int, int] = {}
        self.first: dict[int, int] = {}  # the step of the first token

    def ask(self, adapter: int | None, tokens: int = 3, prompt: int = 5) -> int:
        id = next(self.ids)
        name = "" if adapter is None else str(adapter)
        self.core.handle(m.Open(id, (*[1, 2] * (prompt // 2), 1 + id % 2)[:prompt], "", 0, None, name))
        self.core.handle(m.Generate(id, id, Span(GREEDY, max_tokens=tokens, ignore_eos=True), 0, tokens))
        self.began[id] = self.step_at
        return id

    def step(self, *, loads: bool = True) -> None:
        """Runs a step, after the worker is done unless it is held up."""
        if loads:
            self.adapters.cache._worker.submit(lambda: None).result()
        while not self.posted.empty():
            self.core.handle(self.posted.get())
        self.core.step()
        self.core.check()
        self.check_pool()
        self.step_at += 1
        self.now += STEP_S
        for reply in self.core.take_replies():
            if isinstance(reply, m.OutputPiece):
                self.first.setdefault(reply.request, self.step_at)
            if isinstance(reply, m.Closed) or (isinstance(reply, m.OutputPiece) and reply.output.finish_reason):
                self.ended[reply.request] = self.step_at, reply
                self.core.handle(m.Close(reply.request))

    def check_pool(self) -> None:
        """Asserts that all blocks are accounted for, and that what runs or is on its way in keeps its blocks."""
        stats, cache = self.core.stats(), self.adapters.cache
        adapters = stats.adapter_blocks_pinned + stats.adapter_blocks_used + stats.adapter_blocks_idle
        assert stats.blocks_used + stats.blocks_cached + stats.blocks_free + adapters == self.pool.total
        resident = {number: known for number, known in cache._known.items() if known.slot != NO_ADAPTER}
        assert adapters == sum(self.model.sizes.get(each.path, 0) for each in resident.values())
        assert len(resident) <= cache.slots
        running = {seq.adapter for seq in self.core._scheduler.running.values()} - {NO_ADAPTER}
        assert running <= resident.keys(), "an adapter in use was evicted"
        used = sum(len(resident[number].blocks) for number in running if not resident[number].pinned)
        loading = sum(len(each.blocks) for each in resident.values() if each.loading)
        assert used <= stats.adapter_blocks_used <= used + loading

    def drain(self, limit: int = 2000) -> None:
        while len(self.ended) < len(self.began) or self.core.has_work:
            self.step()
            assert self.step_at < limit, "a request never ends"

    def close(self) -> None:
        self.model.gate.set()
        self.core.close()


@settings(max_examples=40)
@given(
    slots=st.integers(1, 3),
    asked=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=25),
    host=st.integers(1, 4),
    pinned=st.booleans(),
    loop=st.sampled_from(get_args(LoopName)),
)
def test_any_order_of_requests_is_answered_each_by_its_own(
    slots: int, asked: list[tuple[int, int, int]], host: int, pinned: bool, loop: LoopName
) -> None:
    bench = Bench(6, slots, host=host, pinned=("0",) if pinned and slots > 1 else (), loop=loop)
    try:
        for adapter, steps, tokens in asked:
            bench.ask(None if adapter == 6 else adapter, tokens)
            for _ in range(steps):
                bench.step()
        bench.drain()
        assert all(isinstance(reply, m.OutputPiece) for _, reply in bench.ended.values())
        assert len(bench.model.resident) <= slots
    finally:
        bench.close()


@settings(max_examples=15)
@given(slots=st.integers(1, 2), cold=st.integers(1, 4), lengths=st.lists(st.integers(3, 60), min_size=2, max_size=3))
def test_a_wait_for_a_slot_is_bounded_while_resident_adapters_are_always_in_use(
    slots: int, cold: int, lengths: list[int]
) -> None:
    """Several requests of each resident adapter are open at any time; each cold adapter still gets its turn."""
    bench = Bench(slots + cold, slots, max_running=12)
    hot: dict[int, int] = {}  # requests of those that were resident at first, and their adapters
    try:
        asked, bound = [], (cold + 1) * 3 * WAIT
        for at in range(bound):
            for adapter in range(slots):
                for length in lengths[sum(id not in bench.ended for id, of in hot.items() if of == adapter) :]:
                    hot[bench.ask(adapter, length)] = adapter
            if at == WAIT:
                asked = [bench.ask(slots + each) for each in range(cold)]
            bench.step()
        for rank, id in enumerate(asked):
            assert id in bench.ended, "starved"
            assert bench.ended[id][0] - bench.began[id] <= (rank + 2) * 2 * WAIT
    finally:
        bench.close()


@settings(max_examples=60)
@given(
    blocks=st.integers(16, 40),
    sizes=st.lists(st.integers(0, 8), min_size=5, max_size=5),
    asked=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 16), st.integers(1, 16)),
        min_size=1,
        max_size=25,
    ),
    slots=st.integers(1, 4),
    running=st.integers(1, 5),
    pinned=st.booleans(),
    cached=st.booleans(),
    loop=st.sampled_from(get_args(LoopName)),
)
def test_adapters_and_kv_share_the_pool_and_every_request_ends(
    blocks: int,
    sizes: list[int],
    asked: list[tuple[int, int, int, int]],
    slots: int,
    running: int,
    pinned: bool,
    cached: bool,
    loop: LoopName,
) -> None:
    """Of the 16 blocks or more, two adapters of 8 may not leave a request room: the pinned one has none then."""
    pins = ("0",) if pinned and slots > 1 and sizes[0] + max(sizes) <= 8 else ()
    bench = Bench(
        5, slots, pinned=pins, blocks=blocks, sizes=tuple(sizes), max_running=running,
        prefix_cache=cached, loop=loop,
    )  # fmt: skip
    try:
        for adapter, steps, tokens, prompt in asked:  # of 8 blocks at most
            bench.ask(None if adapter == 5 else adapter, tokens, prompt)
            for _ in range(steps):
                bench.step()
        bench.drain()
        assert all(isinstance(reply, m.OutputPiece) for _, reply in bench.ended.values())
    finally:
        bench.close()


@pytest.mark.slow
@settings(max_examples=15)
@given(size=st.integers(2, 8), cold=st.integers(1, 3), lengths=st.lists(st.integers(3, 40), min_size=3, max_size=5))
def test_a_wait_for_blocks_is_bounded_while_others_always_take_them(size: int, cold: int, lengths: list[int]) -> None:
    """More requests without an adapter are always open than the pool has room for; each cold adapter gets its turn."""
    bench = Bench(cold + 1, cold + 1, max_running=12, blocks=24, sizes=(0, *[size] * cold), prefix_cache=False)
    try:
        asked, others = [], list[int]()
        for at in range(250):
            while sum(id not in bench.ended for id in others) < len(lengths):
                others.append(bench.ask(None, lengths[len(others) % len(lengths)], 20))
            if at == WAIT:
                asked = [bench.ask(1 + each) for each in range(cold)]
            bench.step()
        for rank, id in enumerate(asked):
            assert id in bench.ended, "starved"
            assert bench.ended[id][0] - bench.began[id] <= (rank + 2) * 2 * WAIT
    finally:
        bench.close()


def test_running_requests_give_blocks_to_an_adapter_that_has_been_waited_for_long_enough() -> None:
    bench = Bench(2, 2, blocks=24, sizes=(0, 8), loop="plain")
    try:
        long = bench.ask(None, 28, 66)  # of 17 blocks, so 7 are left
        bench.step()
        cold = bench.ask(1)
        bench.drain()
        assert WAIT < bench.ended[cold][0] < bench.ended[long][0]
    finally:
        bench.close()


def test_requests_of_resident_adapters_go_first_while_another_is_loaded() -> None:
    bench = Bench(3, 2)
    try:
        bench.model.broken, bench.model.reads = {}, []
        bench.adapters.cache._host.clear()  # the next load reads files
        bench.model.gate.clear()
        cold, base, hot = bench.ask(2), bench.ask(None), bench.ask(0)
        for _ in range(6):
            bench.step(loads=False)
        assert {base, hot} <= bench.ended.keys() and cold not in bench.first
        assert bench.core.stats().adapters[2].loading
        bench.model.gate.set()
        bench.drain()
        assert bench.model.reads == ["2"]
    finally:
        bench.close()


def test_it_sleeps_while_a_load_is_all_there_is() -> None:
    bench = Bench(2, 1)
    try:
        bench.adapters.cache._host.clear()
        bench.model.gate.clear()
        bench.ask(1)
        bench.step(loads=False)
        assert not bench.core.has_work
        bench.model.gate.set()
        bench.drain()
    finally:
        bench.close()


def test_the_least_recently_used_leaves_and_a_pinned_one_stays() -> None:
    bench = Bench(4, 3, pinned=("1",))
    try:
        for adapter in (0, 1, 2, 0):
            bench.ask(adapter)
            bench.drain()
        bench.ask(3)
        bench.drain()
        assert set(bench.model.resident.values()) == {"0", "1", "3"}
        found = {each.name: each for each in bench.core.stats().adapters}
        assert (found["2"].evictions, found["2"].resident) == (1, False)
        assert (found["3"].loads, found["3"].resident, found["3"].opened, found["3"].generated_tokens) == (
            1,
            True,
            1,
            3,
        )
        assert found["3"].prompt_tokens == 5
    finally:
        bench.close()


def test_a_queued_request_has_its_adapter_before_its_turn() -> None:
    bench = Bench(3, 2, max_running=1)
    try:
        bench.ask(0, 30)
        bench.step()
        bench.ask(2)
        bench.step()
        bench.step()
        assert "2" in bench.model.resident.values()  # while the first runs on
        assert not bench.ended
        bench.drain()
    finally:
        bench.close()


def test_a_prefix_is_warmed_once_its_adapter_is_resident() -> None:
    bench = Bench(2, 1)
    try:
        bench.core.handle(m.Warm((1, 2, 1, 2), "", 0, "1"))
        bench.now += 1.0
        while not bench.core.stats().warmed_tokens:
            bench.step()
            assert bench.step_at < 50
        assert set(bench.model.resident.values()) == {"1"}
    finally:
        bench.close()


def test_one_that_is_unloaded_while_it_comes_in_leaves_its_slot() -> None:
    bench = Bench(2, 1)
    try:
        bench.adapters.cache._host.clear()
        bench.model.gate.clear()
        lost = bench.ask(1)
        bench.step(loads=False)
        bench.core.handle(m.UnloadAdapter(99, "1"))
        bench.core.handle(m.Close(lost))
        bench.model.gate.set()
        bench.step()
        bench.step()
        assert bench.model.resident == {}
        bench.ask(0)
        bench.drain()
        assert set(bench.model.resident.values()) == {"0"}
    finally:
        bench.close()


@pytest.mark.parametrize(("how", "said"), [("gone", "there is no directory"), ("changed", "are others than those")])
def test_files_that_are_gone_or_changed_end_the_requests_that_wait_alone(how: str, said: str) -> None:
    bench = Bench(3, 1, host=1)
    try:
        bench.model.broken = {"1": how}
        lost, other = bench.ask(1), bench.ask(None)
        bench.drain()
        reply = bench.ended[lost][1]
        assert isinstance(reply, m.Closed) and "adapter '1' cannot be loaded" in reply.reason and said in reply.reason
        assert isinstance(bench.ended[other][1], m.OutputPiece)
        bench.model.broken = {}
        again = bench.ask(1)
        bench.drain()
        assert isinstance(bench.ended[again][1], m.OutputPiece)
    finally:
        bench.close()


def test_the_host_tier_keeps_the_last_that_were_read() -> None:
    bench = Bench(4, 1, host=2)
    try:
        bench.model.reads = []
        for adapter in (3, 2, 3, 2):
            bench.ask(adapter)
            bench.drain()
        assert bench.model.reads == []  # the last two of the start
        bench.ask(0)
        bench.drain()
        assert bench.model.reads == ["0"]
    finally:
        bench.close()
