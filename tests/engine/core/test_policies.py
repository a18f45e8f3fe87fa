"""Tests the promises of each scheduling policy, on the fake device, by a clock that runs as long as the steps would
take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.config import EngineConfig, PolicyName
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.policies import PrefillBudget, Queue
from engine.core.step import Step
from engine.errors import InvalidParameter
from engine.kv_cache.block_pool import BlockPool
from engine.params import GREEDY, Span
from tests.engine.fake import FakeRunner, Letters

pytestmark = pytest.mark.slow

SIZE = 4
FIXED, EACH = 0.010, 0.001  # seconds of a step, and of each of its tokens
POLICIES = get_args(PolicyName)


class Timed(FakeRunner):
    """Its steps take time by `World.now`."""

    def __init__(self, world: World) -> None:
        super().__init__(world.pool, SIZE)
        self._world = world

    def run(self, step: Step) -> Tensor:
        self._world.now += FIXED + EACH * step.tokens
        return super().run(step)


@dataclass
class Told:
    """Times of an answer's tokens and of its request, in seconds."""

    asked: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    ended: bool = False

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def ttft(self) -> float:
        return self.times[0] - self.asked


class World:
    """A core with one policy, and the replies to its clients."""

    def __init__(self, policy: str, *, budget: int = 64, running: int = 8, blocks: int = 2000, **more: object) -> None:
        self.now = 0.0
        self.pool = BlockPool(blocks)
        config = EngineConfig(
            "fake", block_size=SIZE, max_batch_tokens=budget, max_running=running, policy=policy, **more,  # type: ignore[arg-type]
        )  # fmt: skip
        self.runner = Timed(self)
        self.core = EngineCore(config, self.runner, self.pool, Letters, (), b"secret", lambda: self.now)
        self.heard: dict[int, Told] = {}

    def ask(self, id: int, length: int, count: int, *, priority: int = 0, tenant: str = "") -> Told:
        """A prompt of its own of `length` tokens, and `count` tokens for an answer."""
        tokens = (id % 4, id // 4 % 4, id // 16 % 4, id // 64 % 4, id // 256 % 4, *([1] * length))[:length]
        self.core.handle(m.Open(id, tokens, tenant, priority, None))
        return self.go_on(id, count)

    def go_on(self, id: int, count: int) -> Told:
        self.core.handle(m.Generate(id, id, Span(GREEDY, max_tokens=count, ignore_eos=True), 0, count))
        self.heard[id] = Told(self.now)
        return self.heard[id]

    def step(self) -> None:
        self.core.step()
        self.core.check()
        for reply in self.core.take_replies():
            if isinstance(reply, m.OutputPiece):
                told = self.heard[reply.request]
                told.times += [self.now] * len(reply.output.token_ids)
                told.text += reply.output.text
                told.ended = reply.output.finish_reason is not None

    def run(self, *, until: Told | None = None, seconds: float = 1e9) -> None:
        end = self.now + seconds
        while self.core.has_work and self.now < end and not (until is not None and until.ended):
            self.step()

    def tokens_of(self, ids: range, since: int = 0) -> int:
        return sum(count for batch in self.runner.batches[since:] for id, count in batch if id in ids)


asks = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 12), st.integers(0, 2), st.sampled_from("abc"), st.integers(0, 4)),
    min_size=1, max_size=12,
)  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25)
@given(asks=asks)
def test_whoever_runs_when_every_answer_is_what_it_would_be_alone(
    policy: str, asks: list[tuple[int, int, int, str, int]]
) -> None:
    world = World(policy, budget=24, running=3, blocks=40)
    for id, (length, count, priority, tenant, steps) in enumerate(asks, 1):
        world.ask(id, length, count, priority=priority, tenant=tenant)
        for _ in range(steps):
            world.step()
    world.run()
    for id, (length, count, priority, tenant, _) in enumerate(asks, 1):
        alone = World("fcfs")
        told = alone.ask(id, length, count, priority=priority, tenant=tenant)
        alone.run()
        assert world.heard[id].text == told.text and world.heard[id].ended
    assert world.core.stats().running == world.core.stats().waiting == 0


