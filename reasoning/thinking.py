"""An answer with its thinking separated from its content, by token ids and never by text.

Thinking is one span of a sequence and the answer is the next: the thinking span stops on `</think>`, the answer span on
the caller's own stops, and one budget of tokens covers both. A marker met anywhere switches the part, so no thinking
ever shows up as content. A constraint applies to the answer alone, and its sections are calls. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from engine.model.chat_template import ANALYSIS, ASSISTANT, CHANNEL, FINAL
from engine.outputs import FinishReason, SpanOutput, TokenLogprob
from engine.params import Span
from engine.structured_output.layout import Constrained

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence
    from engine import Tokenizer

Part = Literal["thinking", "answer", "call"]


@dataclass(frozen=True, slots=True)
class Markers:
    """The token ids that open and close thinking.

    In Harmony (gpt-oss) thinking and answer are messages of two channels: a header follows each marker, and the end of
    the answer's message is the answer's end. Where a call may stand in place of the answer, its header ends with the
    opening of a channel, `unnamed_header`: the layout of calls has the rest. In Gemma 4 thinking alone has a header.
    """

    opening: int
    closing: int
    thinking_header: tuple[int, ...] = ()
    answer_header: tuple[int, ...] = ()
    unnamed_header: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Markers | None:
        """The model's markers, or None for a model that does not think."""
        opening, closing = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
        if opening is not None and closing is not None:
            return cls(opening, closing)
        opening, closing = tokenizer.token_id("<|channel>"), tokenizer.token_id("<channel|>")
        if opening is not None and closing is not None:
            return cls(opening, closing, tuple(tokenizer.encode("thought\n")))
        opening, closing = tokenizer.token_id("<|channel|>"), tokenizer.token_id("<|end|>")
        if opening is None or closing is None or tokenizer.token_id("<|message|>") is None:
            return None
        thinking, answer, unnamed = (
            tuple(tokenizer.encode(text, special=True)) for text in (ANALYSIS, ASSISTANT + FINAL, ASSISTANT + CHANNEL)
        )
        return cls(opening, closing, thinking[1:], answer, unnamed)

    def with_header(self, marker: int, *, calls: bool = False) -> list[int]:
        """Returns a marker and the header that follows it. `calls`: a call may stand in place of the answer."""
        answer = self.unnamed_header if calls else self.answer_header
        return [marker, *(self.thinking_header if marker == self.opening else answer)]

    def missing_header(self, tokens: Sequence[int]) -> list[int]:
        """Returns the rest of an answer's header that `tokens` end with, where no call may stand in its place."""
        if not self.unnamed_header or not _ends_with(tokens, self.unnamed_header):
            return []
        return list(self.answer_header[len(self.unnamed_header) :])

    def ends_answer(self, marker: int) -> bool:
        """Returns whether this marker, in an answer, ends it."""
        return marker == self.closing and bool(self.answer_header)

    def left_open(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Returns whether the prompt itself ends by opening the thinking, as some chat templates do."""
        if self.thinking_header:
            return _ends_with(prompt, self.with_header(self.opening))
        return self._at_the_end(prompt, tokenizer) == self.opening

    def left_closed(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Returns whether the prompt ends by closing the thinking, as chat templates do where none is wanted."""
        if self.answer_header:
            return _ends_with(prompt, self.answer_header) or _ends_with(prompt, self.unnamed_header)
        return self._at_the_end(prompt, tokenizer) == self.closing

    def _at_the_end(self, prompt: Sequence[int], tokenizer: Tokenizer) -> int | None:
        """The marker after which the prompt has nothing but white space."""
        for at in range(len(prompt) - 1, max(-1, len(prompt) - 5), -1):
            if prompt[at] in (self.opening, self.closing):
                return None if tokenizer.decode(list(prompt[at + 1 :])).strip() else prompt[at]
        return None


def _ends_with(prompt: Sequence[int], end: Sequence[int]) -> bool:
    return list(prompt[-len(end) :]) == list(end)


def empty_thinking(tokenizer: Tokenizer, markers: Markers, *, opened: bool) -> list[int]:
    """Tokens after a prompt that close the thinking before any of it is written."""
    if markers.thinking_header:
        return [*([] if opened else markers.with_header(markers.opening)), *markers.with_header(markers.closing)]
    breaks = tokenizer.encode("\n\n")
    return [*([] if opened else [markers.opening]), *breaks, markers.closing, *breaks]


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that one engine output adds to one part. `spent` counts tokens, the markers included.

    A piece of a call has text of one body; `section` numbers the bodies of an answer. `fallback` tokens were sampled by
    the engine's fallback weights, `drafted` ones were proposed before they were sampled.
    """

    part: Part
    text: str
    spent: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None  # of the answer as a whole: on its last piece alone
    stop_reason: str | int | None = None
    section: int = 0
    fallback: int = 0
    drafted: int = 0
    marker: bool = False  # of thinking, which ended a stretch
    forgotten_tokens: int = 0  # that the model no longer sees, of the text so far


@dataclass(slots=True)
class Tally:
    """Token counts of an answer as it grows."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    fallback_tokens: int = 0
    drafted_tokens: int = 0
    forgotten_tokens: int = 0

    @property
    def answer_tokens(self) -> int:
        return self.completion_tokens - self.reasoning_tokens

    def add(self, piece: Piece) -> None:
        self.completion_tokens += piece.spent
        self.fallback_tokens += piece.fallback
        self.drafted_tokens += piece.drafted
        self.forgotten_tokens = max(self.forgotten_tokens, piece.forgotten_tokens)
        if piece.part == "thinking":
            self.reasoning_tokens += piece.spent

    def add_unseen(self, written: int, read: int) -> None:
        """Tokens of a strategy's that are no part of the answer: nobody sees them, and they were computed."""
        self.prompt_tokens += read
        self.completion_tokens += written
        self.reasoning_tokens += written


async def plain(seq: EngineSequence, span: Span, *, calls: bool = False) -> AsyncGenerator[Piece, None]:
    """One span as pieces of an answer, for text that is nobody's chat turn. `calls`: constrained bodies are calls."""
    with seq.generate(span) as outputs:
        async for out in outputs:
            yield _piece("answer", out, out.text, calls=calls)


class AnswerFunction(Protocol):
    """Writes a turn: `think_and_answer`, or a strategy with its signature."""

    def __call__(
        self,
        seq: EngineSequence,
        span: Span,
        markers: Markers | None,
        *,
        opened: bool,
        closed: bool = False,
        calls: bool = False,
    ) -> AsyncGenerator[Piece, None]: ...


async def think_and_answer(
    seq: EngineSequence,
    span: Span,
    markers: Markers | None,
    *,
    opened: bool,
    closed: bool = False,
    calls: bool = False,
    thinking_logprobs: int | None = None,
    answer_tokens: int | None = None,
) -> AsyncGenerator[Piece, None]:
    """Generate on `seq` within `span`. `span.max_tokens` must be set; it covers thinking and answer together.

    `span`'s stops, `min_tokens`, `logprobs` and constraint are the answer's. With `opened` the prompt has opened the
    thinking, with `closed` it has closed it: then a constraint that leaves nothing free leaves no thinking either. With
    `calls` the bodies that the constraint governs are calls, not the answer's content. `thinking_logprobs` asks for the
    log-probabilities of the thinking, as `span.logprobs` does for the answer's. `answer_tokens` bounds the answer
    alone, however long its thinking is.
    """
    if markers is None or (closed and span.constraint is not None and not span.constraint.free):
        limit = span.max_tokens if answer_tokens is None else min(span.max_tokens or answer_tokens, answer_tokens)
        async with aclosing(plain(seq, replace(span, max_tokens=limit), calls=calls)) as pieces:
            async for piece in pieces:
                yield piece
        return
    answer = Answering(seq, span, markers, opened=opened, calls=calls, answer_tokens=answer_tokens)
    while True:
        part = answer.next_span()
        part = replace(part, logprobs=thinking_logprobs) if answer.part == "thinking" else part
        async with aclosing(answer.write(part)) as pieces:
            async for piece in pieces:
                yield piece
        if answer.marker is None:
            return
        for piece in answer.switch():
            yield piece
        if answer.left <= 0:
            return


class Answering:
    """An answer under way, stretch by stretch: a span of thinking, a span of the answer, and the marker between them.

    Write `next_span` (or a narrower one), and if `marker` says that one ended it, `switch` to the other part. The
    caller decides whether the end of a stretch ends the answer.
    """

    def __init__(
        self, seq: EngineSequence, span: Span, markers: Markers, *, opened: bool = False, calls: bool = False,
        answer_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """`span.max_tokens` must be set. `answer_tokens` bounds what is no thinking."""
        assert span.max_tokens is not None
        self.seq = seq
        self.left = span.max_tokens
        self._answer_left = self.left if answer_tokens is None else answer_tokens
        self.part: Part = "thinking" if opened else "answer"
        self.marker: int | None = None  # the marker that ended the newest stretch, if another part follows
        self._span = span
        self._markers = markers
        self._calls = calls
        self._before = self._last = 0  # sections of earlier spans, and the newest one
        self._strip_head = opened  # the newlines that templates put after a marker belong to no one
        self._answered = False  # some content that is not white space is out
        self._bodied = False  # a body that ends the answer has begun
        self._thought = opened  # the newest part that is over, or is in the prompt, is thinking
        self._held: list[SpanOutput] = []  # white space at the very start: content only if no thinking follows

    def next_span(self) -> Span:
        """Returns the span of the part that is being written."""
        left = self.left if self.part == "thinking" else min(self.left, self._answer_left)
        return _span_of(self.part, self._span, left, self._markers, self._calls and self._last > 0, self._thought)

    def header(self, marker: int) -> list[int]:
        """Returns a marker and the header that follows it here."""
        return self._markers.with_header(marker, calls=self._calls)

    async def write(self, span: Span) -> AsyncGenerator[Piece, None]:
        """One stretch. Its last piece has the finish reason unless a marker ended it."""
        self._held, self.marker = [], None
        part, markers = self.part, self._markers
        with self.seq.generate(span) as outputs:
            async for out in outputs:
                self.left -= len(out.token_ids)
                self._answer_left -= len(out.token_ids) if part == "answer" else 0
                text = out.text
                if out.section:
                    out = replace(out, section=self._before + out.section)
                    self._last = out.section
                constraint = self._span.constraint
                answers = out.kind == "text" and constraint is not None and constraint.answer is not None
                if self._strip_head and out.kind != "body" and not answers:
                    text = text.lstrip("\n")
                    self._strip_head = not text
                self._bodied = self._bodied or _is_last(out, self._span)
                stopped = out.finish_reason == "stop" and not self._bodied
                if stopped and _switches(out.stop_reason, part, self._span, markers):
                    self.marker = int(out.stop_reason or 0)
                    if part == "answer" and markers.ends_answer(self.marker):
                        self.marker, out = None, replace(out, stop_reason=None)  # as its end-of-turn token would
                undecided = part == "answer" and not self._answered and not text.strip() and out.kind == "text"
                if undecided and (self.marker is not None or out.finish_reason is None):
                    self._held.append(replace(out, text=text))
                    continue
                self._answered = self._answered or part == "answer"
                for early in self._held:
                    yield _piece(part, early, early.text)
                self._held.clear()
                yield _piece(part, out, text, last=self.marker is None, calls=self._calls)

    def append(self, tokens: list[int], text: str) -> Piece:
        """Tokens that the model is given as its own, between two stretches of a part."""
        self.seq.append(tokens)
        self.left -= len(tokens)
        self._strip_head = False
        return Piece(self.part, text, len(tokens), tuple(tokens))

    def take_back(self, piece: Piece) -> None:
        """Truncate the newest piece, of a stretch that is over or closed, as if never written."""
        self.seq.truncate(len(self.seq) - len(piece.token_ids))
        self.left += piece.spent

    def switch(self) -> list[Piece]:
        """Append the marker that was met and go on to the part that it begins, unless no tokens are left."""
        marker = self.marker
        assert marker is not None
        # A stray `</think>` in an answer leads from answer to answer, and is no thinking.
        around: Part = "thinking" if self.part == "thinking" or marker == self._markers.opening else "answer"
        pieces = [  # the white space is dropped, its tokens are counted
            Piece(
                around,
                "",
                len(early.token_ids),
                prompt_tokens=early.prompt_tokens,
                cached_tokens=early.cached_tokens,
                fallback=_fallback_tokens(early),
                drafted=_drafted_tokens(early),
            )
            for early in self._held
        ]
        self._before = self._last
        _, *header = tokens = self.header(marker)
        self.left = self.left - len(tokens) if self.left > len(tokens) else 0  # a header alone is no use
        pieces.append(Piece(around, "", 1, finish_reason=None if self.left > 0 else "length", marker=True))
        if self.left > 0:
            self.seq.append(tokens)
            self._thought = self.part == "thinking"
            self.part = "thinking" if marker == self._markers.opening else "answer"
            self._strip_head = True
            if header:
                pieces.append(Piece(self.part, "", len(header)))
        return pieces


def _span_of(part: Part, span: Span, left: int, markers: Markers, begun: bool, thought: bool) -> Span:
    """`begun`: there are calls already, so that a constraint that asks for one is content. `thought`: thinking came
    just before, so that an answer that must have a body now has it: else a model could think again and again instead.
    """
    if part == "thinking":
        return replace(
            span, max_tokens=left, min_tokens=0, stop=(), stop_token_ids=(markers.closing,), logprobs=None,
            prompt_logprobs=None, constraint=span.constraint and _inside_thinking(span.constraint, markers),
        )  # fmt: skip
    stops = tuple(dict.fromkeys((*span.stop_token_ids, markers.opening, markers.closing)))
    return replace(
        span, max_tokens=left, min_tokens=min(span.min_tokens, left), stop_token_ids=stops,
        constraint=span.constraint and _around_thinking(span.constraint, markers, begun, thought),
    )  # fmt: skip


def _around_thinking(constraint: Constrained, markers: Markers, begun: bool, thought: bool) -> Constrained:
    """The constraint where thinking may begin before the answer and between its sections."""
    layout = constraint.layout
    think = None if thought and not constraint.free else (markers.opening, markers.closing)
    layout = replace(layout, think=think, begun=begun and layout.end is not None)
    return replace(constraint, layout=layout)


def _inside_thinking(constraint: Constrained, markers: Markers) -> Constrained | None:
    """Returns the constraint of the thinking itself: an answer that must have a body cannot end before it, so neither
    can thinking."""
    if constraint.free:
        return None
    return replace(
        constraint, layout=replace(constraint.layout, think=(markers.opening, markers.closing), thinking=True)
    )


def _is_last(out: SpanOutput, span: Span) -> bool:
    """Returns whether nothing comes after this body or constrained text, so that a marker there ends the answer:
    another one must not follow."""
    if span.constraint is None:
        return False
    if out.kind == "body":
        return span.constraint.layout.end is None
    return span.constraint.answer is not None and out.kind == "text" and out.text != ""


def _switches(stop_reason: str | int | None, part: Part, span: Span, markers: Markers) -> bool:
    if part == "thinking":
        return stop_reason == markers.closing
    return stop_reason in (markers.opening, markers.closing) and stop_reason not in span.stop_token_ids


def _piece(part: Part, out: SpanOutput, text: str, *, last: bool = True, calls: bool = False) -> Piece:
    """`last=False` drops the finish reason: the span ends here, the answer does not."""
    return Piece(
        "call" if calls and out.kind == "body" else part,
        text,
        len(out.token_ids),
        out.token_ids,
        out.logprobs,
        out.prompt_logprobs,
        out.prompt_tokens,
        out.cached_tokens,
        out.finish_reason if last else None,
        out.stop_reason if last else None,
        out.section,
        _fallback_tokens(out),
        _drafted_tokens(out),
        forgotten_tokens=out.forgotten_tokens,
    )


def _fallback_tokens(out: SpanOutput) -> int:
    return len(out.token_ids) if out.fallback else 0


def _drafted_tokens(out: SpanOutput) -> int:
    return len(out.token_ids) if out.drafted else 0
