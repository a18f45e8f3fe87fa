"""The mode machine over bodies that are lists of words: allowed tokens, kinds and rollback."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.structured_output.layout import MAX_BREAKS, Layout
from engine.structured_output.matcher import words
from engine.structured_output.mode_machine import Mode, ModeMachine
from tests.engine.structured_output.words import Words, allowed

A, B, C, EOS, BEGIN, END, THINK, THOUGHT, BREAK, STOP = range(10)
VOCABULARY = 40  # more than a word of bits
BODY = Words([(A, B), (A, B, C), (A, C, C, A)], EOS)
ANSWER = Words([(B,), (B, C, A), (C, C)], EOS)
SECTIONS = Layout(begin=BEGIN, end=END, several=True, breaks=frozenset({BREAK}), think=(THINK, THOUGHT))


class OrAnswer(NamedTuple):
    """Sections, or a text that `ANSWER` allows."""

    layout: Layout


LAYOUTS: dict[str, Layout | OrAnswer] = {
    "whole": Layout(),
    "whole after a thought": Layout(think=(THINK, THOUGHT), breaks=frozenset({BREAK})),
    "sections": SECTIONS,
    "sections in text": replace(SECTIONS, free=True),
    "one section": Layout(begin=BEGIN, end=END),
    "one section in text": Layout(begin=BEGIN, end=END, free=True),
    "to the end": Layout(begin=BEGIN, free=True),
    "several to the end": Layout(begin=BEGIN, free=True, several=True),
    "under headers": Layout(begin=BEGIN, header=(THINK, BREAK), text_header=(END, BREAK), free=True),
    "under a header": Layout(begin=BEGIN, header=(THINK,), text_header=(END,)),
    "in place of text": Layout(free=True, openers=frozenset({A})),
    "begins inside a thought": replace(SECTIONS, thinking=True),
    "goes on": replace(SECTIONS, begun=True),
    "sections or an answer": OrAnswer(replace(SECTIONS, free=True)),
    "one section or an answer": OrAnswer(Layout(begin=BEGIN, free=True)),
    "a section or an answer under headers": OrAnswer(Layout(begin=BEGIN, header=(A,), text_header=(END, B), free=True)),
}


def machine(given: Layout | OrAnswer, *tokens: int, stops: frozenset[int] = frozenset()) -> ModeMachine:
    """A machine that has accepted `tokens`."""
    layout, answer = (given.layout, ANSWER) if isinstance(given, OrAnswer) else (given, None)
    modes = ModeMachine(layout, BODY, frozenset({EOS}), stops, answer)
    for token in tokens:
        assert modes.accept(token), token
    return modes


def following(modes: ModeMachine) -> set[int]:
    row = np.full(words(VOCABULARY), 0x5A5A5A5A, dtype=np.int32)  # bits that an earlier step may have left
    return allowed(row, VOCABULARY) if modes.fill(row) else set(range(VOCABULARY))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@settings(max_examples=40)
@given(choices=st.lists(st.integers(0, 1000), max_size=30), back=st.integers(0, 30), data=st.data())
def test_every_state_takes_what_it_shows_and_can_be_undone_and_forked(
    layout: Layout | OrAnswer, choices: list[int], back: int, data: st.DataObject
) -> None:
    modes = machine(layout)
    taken: list[int] = []
    seen = [following(modes)]
    for choice in choices:
        for token in range(VOCABULARY):
            copy = modes.fork()
            # Free text lets the end mark of a section stand: nothing is forbidden there.
            assert copy.accept(token) == (token in seen[-1])
        if not seen[-1]:
            break
        ordinary = sorted(seen[-1] & {A, B, C, EOS, BEGIN, END, THINK, THOUGHT, BREAK})
        token = ordinary[choice % len(ordinary)]
        assert modes.accept(token)
        taken.append(token)
        seen.append(following(modes))
    assert (not seen[-1]) == (modes.mode is Mode.ENDED)
    twin = modes.fork()
    n = min(back, len(taken))
    modes.rollback(n)
    assert following(modes) == seen[len(taken) - n]
    assert following(twin) == seen[-1], "a fork moved with its origin"
    for token in taken[len(taken) - n :]:
        assert modes.accept(token)
    assert following(modes) == seen[-1]
    assert (modes.kind, modes.section, modes.mode) == (twin.kind, twin.section, twin.mode)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@settings(max_examples=40)
@given(choices=st.lists(st.integers(0, 1000), max_size=30))
def test_the_end_may_come_exactly_where_the_machine_says(layout: Layout | OrAnswer, choices: list[int]) -> None:
    modes = machine(layout, stops=frozenset({STOP}))
    for choice in choices:
        shown = following(modes)
        assert (EOS in shown) == modes.can_end()
        if modes.mode is not Mode.FREE and not modes.free:
            assert (STOP in shown) == modes.can_end()
        assert modes.must_end() == (shown <= {EOS, STOP}) or not shown
        going_on = sorted(shown & {A, B, C, BEGIN, END, THINK, THOUGHT, BREAK})
        if not going_on:
            break
        assert modes.accept(going_on[choice % len(going_on)])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@settings(max_examples=40)
@given(choices=st.lists(st.integers(0, 1000), max_size=30))
def test_forced_tokens_are_the_only_ones(layout: Layout | OrAnswer, choices: list[int]) -> None:
    modes = machine(layout)
    for choice in choices:
        ahead = modes.fork()
        for token in modes.forced():
            assert following(ahead) == {token}
            assert ahead.accept(token)
        going_on = sorted(following(modes) & {A, B, C, BEGIN, END, THINK, THOUGHT, BREAK})
        if not going_on:
            break
        assert modes.accept(going_on[choice % len(going_on)])


def test_markers_are_no_text_and_number_the_sections() -> None:
    modes = machine(LAYOUTS["sections in text"])
    seen = []
    for token in (THINK, 20, THOUGHT, 21, BEGIN, A, B, END, BREAK, BEGIN, A, B, C, END, EOS):
        assert modes.accept(token)
        seen.append((modes.kind, modes.section))
    assert seen == [
        (None, 1), ("thought", 1), (None, 2), ("text", 2),
        (None, 3), ("body", 3), ("body", 3), (None, 4), (None, 4),
        (None, 5), ("body", 5), ("body", 5), ("body", 5), (None, 6),
        (None, 7),
    ]  # fmt: skip


def test_a_body_ends_only_where_its_text_may() -> None:
    modes = machine(LAYOUTS["sections"], BEGIN, A)
    assert following(modes) == {B, C}
    modes.accept(B)
    assert following(modes) == {C, END}


def test_no_marker_and_no_end_stands_inside_a_body() -> None:
    modes = machine(LAYOUTS["sections in text"], BEGIN, A)
    for marker in (BEGIN, END, THINK, THOUGHT, BREAK, EOS):
        assert not modes.accept(marker)


def test_after_a_section_comes_another_one_a_thought_or_the_end() -> None:
    modes = machine(LAYOUTS["sections in text"], BEGIN, A, B, END)
    assert following(modes) == {BEGIN, EOS, THINK, BREAK}
    modes = machine(LAYOUTS["sections in text"], BEGIN, A, B, END, THINK, 20, THOUGHT)
    assert following(modes) == {BEGIN, EOS, THINK, BREAK}


def test_after_the_only_section_the_answer_is_over() -> None:
    assert machine(LAYOUTS["one section"], BEGIN, A, B, C, END).must_end()


def test_a_thought_must_be_closed_where_an_answer_is_due() -> None:
    thinking = machine(LAYOUTS["whole after a thought"], THINK, 20)
    assert not thinking.accept(EOS)
    assert thinking.accept(THOUGHT)
    assert following(thinking) == {A, BREAK, THINK}


def test_a_marker_inside_a_thought_is_part_of_it() -> None:
    thinking = machine(LAYOUTS["sections in text"], THINK, BEGIN)
    assert thinking.mode is Mode.THINK and thinking.kind == "thought"


def test_an_answer_beside_sections_is_text_and_no_section_follows_it() -> None:
    modes = machine(LAYOUTS["sections or an answer"])
    assert following(modes) == {B, C, BEGIN, THINK, BREAK} and not modes.can_end()
    for token in (BREAK, THINK, 20, THOUGHT, B):
        assert modes.accept(token)
    assert (modes.mode, modes.kind, modes.section) == (Mode.ANSWER, "text", 2)
    assert following(modes) == {C, EOS}
    assert modes.accept(C) and following(modes) == {A} and modes.forced() == [A]


def test_an_answer_beside_sections_may_be_sections() -> None:
    modes = machine(LAYOUTS["sections or an answer"], BEGIN, A, B, END)
    assert following(modes) == {BEGIN, THINK, BREAK, EOS}


def test_headers_are_no_text_and_leave_no_choice() -> None:
    modes = machine(LAYOUTS["under headers"])
    assert following(modes) == {BEGIN, END} and not modes.can_end()
    text = machine(LAYOUTS["under headers"], END, BREAK)
    assert (text.mode, text.kind, text.section) == (Mode.FREE, None, 1)
    assert text.accept(BEGIN) and (text.mode, text.kind) == (Mode.FREE, "text")
    body = machine(LAYOUTS["under headers"], BEGIN, THINK)
    assert (body.mode, body.kind, body.forced()) == (Mode.HEADER, None, [BREAK])
    assert body.accept(BREAK) and following(body) == {A}
    assert machine(LAYOUTS["under a header"]).forced() == [BEGIN, THINK]
    answer = machine(LAYOUTS["a section or an answer under headers"], END, B)
    assert following(answer) == {B, C} and answer.accept(B) and answer.kind == "text"


def test_a_section_without_an_end_ends_where_the_next_begins() -> None:
    modes = machine(LAYOUTS["several to the end"], BEGIN, A, B)
    assert following(modes) == {C, EOS, BEGIN} and not modes.must_end()
    assert modes.accept(BEGIN) and modes.section == 2 and following(modes) == {A}
    assert not machine(LAYOUTS["several to the end"], BEGIN, A).accept(BEGIN)
    assert machine(LAYOUTS["several to the end"], BEGIN, A, C, C, A).can_end()


def test_breaks_cannot_loop() -> None:
    modes = machine(LAYOUTS["sections"], *[BREAK] * MAX_BREAKS)
    assert BREAK not in following(modes)


def test_an_answer_that_begins_like_a_body_is_one() -> None:
    layout = LAYOUTS["in place of text"]
    assert machine(layout, A).mode is Mode.BODY
    assert machine(layout, B).mode is Mode.FREE
    assert following(machine(layout)) == set(range(VOCABULARY))
    other = Layout(free=True, openers=frozenset({A, C}))
    assert following(machine(other)) == set(range(VOCABULARY)) - {C}, "an opener that no body begins with"


def test_rolling_back_too_far_is_refused() -> None:
    modes = machine(LAYOUTS["whole"], A)
    with pytest.raises(ValueError, match="cannot roll back 2 of 1"):
        modes.rollback(2)


@pytest.mark.parametrize(
    "given",
    [
        {"end": END},
        {"several": True},
        {"header": (A,)},
        {"begin": BEGIN, "text_header": (BEGIN,)},
        {"begin": BEGIN, "openers": frozenset({A})},
        {"thinking": True},
    ],
)
def test_a_layout_that_means_nothing_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="layout|openers|span"):
        Layout(**given)  # type: ignore[arg-type]  # that is the point
