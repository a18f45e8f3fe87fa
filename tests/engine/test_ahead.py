"""When steps are told to a device before the tokens of the one before are known, and when not."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine import messages as m
from engine.config import EngineConfig, PolicyName
from engine.core import EngineCore
from engine.kv.blocks import BlockPool
from engine.params import GREEDY, Sampling, Span
from engine.scheduler import MOST_FOLLOWED
from engine.step import Step
from tests.engine.fake import FakeRunner, Letters

Batch = list[tuple[int, int]]


class Told(FakeRunner):
    """Remembers of each step whether it was told ahead."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool, 4, queues=True)
        self.ahead: list[bool] = []

    def run(self, step: Step) -> torch.Tensor:
        self.ahead.append(step.drawn is not None)
        return super().run(step)


class Bench:
    """A core on a device that is told of steps ahead."""

    def __init__(self, budget: int = 8, running: int = 8, policy: PolicyName = "decode-first") -> None:
        self.now = 0.0
        pool = BlockPool(64)
        self.runner = Told(pool)
        config = EngineConfig("fake", block_size=4, max_batch_tokens=budget, max_running=running, policy=policy)
        self.core = EngineCore(config, self.runner, pool, Letters, (), b"secret", lambda: self.now)
        self.pieces: list[m.Piece] = []

    def ask(self, id: int, length: int, count: int, span: Span | None = None, deadline_s: float | None = None) -> None:
        self.core.handle(m.Open(id, (id % 4, *[1] * (length - 1)), "", 0, deadline_s))
        self.core.handle(m.Generate(id, id, span or Span(GREEDY, max_tokens=count), 0, count))

    def step(self, times: int = 1) -> list[Batch]:
        """What each step ran, as (sequence, tokens) pairs."""
        before = len(self.runner.batches)
        for _ in range(times):
            self.core.step()
            self.pieces += [reply for reply in self.core.take_replies() if isinstance(reply, m.Piece)]
        return self.runner.batches[before:]

    def finish(self) -> list[Batch]:
        before = len(self.runner.batches)
        while self.core.has_work:
            self.step()
        return self.runner.batches[before:]


def test_decodes_are_told_ahead_and_each_token_is_run_once() -> None:
    bench = Bench()
    bench.ask(1, 3, 12)
    bench.ask(2, 4, 20)
    bench.step(6)
    assert bench.runner.ahead == [False, *[True] * 5]
    bench.ask(3, 2, 5)  # what is told already comes before it, and no more
    assert bench.step(2) == [[(1, 1), (2, 1), (3, 2)], [(1, 1), (2, 1), (3, 1)]]
    assert bench.runner.ahead[6:] == [False, True]
    bench.finish()
    assert bench.core.stats().step_tokens == (3 + 11) + (4 + 19) + (2 + 4), "and none for nothing"
    assert bench.core.stats().prompt_tokens == 3 + 4 + 2
    assert bench.runner.ahead.count(False) == 2


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


def test_who_cannot_be_let_in_does_not_hold_the_device_up_and_is_looked_at_now_and_then() -> None:
    bench = Bench(running=1)
    bench.ask(1, 2, 50)
    bench.ask(2, 2, 2)
    batches = bench.finish()
    assert batches == [[(1, 2)], *[[(1, 1)]] * 49, [(2, 2)], [(2, 1)]]
    runs = [len(list(run)) for ahead, run in itertools.groupby(bench.runner.ahead) if ahead]
    assert runs == [MOST_FOLLOWED, MOST_FOLLOWED, 49 - 2 * (MOST_FOLLOWED + 1), 1]


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
    assert bench.runner.ahead == [False, *[ahead] * 5]


def test_a_deadline_does_not_wait_for_more_than_what_is_told() -> None:
    bench = Bench()
    bench.ask(1, 3, 100, deadline_s=5.0)
    bench.step(4)
    bench.now = 6.0
    bench.step()
    assert bench.pieces[-1].output.finish_reason == "deadline"
    assert len(bench.runner.batches) == 4 and not bench.core.has_work
