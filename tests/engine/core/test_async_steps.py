"""Tests when steps are told to a device before the tokens of the one before are known, and when not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings, target
from hypothesis import strategies as st

from engine.config import EngineConfig, PolicyName
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.scheduler import MAX_STEPS_AHEAD
from engine.core.step import Step
from engine.kv_cache.block_pool import BlockPool
from engine.outputs import SpanOutput
from engine.params import GREEDY, RepetitionDetection, Sampling, Span
from engine.structured_output.bitmask import Constraints, Masks
from engine.structured_output.layout import Constrained, Layout
from tests.engine.core import test_scheduler
from tests.engine.fake import VOCAB, FakeRunner, Letters
from tests.engine.structured_output.test_constrained_spans import ANY, Shelf
from tests.engine.structured_output.words import Words

Batch = list[tuple[int, int]]


class Told(FakeRunner):
    """Remembers of each step whether it was told ahead."""

    def __init__(self, pool: BlockPool, queues: bool) -> None:
        super().__init__(pool, 4, queues=queues)
        self.ahead: list[bool] = []

    def run(self, step: Step) -> torch.Tensor:
        self.ahead.append(step.sampled is not None)
        return super().run(step)


class Bench(test_scheduler.Bench):
    """A core on a device that is told of steps ahead."""

    def __init__(self, *, queues: bool = True, **options: Any) -> None:  # Any: arguments of `Bench`
        self.queues = queues
        self.pieces: list[m.OutputPiece] = []
        super().__init__(**options)

    def make_runner(self) -> Told:
        self.told = Told(self.pool, self.queues)
        return self.told

    def ask(
        self, id: int, length: int, count: int, span: Span | None = None, *, tenant: str = "", in_s: float | None = None
    ) -> None:
        """`in_s`: seconds to its deadline."""
        self.core.handle(m.Open(id, (id % 4, *[1] * (length - 1)), tenant, 0, in_s))
        self.core.handle(m.Generate(id, id, span or Span(GREEDY, max_tokens=count), 0, count))

    def step(self, times: int = 1) -> list[Batch]:
        ran = super().step(times)
        self.pieces += [reply for reply in self.core.take_replies() if isinstance(reply, m.OutputPiece)]
        return ran

    def finish(self) -> list[Batch]:
        before = len(self.told.batches)
        while self.core.has_work:
            self.step()
        return self.told.batches[before:]


LANGUAGE = Words([(1,), (1, 1, 1), (1, 1, 1, 1)], 0)
LAYOUTS = [
    Layout(),
    Layout(begin=3, free=True),
    Layout(begin=3, end=2, free=True, several=True),
    Layout(free=True, openers=frozenset({1})),
    Layout(begin=3, end=2, free=True, think=(1, 2), thinking=True),
]


@st.composite
def spans(draw: st.DrawFn) -> Span:
    """Of all that may be asked for, some."""
    warm = Sampling(temperature=3.0, seed=draw(st.integers(0, 3)))
    sampling = draw(st.sampled_from([GREEDY, warm, warm, replace(warm, top_k=2), replace(warm, presence_penalty=0.5)]))
    count = draw(st.integers(1, 14))
    layout = draw(st.sampled_from([None, None, *LAYOUTS]))
    return Span(
        sampling,
        max_tokens=count,
        min_tokens=draw(st.integers(0, min(3, count))),
        stop=draw(st.sampled_from([(), (), ("bc",), ("dd", "cbb")])),
        stop_token_ids=draw(st.sampled_from([(), (), (2,)])) if layout is None else (),
        logprobs=draw(st.sampled_from([None, 1])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        constraint=None if layout is None else Constrained(ANY, layout),
        repetition_detection=draw(st.sampled_from([None, RepetitionDetection(3, 1, 2), RepetitionDetection(4, 2, 3)])),
    )


def outputs(
    asked: Sequence[tuple[Span, int]], *, blocks: int, running: int, budget: int, queues: bool
) -> tuple[object, int]:
    """Returns the output of each span on its prompt of so many tokens, and the number of steps scheduled ahead."""
    pool = BlockPool(blocks)
    runner = FakeRunner(pool, 4, queues=queues)
    config = EngineConfig("fake", block_size=4, max_batch_tokens=budget, max_running=running)
    constraints = Constraints(Shelf(LANGUAGE), Masks(VOCAB, torch.device("cpu")))  # type: ignore[arg-type]  # a double
    core = EngineCore(config, runner, pool, Letters, (0,), b"secret", constraints=constraints)
    for id, (span, length) in enumerate(asked, 1):
        core.handle(m.Open(id, (id % 4, *[1] * (length - 1)), "", 0, None))
        core.handle(m.Generate(id, id, span, span.sampling.seed or 0, span.max_tokens or 0))
    said: dict[int, list[SpanOutput]] = {}
    while core.has_work:
        core.step()
        for reply in core.take_replies():
            if isinstance(reply, m.OutputPiece):
                said.setdefault(reply.request, []).append(reply.output)
        core.check()
    told = {
        id: (
            [token for each in of for token in each.token_ids],
            "".join(f"{each.kind}{each.section}{each.text}" for each in of),
            [(each.token_id, round(each.logprob, 4)) for part in of for each in part.logprobs],
            [None if each is None else (each.token_id, round(each.logprob, 4)) for each in of[0].prompt_logprobs or ()],
            of[-1].finish_reason,
            of[-1].stop_reason,
        )
        for id, of in said.items()
    }
    assert len(told) == len(asked)
    return told, runner.followed


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.lists(st.tuples(spans(), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(8, 24), st.integers(1, 4), st.integers(2, 9),
)  # fmt: skip
def test_what_is_said_is_the_same(asked: list[tuple[Span, int]], blocks: int, running: int, budget: int) -> None:
    plain, none = outputs(asked, blocks=blocks, running=running, budget=budget, queues=False)
    ahead, some = outputs(asked, blocks=blocks, running=running, budget=budget, queues=True)
    assert ahead == plain
    target(float(some))
    assert not none


def test_decodes_are_told_ahead_and_each_token_is_run_once() -> None:
    bench = Bench()
    bench.ask(1, 3, 12)
    bench.ask(2, 4, 20)
    bench.step(6)
    assert bench.told.ahead == [False, *[True] * 5]
    bench.ask(3, 2, 5)  # steps launched already come before it, and no more
    assert bench.step(2) == [[(1, 1), (2, 1), (3, 2)], [(1, 1), (2, 1), (3, 1)]]
    assert bench.told.ahead[6:] == [False, True]
    bench.finish()
    assert bench.core.stats().step_tokens == (3 + 11) + (4 + 19) + (2 + 4), "and none for nothing"
    assert bench.core.stats().prompt_tokens == 3 + 4 + 2
    assert bench.told.ahead.count(False) == 2


def test_a_file_that_was_written_holds_nothing_up() -> None:
    bench = Bench()
    bench.ask(1, 3, 12)
    bench.step(3)
    bench.core.handle(m.TransferDone())
    bench.step(2)
    assert bench.told.ahead == [False, *[True] * 4]


def test_who_has_no_turn_in_a_step_has_one_in_the_next() -> None:
    """The second prompt takes all of its step."""
    bench = Bench(budget=2, policy="prefill-first")
    bench.ask(1, 2, 9)
    bench.step()
    bench.ask(2, 2, 9)
    assert bench.step(2) == [[(2, 2)], [(1, 1), (2, 1)]]


def test_who_waits_for_tokens_of_a_step_has_the_next() -> None:
    """The first prompt fills its step: the second is behind it, and there is room."""
    bench = Bench(budget=8)
    bench.ask(1, 8, 30)
    bench.ask(2, 8, 3)
    assert bench.step(2) == [[(1, 8)], [(1, 1), (2, 7)]]


def test_what_is_told_ahead_is_charged_to_its_tenant() -> None:
    bench = Bench(budget=8, policy="fair")
    bench.ask(1, 2, 40, tenant="has had much")
    bench.step(20)
    bench.ask(2, 20, 2, tenant="has had much")
    bench.ask(3, 20, 2, tenant="new")
    assert bench.step() == [[(1, 1), (3, 7)]]


def test_who_waits_for_a_prefix_that_is_being_computed_has_it_at_once() -> None:
    """Though another, behind it, cannot be let in."""
    bench = Bench(budget=64)
    bench.ask(1, 3, 60)
    bench.step(3)
    bench.ask(4, 17, 40)
    bench.core.handle(m.Open(8, (0, *[1] * 15, 2), "", 0, None))  # as the one before, but for its end
    bench.core.handle(m.Generate(8, 8, Span(GREEDY, max_tokens=4), 0, 4))
    bench.ask(3, 240, 4)
    assert bench.step(2) == [[(1, 1), (4, 17)], [(1, 1), (4, 1), (8, 1)]]


@pytest.mark.parametrize("length", range(1, 9))
def test_a_row_for_nothing_leaves_nothing(length: int) -> None:
    """Finds as many cached tokens as without a queue; where K/V ends with a block, the row had begun another."""

    def cached(queues: bool) -> int:
        bench = Bench(queues=queues)
        bench.ask(1, length, 20)
        bench.finish()
        drawn = [token for piece in bench.pieces for token in piece.output.token_ids]
        end = max(map(drawn.index, set(drawn)))  # of all that come, the token that comes first at the latest
        bench.ask(5, length, 20, Span(GREEDY, max_tokens=20, stop_token_ids=(drawn[end],)))  # 1 % 4 == 5 % 4
        bench.finish()
        bench.core.handle(m.Append(5, tuple(drawn[end:16])))  # as the other went on
        bench.core.handle(m.Generate(5, 9, Span(GREEDY, max_tokens=1), 0, 1))
        bench.finish()
        found = bench.pieces[-1].output.cached_tokens
        kept = length + end
        assert found > kept if kept % 4 == 0 else found == kept
        return found

    assert cached(queues=True) == cached(queues=False)


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_who_cannot_be_let_in_does_not_hold_the_device_up_and_is_looked_at_now_and_then(policy: PolicyName) -> None:
    bench = Bench(running=1, policy=policy)
    bench.ask(1, 2, 50)
    bench.ask(2, 2, 2)
    batches = bench.finish()
    assert batches == [[(1, 2)], *[[(1, 1)]] * 49, [(2, 2)], [(2, 1)]]
    runs = [len(list(run)) for ahead, run in itertools.groupby(bench.told.ahead) if ahead]
    assert runs == [MAX_STEPS_AHEAD, MAX_STEPS_AHEAD, 49 - 2 * (MAX_STEPS_AHEAD + 1), 1]


@pytest.mark.parametrize("by", ["length", "id", "string"])
def test_who_can_be_let_in_is_as_soon_as_it_is_known(by: str) -> None:
    """A span that ends by its length leaves its place to the next step; another has a row in that, for nothing."""
    plain = Bench()
    plain.ask(1, 3, 12)
    plain.finish()
    drawn = [token for piece in plain.pieces for token in piece.output.token_ids]
    first = next(at for at in range(4, 12) if drawn[at] not in drawn[:at] or at == 11)
    bench = Bench(running=2)
    stop = {"stop_token_ids": (drawn[first],)} if by == "id" else {"stop": (Letters().push(drawn[: first + 1]),)}
    count = first + 1 if by == "length" else 12
    bench.ask(1, 3, count, Span(GREEDY, max_tokens=count, **({} if by == "length" else stop)))
    bench.ask(2, 3, 40)
    bench.ask(3, 3, 2)
    batches = bench.finish()
    (came,) = [at for at, batch in enumerate(batches) if (3, 3) in batch]
    assert [batch[0] for batch in batches[1:came]] == [(1, 1)] * (first + (by != "length"))
    assert bench.pieces[-1].request == 2
    told = [token for piece in bench.pieces if piece.request == 1 for token in piece.output.token_ids]
    assert told == drawn[: first + (by != "id")]


@pytest.mark.parametrize(
    ("sampling", "ahead"),
    [
        (Sampling(temperature=0.9, top_p=0.8, logit_bias={1: 0.5}), True),
        (Sampling(temperature=0.0, repetition_penalty=1.2), False),
        (Sampling(temperature=0.0, presence_penalty=0.2), False),
        (Sampling(temperature=0.9, frequency_penalty=0.2), False),
    ],
)
def test_penalties_wait_for_the_tokens_that_they_count(sampling: Sampling, ahead: bool) -> None:
    bench = Bench()
    bench.ask(1, 3, 6, Span(sampling, max_tokens=6))
    bench.finish()
    assert bench.told.ahead == [False, *[ahead] * 5]


def test_a_deadline_does_not_wait_for_more_than_what_is_told() -> None:
    bench = Bench()
    bench.ask(1, 3, 100, in_s=5.0)
    bench.step(4)
    bench.now = 6.0
    bench.step()
    assert bench.pieces[-1].output.finish_reason == "deadline"
    assert len(bench.told.batches) == 4 and not bench.core.has_work