def burst(policy: str, **more: object) -> tuple[World, list[Told], Told]:
    """Four that decode, and then a long prompt."""
    world = World(policy, **more)  # type: ignore[arg-type]
    writers = [world.ask(id, 10, 300) for id in range(1, 5)]
    world.run(seconds=0.5)
    return world, writers, world.ask(9, 600, 5)


def test_decodes_wait_for_a_prompt_no_longer_than_the_stretch_allows() -> None:
    world, writers, reader = burst("decode-first")
    usual = FIXED + 4 * EACH
    at = len(writers[0].times)
    world.run(until=reader)
    gaps = writers[0].gaps[at:]
    assert reader.ended and max(gaps) <= max(1.8 * usual, FIXED + (4 + 16) * EACH) + 1e-9
    fixed, fixed_writers, fixed_reader = burst("decode-first", fixed_chunks=True)
    fixed.run(until=fixed_reader)
    assert max(fixed_writers[0].gaps) == pytest.approx(FIXED + 64 * EACH)
    assert fixed_reader.ttft < reader.ttft  # the cost of smooth decodes


def test_a_goal_for_the_time_between_tokens_is_kept_and_used() -> None:
    world, writers, reader = burst("decode-first", itl_goal_s=0.05)
    at = len(writers[0].times)
    world.run(until=reader)
    gaps = writers[0].gaps[at:]
    assert 0.045 < max(gaps) <= 0.05 + 1e-9


def test_prefill_first_answers_sooner_and_halts_the_others() -> None:
    world, writers, reader = burst("prefill-first")
    world.run(until=reader)
    usual, writers_usual, reader_usual = burst("decode-first")
    usual.run(until=reader_usual)
    assert reader.ttft < reader_usual.ttft
    assert max(writers[0].gaps) > 0.6 > max(writers_usual[0].gaps)  # all of the prompt is between two tokens


def test_who_comes_first_is_served_first_whatever_the_class() -> None:
    world = World("fcfs", running=2)
    told = [world.ask(id, 50, 10, priority=9 - id) for id in range(1, 9)]
    world.run()
    ends = [each.times[-1] for each in told]
    assert ends == sorted(ends)


def test_the_shortest_goes_first_but_a_long_one_is_not_put_off_for_ever() -> None:
    def waits(policy: str) -> tuple[float, float]:
        world = World(policy, running=2, ageing_s=1.0)
        long = world.ask(1, 800, 1)
        shorts = []
        for id in range(2, 120):  # one more whenever there is room: the device is never idle
            shorts.append(world.ask(id, 40, 1))
            world.step()
        world.run()
        return long.ttft, sum(short.ttft for short in shorts) / len(shorts)

    long, short = waits("shortest-first")
    long_by_arrival, short_by_arrival = waits("fcfs")
    assert short < short_by_arrival
    assert long_by_arrival < long < 15.0  # 800 tokens are 12.5 steps' worth: it is worth so many seconds of waiting


def test_a_better_class_takes_the_place_of_a_worse_one() -> None:
    world = World("priority", running=1)
    low = world.ask(1, 20, 50, priority=2)
    world.run(seconds=0.2)
    high = world.ask(2, 20, 5, priority=0)
    world.run(until=high)
    assert high.ended and not low.ended and world.core.stats().preemptions == 1
    world.run()
    assert low.ended and len(low.times) == 50
    usual = World("decode-first", running=1)
    low = usual.ask(1, 20, 50, priority=2)
    usual.run(seconds=0.2)
    high = usual.ask(2, 20, 5, priority=0)
    usual.run(until=high)
    assert low.ended  # there a class orders waiting sequences, and preempts none


def test_equals_do_not_send_each_other_away() -> None:
    world = World("priority", running=2, ageing_s=0.05)
    told = [world.ask(id, 20, 60, priority=1) for id in range(1, 8)]
    world.run()
    assert all(each.ended for each in told) and world.core.stats().preemptions == 0


