"""Constrained spans in the core, on the device that checks its own cache; bodies are lists of words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import get_args

import pytest
import torch

from engine.config import EngineConfig, LoopName
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.kv_cache.block_pool import BlockPool
from engine.outputs import SpanOutput
from engine.params import GREEDY, Span
from engine.structured_output.bitmask import Constraints, Masks
from engine.structured_output.compiler import Outcome
from engine.structured_output.layout import Constrained, Layout
from engine.structured_output.matcher import ConstraintFailed, ConstraintRefused, Row
from engine.structured_output.spec import Constraint, Literal
from tests.engine.fake import VOCAB, FakeRunner, Letters, next_token
from tests.engine.structured_output.words import WordMatcher, Words

EOS = 0
ANY = Literal("any")  # any compiled form that the test chooses


class Shelf:
    """A compiler whose constraints are ready, or come when the test says so."""

    def __init__(self, outcome: Outcome, *, ready: bool = True) -> None:
        self.outcome = outcome
        self.ready = ready
        self.cancelled = False
        self.waiting: list[Callable[[Outcome], None]] = []

    def get(self, constraint: Constraint, done: Callable[[Outcome], None], tenant: str) -> Outcome | None:
        if self.ready:
            return self.outcome
        self.waiting.append(done)
        return None

    def cancel(self, constraint: Constraint, done: Callable[[Outcome], None], tenant: str) -> bool:
        self.cancelled = done in self.waiting
        return self.cancelled


class Bench:
    """A core with its runner, and its spans' outputs."""

    loop: LoopName = "plain"

    def __init__(self, shelf: Shelf, blocks: int = 100) -> None:
        self.pool = BlockPool(blocks)
        settings = EngineConfig("fake", block_size=4, loop=self.loop)
        self.runner = FakeRunner(self.pool, 4, queues=self.loop == "auto")  # which is overlapped, and told ahead
        constraints = Constraints(shelf, Masks(VOCAB, torch.device("cpu")))  # type: ignore[arg-type]  # stands for it
        self.core = EngineCore(settings, self.runner, self.pool, Letters, (EOS,), b"secret", constraints=constraints)
        self.outputs: dict[int, list[SpanOutput]] = {}
        self.others: list[m.Reply] = []

    def start(self, id: int, tokens: Sequence[int], span: Span) -> None:
        """A sequence and a span on it, both numbered `id`."""
        self.core.handle(m.Open(id, tuple(tokens), "", 0, None))
        self.core.handle(m.Generate(id, id, span, 0, span.max_tokens or 20))

    def run(self) -> None:
        for _ in range(1000):
            self.read()
            if not self.core.has_work:
                return
            self.core.step()
            self.core.check()
        raise AssertionError("the core never ends")

    def read(self) -> None:
        for reply in self.core.take_replies():
            if isinstance(reply, m.OutputPiece):
                self.outputs.setdefault(reply.request, []).append(reply.output)
            else:
                self.others.append(reply)

    def said(self, id: int) -> tuple[int, ...]:
        return tuple(token for output in self.outputs[id] for token in output.token_ids)

    def finish(self, id: int) -> str | None:
        return self.outputs[id][-1].finish_reason


@pytest.fixture(params=get_args(LoopName), autouse=True)
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in both loops."""
    monkeypatch.setattr(Bench, "loop", request.param)


def constrained(layout: Layout | None = None, **more: object) -> Span:
    return Span(GREEDY, constraint=Constrained(ANY, layout or Layout()), **more)  # type: ignore[arg-type]  # a span's fields


def greedy(prompt: Sequence[int], language: Words) -> tuple[int, ...]:
    """Returns the fake model's text under a constraint, worked out from its definition."""
    said: list[int] = []
    while True:
        following = {word[len(said)] for word in language.words if word[: len(said)] == tuple(said) != word}
        if tuple(said) in language.words:
            following.add(EOS)
        wanted = next_token([*prompt, *said])
        token = wanted if wanted in following else min(following)
        if token == EOS:
            return tuple(said)
        said.append(token)


LANGUAGE = Words([(1, 2, 3, 1), (1, 2, 3, 2, 2), (2, 2), (2, 2, 1), (3, 3, 3, 3, 3, 3)], EOS)
PROMPTS = [(1,), (2, 1, 3), (3, 3, 1, 2, 2, 1), (1, 2, 1, 2, 1, 2, 1, 3, 3), (2,) * 7]


