"""Thinking told apart by token ids, at its edges: how a prompt opens it, and every way an answer can be cut up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Sampling, Span, SpanOutput, Tokenizer
from reasoning.thinking import Markers, Piece, think_and_answer

OPEN, CLOSE, END = 1000, 1001, 1002


@pytest.mark.parametrize(
    ("tail", "opened"),
    [
        ("<think>", True), ("<think>\n", True), ("<think>\n\n", True), ("<think>\n\n</think>\n\n", False),
        ("assistant\n", False), ("<think>\nSo", False), ("", False),
    ],
)  # fmt: skip
def test_a_prompt_opens_the_thinking_only_by_ending_with_it(model: Path, tail: str, opened: bool) -> None:
    tokenizer = Tokenizer.load(model)
    markers = Markers.of(tokenizer)
    assert markers is not None
    assert markers.left_open(tokenizer.encode(f"<|im_start|>{tail}", special=True), tokenizer) is opened


@pytest.mark.parametrize(
    ("tail", "closed"),
    [
        ("<think>\n\n</think>\n\n", True), ("<think>\nHm.\n</think>", True), ("<think>\n", False),
        ("</think>\n\nSo", False), ("", False),
    ],
)  # fmt: skip
def test_a_prompt_closes_the_thinking_only_by_ending_with_it(model: Path, tail: str, closed: bool) -> None:
    tokenizer = Tokenizer.load(model)
    markers = Markers.of(tokenizer)
    assert markers is not None
    assert markers.left_closed(tokenizer.encode(f"<|im_start|>{tail}", special=True), tokenizer) is closed


def test_a_person_who_writes_the_marker_opens_nothing(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    markers = Markers.of(tokenizer)
    assert markers is not None
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "<think>"}])
    assert markers.opening not in prompt and not markers.left_open(prompt, tokenizer)


class ScriptedSequence:
    """Writes a given list of tokens, letter by letter or in lumps, the way the engine's handle would."""

    def __init__(self, script: list[int], lumps: Iterator[int]) -> None:
        self.script = script
        self.lumps = lumps
        self.appended: list[int] = []

    def append(self, tokens: list[int]) -> None:
        self.appended += tokens

    def generate(self, span: Span) -> Stream:
        return Stream(self, span)


class Stream:
    def __init__(self, seq: ScriptedSequence, span: Span) -> None:
        self.seq, self.span, self.left, self.over = seq, span, span.max_tokens or 10**6, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SpanOutput:
        if self.over:
            raise StopAsyncIteration
        tokens: list[int] = []
        finish: Any = None
        reason: int | None = None
        lump = next(self.lumps_or_one)
        while len(tokens) < lump and finish is None:
            token = self.seq.script.pop(0) if self.seq.script else END
            if token == END or token in self.span.stop_token_ids:
                finish, reason = "stop", None if token == END else token
                break
            tokens.append(token)
            self.left -= 1
            if not self.left:
                finish = "length"
        self.over = finish is not None
        text = "".join(chr(t) for t in tokens if t < 1000)
        return SpanOutput(tuple(tokens), text, finish_reason=finish, stop_reason=reason)

    @property
    def lumps_or_one(self) -> Iterator[int]:
        return self.seq.lumps


_letters = st.text(alphabet="ab \n", max_size=5)


@given(
    parts=st.lists(st.tuples(_letters, _letters), max_size=3), opened=st.booleans(),
    lumps=st.lists(st.integers(1, 5), min_size=1, max_size=8), limit=st.integers(1, 40),
)  # fmt: skip
def test_every_cut_gives_the_same_parts(
    parts: list[tuple[str, str]], opened: bool, lumps: list[int], limit: int
) -> None:
    script: list[int] = []
    for i, (thinking, answer) in enumerate(parts):
        script += [] if opened and i == 0 else [OPEN]
        script += [*(ord(c.upper()) for c in thinking), CLOSE, *map(ord, answer)]

    def run(sizes: list[int], max_tokens: int) -> list[Piece]:
        seq: Any = ScriptedSequence(list(script), itertools.cycle(sizes))
        span = Span(sampling=Sampling(), max_tokens=max_tokens)

        async def collect() -> list[Piece]:
            return [p async for p in think_and_answer(seq, span, Markers(OPEN, CLOSE), opened=opened)]

        return asyncio.run(collect())

    def parts_of(pieces: list[Piece]) -> tuple[str, str, int]:
        thinking = "".join(p.text for p in pieces if p.part == "thinking")
        answer = "".join(p.text for p in pieces if p.part == "answer")
        return thinking, answer, sum(p.spent for p in pieces)

    for max_tokens in (limit, 10**5):
        pieces = run(lumps, max_tokens)
        assert parts_of(pieces) == parts_of(run([1], max_tokens))
        thinking, answer, spent = parts_of(pieces)
        assert "a" not in thinking and "b" not in thinking
        assert "A" not in answer and "B" not in answer
        assert spent <= max_tokens
        assert [p.finish_reason is not None for p in pieces] == [False] * (len(pieces) - 1) + [True]
    if not opened or parts:
        assert "".join(answer.split()) == "".join("".join(a for _, a in parts).split())