def test_a_low_class_is_delayed_and_never_starved() -> None:
    world = World("priority", running=1, ageing_s=0.5)
    low = world.ask(1, 20, 5, priority=3)
    better = []
    for id in range(2, 400):  # more than it can serve
        better.append(world.ask(id, 20, 5, priority=0))
        world.step()
    world.run()
    assert low.ended and min(told.times[-1] for told in better) < low.times[-1]
    later = [told for told in better if told.asked > 3 * 0.5]  # what its class is worth
    assert len(later) > 100 and low.times[-1] < min(told.times[-1] for told in later)


def test_tenants_that_want_more_than_there_is_get_alike() -> None:
    world = World("fair", running=16, budget=64)
    for id in range(1, 41):  # one tenant asks for ten times as much
        world.ask(id, 200, 1, tenant="many")
    for id in range(101, 105):
        world.ask(id, 200, 1, tenant="few")
    since = len(world.runner.batches)
    while world.tokens_of(range(101, 105), since) < 700:
        world.step()
        many, few = world.tokens_of(range(1, 41), since), world.tokens_of(range(101, 105), since)
        assert abs(many - few) <= 64 + 8
    usual = World("decode-first", running=16, budget=64)
    for id in range(1, 41):
        usual.ask(id, 200, 1, tenant="many")
    late = usual.ask(101, 200, 1, tenant="few")
    fair = World("fair", running=16, budget=64)
    for id in range(1, 41):
        fair.ask(id, 200, 1, tenant="many")
    early = fair.ask(101, 200, 1, tenant="few")
    usual.run()
    fair.run()
    assert early.ttft < late.ttft / 10


def test_a_tenant_alone_has_all_of_it() -> None:
    fair, usual = World("fair"), World("decode-first")
    for world in (fair, usual):
        for id in range(1, 6):
            world.ask(id, 300, 3, tenant="a")
        world.run()
    assert fair.now == pytest.approx(usual.now, rel=0.02)


def test_a_tenant_that_holds_all_places_gives_one_up() -> None:
    world = World("fair", running=4)
    held = [world.ask(id, 10, 500, tenant="a") for id in range(1, 9)]
    world.run(seconds=0.2)
    other = world.ask(50, 10, 5, tenant="b")
    world.run(until=other)
    assert other.ttft < 0.2 and not any(told.ended for told in held)
    world.run()
    assert all(told.ended for told in held) and world.core.stats().preemptions >= 1


def test_a_static_batch_is_joined_by_nobody_until_all_of_it_is_done() -> None:
    world = World("static", running=4)
    first = [world.ask(id, 10, 5 * id) for id in (1, 2, 3)]
    world.step()
    late = world.ask(4, 10, 2)
    world.run(until=first[2])
    assert all(told.ended for told in first) and not late.times
    world.run()
    assert late.ended


def test_exclusive_steps_read_or_write() -> None:
    world = World("exclusive", budget=16)
    writer = world.ask(1, 10, 20)
    world.step()
    world.ask(2, 60, 3)
    world.run()
    assert max(writer.gaps) > 4 * (FIXED + 15 * EACH)  # the whole prompt was read in between
    assert all({count == 1 for _, count in batch} != {True, False} for batch in world.runner.batches)


def test_who_reserves_for_the_longest_leaves_places_empty() -> None:
    world = World("decode-first", blocks=40, reserve_tokens=40)  # ten blocks of four tokens each
    for id in range(1, 9):
        world.ask(id, 5, 6)
    world.run()
    assert max(len(batch) for batch in world.runner.batches) == 4


@pytest.mark.parametrize("policy", ["decode-first", "fcfs", "priority"])
def test_an_agents_next_turn_keeps_its_place(policy: str) -> None:
    world = World(policy, running=1)
    world.ask(1, 20, 3)
    world.run()
    others = [world.ask(id, 20, 30) for id in range(2, 6)]
    world.step()
    world.core.handle(m.Append(1, (1, 2, 3)))  # a tool's result
    turn = world.go_on(1, 3)
    world.run(until=turn)
    assert sum(other.ended for other in others) <= 1  # only running sequences went before it