def test_a_constrained_span_writes_what_the_model_likes_best_of_what_it_may() -> None:
    bench = Bench(Shelf(LANGUAGE))
    for id, prompt in enumerate(PROMPTS):
        bench.start(id, prompt, constrained())
    bench.run()
    for id, prompt in enumerate(PROMPTS):
        assert bench.said(id) == greedy(prompt, LANGUAGE)
        assert bench.finish(id) == "stop"


def test_free_spans_beside_constrained_ones_say_what_they_say_alone() -> None:
    alone, together = Bench(Shelf(LANGUAGE)), Bench(Shelf(LANGUAGE))
    for id, prompt in enumerate(PROMPTS):
        alone.start(id, prompt, Span(GREEDY, max_tokens=9))
        together.start(id, prompt, Span(GREEDY, max_tokens=9))
        together.start(100 + id, prompt, constrained())
    alone.run()
    together.run()
    for id in range(len(PROMPTS)):
        assert together.said(id) == alone.said(id)


def test_preemption_does_not_change_a_constrained_text() -> None:
    rng = Random(3)
    language = Words([[rng.randint(1, 3) for _ in range(14)] for _ in range(300)], EOS)
    bench = Bench(Shelf(language), blocks=8)
    for id, prompt in enumerate(PROMPTS):
        bench.start(id, prompt, constrained(logprobs=0))  # so nothing is forced, and the sequences grow side by side
    bench.run()
    assert bench.core.stats().preemptions
    assert [bench.said(id) for id in range(len(PROMPTS))] == [greedy(prompt, language) for prompt in PROMPTS]


def test_forced_tokens_take_no_step_and_change_nothing() -> None:
    language = Words([(1, 2, 3, 1, 2, 3), (2, 3, 3, 3, 1, 1)], EOS)
    quick, slow = Bench(Shelf(language)), Bench(Shelf(language))
    quick.start(1, PROMPTS[1], constrained())
    slow.start(1, PROMPTS[1], constrained(logprobs=0))
    quick.run()
    slow.run()
    assert quick.said(1) == slow.said(1) == greedy(PROMPTS[1], language)
    assert len(quick.runner.batches) == 1, "the whole word follows from its first letter, and the end from the word"
    assert len(slow.runner.batches) == 6
    assert all(output.logprobs for output in slow.outputs[1])


def test_tokens_end_a_constrained_text_before_its_time() -> None:
    bench = Bench(Shelf(Words([(3, 3, 3, 3, 3, 3)], EOS)))
    bench.start(1, (1,), constrained(max_tokens=4))
    bench.run()
    assert (bench.said(1), bench.finish(1)) == ((3, 3, 3, 3), "length")


def test_the_constraint_says_where_a_text_ends_whatever_min_tokens_says() -> None:
    bench = Bench(Shelf(Words([(2, 2)], EOS)))
    bench.start(1, (1,), constrained(min_tokens=9, max_tokens=12))
    bench.run()
    assert (bench.said(1), bench.finish(1)) == ((2, 2), "stop")


def test_nobody_else_waits_while_a_constraint_is_compiled() -> None:
    shelf = Shelf(LANGUAGE, ready=False)
    bench = Bench(shelf)
    bench.start(1, PROMPTS[0], constrained())
    bench.start(2, PROMPTS[1], Span(GREEDY, max_tokens=5, ignore_eos=True))
    bench.run()
    assert len(bench.said(2)) == 5 and 1 not in bench.outputs
    [done] = shelf.waiting
    done(LANGUAGE)
    bench.run()
    assert bench.said(1) == greedy(PROMPTS[0], LANGUAGE)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_span_can_end_while_its_constraint_is_compiled(end: str) -> None:
    shelf = Shelf(LANGUAGE, ready=False)
    bench = Bench(shelf)
    bench.start(1, PROMPTS[2], constrained())
    bench.core.handle(m.Cancel(1, 1) if end == "cancel" else m.Close(1))
    bench.run()
    assert bench.finish(1) == "cancelled" if end == "cancel" else isinstance(bench.others[0], m.Closed)
    assert shelf.cancelled
    shelf.waiting[0](LANGUAGE)  # it was on its way already
    bench.run()
    assert not bench.runner.batches and bench.pool.used == 0


