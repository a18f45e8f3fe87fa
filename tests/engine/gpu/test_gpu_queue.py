"""Tests the host's waits while a device works through launched steps, and the times that it learns."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine.config import EngineConfig
from engine.core import messages as m
from engine.core import output_processor
from engine.core.engine_core import EngineCore
from engine.core.output_processor import chosen_logprobs, token_logprobs
from engine.core.step import Step
from engine.kernels.buffers import to_device
from engine.kv_cache.block_pool import BlockPool
from engine.params import GREEDY, Span
from engine.structured_output.bitmask import Masks
from tests import pretended
from tests.engine.fake import FakeRunner, Letters, next_token
from tests.pretended import Machine

CUDA = torch.device("cuda")


class Slow(FakeRunner):
    """A device that takes a second a token, and is told so in no time. `log`: the launches and the waits."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool, 4, queues=True)
        self.now = self.free_at = 0.0
        self.log: list[str] = []
        self.told = 0

    def run(self, step: Step) -> torch.Tensor:
        self.free_at = max(self.now, self.free_at) + step.tokens
        self.told += 1
        self.log.append(f"told {self.told}")
        return to_device(super().run(step), CUDA)


class Run:
    """A core on such a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, budget: int = 4) -> None:
        pool = BlockPool(40)
        self.runner = runner = Slow(pool)

        class Timed(pretended.Event):
            def record(self, stream: pretended.Stream | None = None) -> None:
                super().record(stream)
                self.at, self.number = runner.free_at, runner.told

            def synchronize(self) -> None:
                super().synchronize()
                runner.now = max(runner.now, self.at)
                runner.log.append(f"done {self.number}")

        monkeypatch.setattr(torch.cuda, "Event", Timed)
        settings = EngineConfig("fake", block_size=4, max_batch_tokens=budget)
        self.core = EngineCore(settings, runner, pool, Letters, (0,), b"secret", lambda: runner.now)
        self.times: list[tuple[int, float]] = []
        monkeypatch.setattr(self.core._scheduler._policy, "ran", lambda d, r, s: self.times.append((d + r, s)))

    def ask(self, id: int, tokens: int, span: Span) -> list[m.OutputPiece]:
        self.core.handle(m.Open(id, (1,) * tokens, "", 0, None))
        self.core.handle(m.Generate(id, id, span, 0, 2))
        pieces: list[m.OutputPiece] = []
        while self.core.has_work:
            self.core.step()
            pieces += [reply for reply in self.core.take_replies() if isinstance(reply, m.OutputPiece)]
        return pieces


def test_steps_that_draw_nothing_are_timed_and_the_device_has_the_next_one_by_then(
    machine: Machine | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if machine is None:
        pytest.skip("a device that is there has its own clock")
    run = Run(monkeypatch)
    run.ask(1, 14, Span(GREEDY, max_tokens=2, ignore_eos=True))
    assert run.times == [(4, 4.0), (4, 4.0), (4, 4.0), (2, 2.0), (1, 1.0)]
    assert run.runner.log == [
        "told 1", "told 2", "done 1", "told 3", "done 2", "told 4", "done 3", "told 5", "done 4", "done 5"
    ]  # fmt: skip
    assert run.core.stats().step_seconds == run.runner.now == 15


def test_a_prompt_is_read_without_waiting_for_each_of_its_tokens(
    machine: Machine | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if machine is None:
        pytest.skip("a device that is there counts no waits")
    run = Run(monkeypatch)
    counts: list[Counter[str]] = []
    for id, tokens in ((1, 0), (2, 1), (3, 3), (4, 4)):  # in one step each, and one more for the second token
        before = machine.counts()
        k = 2 if tokens else None
        (first, *_) = run.ask(id, tokens or 1, Span(GREEDY, max_tokens=2, ignore_eos=True, prompt_logprobs=k))
        assert not tokens or len(first.output.prompt_logprobs or ()) == tokens
        counts.append(machine.counts() - before)
    plain, none, two, three = counts
    assert none - plain == Counter(sent=1), "which rows are drawn from"
    assert two - none == Counter(sent=1, fetched=1, waited=1), "the tokens that are asked for, and the answer"
    assert three == two


def test_candidates_are_read_in_one_go(machine: Machine | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine is None:
        pytest.skip("a device that is there counts no waits")
    run = Run(monkeypatch, budget=16)
    counts: list[Counter[str]] = []
    for id, candidates in ((1, ((1,),)), (2, ((1,), (2,), (3, 1))), (3, ((2, 1), (1, 2)))):  # each in a step
        before = machine.counts()
        run.core.handle(m.Open(id, (1, 2), "", 0, None))
        run.core.handle(m.Score(id, 10 + id, candidates))
        while run.core.has_work:
            run.core.step()
        [scored] = [reply for reply in run.core.take_replies() if isinstance(reply, m.Scored)]
        right = [[float(next_token([1, 2, *c[:at]]) == token) for at, token in enumerate(c)] for c in candidates]
        assert [[float(each > -0.1) for each in candidate] for candidate in scored.logprobs] == right
        counts.append(machine.counts() - before)
    assert [each["fetched"] for each in counts] == [1, 1, 1]


def test_logprobs_of_many_rows_are_those_of_each(machine: Machine | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_processor, "ROWS", 4)
    torch.manual_seed(0)
    logits = torch.randn(10, 50)
    tokens = [int(token) for token in torch.randint(50, (10,))]
    for k in (0, 3, 60):
        here, there = (token_logprobs(each, tokens, k) for each in (logits, to_device(logits, CUDA)))
        for one, other in zip(here, there, strict=True):
            assert one.token_id == other.token_id and one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-5)
    assert token_logprobs(to_device(logits[:0], CUDA), [], 3) == []
    rows, asked = [0, 0, 3, 9], [7, 7, 1, 49]
    chosen, queued = (chosen_logprobs(each, rows, asked) for each in (logits, to_device(logits, CUDA)))
    assert queued == pytest.approx(chosen, abs=1e-5) and chosen[0] == chosen[1]
    assert chosen == pytest.approx(
        [float(logits[at].log_softmax(-1)[token]) for at, token in zip(rows, asked, strict=True)]
    )
    assert chosen_logprobs(to_device(logits, CUDA), [], []) == []


class Even:
    """A mode that allows tokens of even ids, or all of them."""

    def __init__(self, forbids: bool) -> None:
        self.forbids = forbids

    def fill(self, row: object) -> bool:
        row[:] = 0x55555555  # type: ignore[index]  # of an array
        return self.forbids


def test_masks_are_sent_without_waiting_where_some_rows_need_none(machine: Machine | None) -> None:
    masks = Masks(40, CUDA)
    logits = torch.zeros(4, 40, device=CUDA)
    masks.start([Even(forbids) for forbids in (False, True, False, True)])  # type: ignore[misc]  # they stand for modes
    before = Counter() if machine is None else machine.counts()
    masks.apply(logits, [3, 2, 1, 0])
    assert machine is None or machine.counts() - before == Counter(sent=2)
    torch.cuda.synchronize()
    free = logits.isfinite().sum(1).tolist()
    assert free == [20, 40, 20, 40] and bool(logits[0, ::2].isfinite().all())
    masks.wait()
