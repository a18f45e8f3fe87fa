"""Repetition detection against its definition, and in spans with a constraint or a replay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.repetition import RepetitionDetector
from engine.kv_cache.block_pool import BlockPool
from engine.outputs import SpanOutput
from engine.params import RepetitionDetection, Sampling, Span
from engine.structured_output.bitmask import Constraints, Masks
from engine.structured_output.layout import Constrained, Layout
from tests.engine.fake import VOCAB, FakeRunner, Letters
from tests.engine.structured_output.test_constrained_spans import ANY, Shelf
from tests.engine.structured_output.words import Words

TWICE = Sampling(temperature=0.0, logit_bias={1: 100.0})  # the fake model then says nothing but 1


def repeats(tokens: Sequence[int], wanted: RepetitionDetection) -> bool:
    """The definition, word for word."""
    for size in range(wanted.min_pattern_size, wanted.max_pattern_size + 1):
        whole = size * wanted.min_count
        if len(tokens) >= whole and list(tokens[-whole:]) == list(tokens[-size:]) * wanted.min_count:
            return True
    return False


@st.composite
def detections(draw: st.DrawFn) -> RepetitionDetection:
    most = draw(st.integers(1, 6))
    return RepetitionDetection(most, draw(st.integers(1, most)), draw(st.integers(2, 5)))


@settings(max_examples=400)
@given(
    st.lists(st.one_of(st.lists(st.integers(0, 2), max_size=5), st.just([1, 2] * 6), st.just([0, 1, 2, 1] * 4))),
    detections(),
)
@example([[1, 2, 1, 2, 1, 2]], RepetitionDetection(2, 2, 3))
def test_a_pattern_is_found_where_the_definition_has_one(parts: list[list[int]], wanted: RepetitionDetection) -> None:
    detector, tokens = RepetitionDetector(wanted), list(chain.from_iterable(parts))
    for at, token in enumerate(tokens):
        assert detector.push(token) == repeats(tokens[: at + 1], wanted)


def test_no_pattern_reaches_over_what_is_cleared() -> None:
    detector = RepetitionDetector(RepetitionDetection(2, 1, 4))
    assert [detector.push(7) for _ in range(3)] == [False, False, False]
    detector.clear()
    assert [detector.push(7) for _ in range(4)] == [False, False, False, True]


def said(span: Span, language: Words | None = None, delivered: tuple[int, ...] = ()) -> tuple[list[int], str | None]:
    """Returns a span's tokens, and how it ended."""
    pool = BlockPool(50)
    constraints = Constraints(Shelf(language or Words([(1,)], 0)), Masks(VOCAB, torch.device("cpu")))  # type: ignore[arg-type]  # a double
    core = EngineCore(
        EngineConfig("fake", block_size=4), FakeRunner(pool, 4), pool, Letters, (0,), b"", constraints=constraints
    )
    core.handle(m.Open(1, (2, 3, 2), "", 0, None))
    core.handle(m.Generate(1, 1, span, 0, span.max_tokens or 20, delivered))
    outputs = list[SpanOutput]()
    while core.has_work:
        core.step()
        outputs += [reply.output for reply in core.take_replies() if isinstance(reply, m.OutputPiece)]
    return [token for output in outputs for token in output.token_ids], outputs[-1].finish_reason


@pytest.mark.parametrize("delivered", [0, 1, 5])
def test_a_replayed_span_ends_at_the_same_token(delivered: int) -> None:
    span = Span(TWICE, max_tokens=20, repetition_detection=RepetitionDetection(4, 1, 6))
    tokens, finish = said(span, delivered=(1,) * delivered)
    assert (len(tokens) + delivered, finish) == (6, "repetition")


def test_a_constrained_body_may_repeat_itself() -> None:
    language = Words([(1,) * 12], 0)
    span = Span(TWICE, max_tokens=20, repetition_detection=RepetitionDetection(4, 1, 6))
    body = Constrained(ANY, Layout())
    assert said(Span(TWICE, 20, constraint=body), language) == said(
        Span(TWICE, 20, constraint=body, repetition_detection=span.repetition_detection), language
    )


def test_free_text_around_a_constrained_body_may_not() -> None:
    layout = Layout(begin=3, end=2, free=True, several=True)
    detection = RepetitionDetection(4, 1, 6)
    span = Span(TWICE, 20, constraint=Constrained(ANY, layout), repetition_detection=detection)
    assert said(span, Words([(1, 1)], 0)) == ([1] * 6, "repetition")