def test_a_refused_constraint_leaves_the_sequence_as_it_was() -> None:
    shelf = Shelf(ConstraintRefused(["JSON Schema keyword not supported: contains"]))
    bench = Bench(shelf)
    bench.start(1, PROMPTS[2], constrained())
    bench.run()
    assert bench.others == [m.RequestRefused(1, ("JSON Schema keyword not supported: contains",), False)]
    bench.core.handle(m.Generate(1, 2, Span(GREEDY, max_tokens=3, ignore_eos=True), 0, 3))
    bench.run()
    fresh = Bench(shelf)
    fresh.start(2, PROMPTS[2], Span(GREEDY, max_tokens=3, ignore_eos=True))
    fresh.run()
    assert bench.said(2) == fresh.said(2)


def test_sections_come_apart_from_the_text_around_them() -> None:
    layout = Layout(begin=2, end=3, several=True)
    bench = Bench(Shelf(Words([(1, 1), (1,)], EOS)))
    bench.start(1, PROMPTS[0], constrained(layout, max_tokens=12))
    bench.run()
    texts: dict[int, str] = {}
    for output in bench.outputs[1]:
        texts[output.section] = texts.get(output.section, "") + output.text
        assert output.kind == "body" or not output.text
    said = "".join("abcd"[token] for token in bench.said(1))
    assert "".join(texts.values()) == said.replace("c", "").replace("d", ""), "the markers are no text"
    assert set(texts.values()) <= {"b", "bb", ""}
    assert said.startswith("cb")


def test_stop_strings_are_for_the_answer_not_for_sections() -> None:
    inside = Bench(Shelf(Words([(1, 1)], EOS)))
    inside.start(1, (1,), constrained(Layout(begin=2, end=3), stop=("bb",)))
    inside.run()
    assert inside.said(1) == (2, 1, 1, 3)
    whole = Bench(Shelf(Words([(1, 1, 1)], EOS)))
    whole.start(1, (1,), constrained(stop=("bb",)))
    whole.run()
    assert whole.outputs[1][-1].stop_reason == "bb"


class Stuck(Words):
    """Fails, one way or the other, where its only word has come to its second letter."""

    def __init__(self, *, shows: bool) -> None:
        super().__init__([(1, 1), (1, 2)], EOS)
        self.shows = shows

    def matcher(self) -> WordMatcher:
        return StuckMatcher(self, ())


class StuckMatcher(WordMatcher):
    def fill(self, row: Row) -> None:
        if self._taken and not self._of.shows:  # type: ignore[attr-defined]  # it is a Stuck
            raise ConstraintFailed("no token fits")
        super().fill(row)

    def accept(self, token: int) -> bool:
        return not self._taken and super().accept(token)


@pytest.mark.parametrize("shows", [False, True], ids=["has no mask", "takes nothing it shows"])
def test_a_constraint_that_cannot_go_on_ends_its_own_span_alone(shows: bool) -> None:
    bench = Bench(Shelf(Stuck(shows=shows)))
    bench.start(1, (1,), constrained())
    bench.start(2, PROMPTS[1], Span(GREEDY, max_tokens=5, ignore_eos=True))
    bench.run()
    [failed] = bench.others
    assert isinstance(failed, m.RequestFailed) and "no token" in failed.reason
    assert (bench.said(1), bench.finish(1)) == ((1,), None)
    alone = Bench(Shelf(LANGUAGE))
    alone.start(2, PROMPTS[1], Span(GREEDY, max_tokens=5, ignore_eos=True))
    alone.run()
    assert bench.said(2) == alone.said(2)
    bench.core.handle(m.Truncate(1, 2))
    bench.core.handle(m.Generate(1, 3, Span(GREEDY, max_tokens=2, ignore_eos=True), 0, 2))
    bench.run()
    assert len(bench.said(3)) == 2, "the sequence can be used again"


def test_a_span_with_a_constraint_cannot_ignore_its_end() -> None:
    with pytest.raises(ValueError, match="ignore_eos is True; accepted: False, in a span with a constraint"):
        constrained(ignore_eos=True)