def test_what_a_step_takes_is_learnt() -> None:
    chunks = PrefillBudget(512)
    assert chunks.budget(8) == 512  # nothing is known
    for decodes, reading in [(1, 0), (3, 40), (0, 300), (2, 510), (3, 0), (9, 90), (8, 200), (17, 0), (12, 64)]:
        chunks.ran(decodes, reading, FIXED + 3 * EACH * decodes + EACH * reading)
    assert chunks.costs == pytest.approx((FIXED, 3 * EACH, EACH))
    assert chunks.budget(0) == 512
    assert chunks.budget(20) == 20 + int(0.8 * (FIXED + 60 * EACH) / EACH)
    assert chunks.budget(1) == 1 + 16  # some of a prompt is read at any cost


def test_steps_of_nearly_as_many_decodes_do_not_make_a_decode_dear() -> None:
    """A full batch: one decode fewer now and then, in a step that is faster for another reason. By that difference a
    decode would take 5 ms, 64 of them 0.32 s, and a step so much of a prompt."""
    chunks = PrefillBudget(8192)
    alone = 0.007 + 64 * 36e-6
    for at in range(200):
        one_less, reading = at % 7 == 3, (0, 512, 40, 1000, 300)[at % 5]
        chunks.ran(64 - one_less, reading, alone - 0.005 * one_less + 15e-6 * reading)
    costs = chunks.costs
    assert costs is not None
    assert costs.step + 64 * costs.decode == pytest.approx(alone, rel=0.15)
    assert costs.read == pytest.approx(15e-6, rel=0.15)
    assert chunks.budget(64) == pytest.approx(64 + 0.8 * alone / 15e-6, rel=0.3)


def test_no_cost_is_less_than_nothing() -> None:
    """Steps that read more were faster, as they had fewer decodes: reading costs nothing then, and the rest explains
    the times."""
    chunks = PrefillBudget(512)
    for at in range(100):
        decodes = at % 10
        chunks.ran(decodes, 100 - 10 * decodes + at % 3, 0.001 + 0.002 * decodes + 0.0005 * (at % 2))
    costs = chunks.costs
    assert costs is not None and min(costs) >= 0
    for decodes in (1, 9):
        assert costs.step + decodes * costs.decode + costs.read * (100 - 10 * decodes) == pytest.approx(
            0.00125 + 0.002 * decodes, rel=0.25
        )


def test_a_long_queue_is_read_in_larger_pieces() -> None:
    chunks, goal = PrefillBudget(512), PrefillBudget(512, 0.05)
    for each in (chunks, goal):
        for reading in (0, 40, 300, 512, 3, 90, 200, 17):
            each.ran(8, reading, FIXED + EACH * 8 + EACH * reading)
    usual = chunks.budget(8)
    assert chunks.budget(8, Queue(1, 100)) == usual
    sizes = [chunks.budget(8, Queue(prompts, 200 * prompts)) for prompts in (1, 4, 6, 8, 50)]
    assert sizes == sorted(sizes) and sizes[0] == usual < sizes[2] < sizes[3] <= sizes[4] == 512
    for prompts in (5, 6):  # as fast as they have to be
        reading = chunks.budget(8, Queue(prompts, 200 * prompts)) - 8
        step_s = FIXED + EACH * 8 + EACH * reading
        assert 200 * prompts / reading * step_s == pytest.approx(0.5 + 4 * 200 * EACH, rel=0.05)
    assert goal.budget(8, Queue(50, 10_000)) == goal.budget(8)  # the goal is kept


def test_one_long_prompt_is_no_queue() -> None:
    chunks = PrefillBudget(512)
    for reading in (0, 40, 300, 512, 3, 90, 200, 17):
        chunks.ran(8, reading, FIXED + EACH * 8 + EACH * reading)
    assert chunks.budget(8, Queue(1, 100_000)) < 1.5 * chunks.budget(8)


def test_a_device_whose_steps_take_alike_is_not_held_back() -> None:
    chunks = PrefillBudget(512, 0.5)
    for tokens in range(1, 40):
        chunks.ran(tokens % 5, tokens, 0.01)
    assert chunks.budget(8) == 512


@pytest.mark.parametrize("bad", [{"policy": "luck"}, {"itl_goal_s": 0}, {"itl_goal_s": -1.0}])
def test_what_cannot_be_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter, match="accepted"):
        EngineConfig("fake", **bad)  # type: ignore[arg-type]
