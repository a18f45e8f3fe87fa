"""Budget forcing (Muennighoff et al. 2025, s1): thinking of a minimum and a maximum length, made to go on by "Wait".

A budget counts the tokens that usage counts as thinking: every token from the opening marker to the closing one, both
included where they are not the prompt's own, and the Waits. Forcing appends to the live sequence, so nothing is
prefilled twice; markers and Waits are compared and written as token ids. Stands in for `think_and_answer`. Knows
nothing of HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ponder import (
    MAX_LOGPROBS,
    Answering,
    InvalidParameter,
    Markers,
    Options,
    Piece,
    Span,
    Yields,
    strategy,
    think_and_answer,
)
from ponder import StrategyContext as Context

if TYPE_CHECKING:
    from ponder import Sequence as EngineSequence
    from ponder import Tokenizer

Ended = Literal["model", "maximum", "margin"]
NEVER = -100.0  # the bias of a token that is not wanted
SENTENCE_ENDS = (".", "!", "?", "\n")


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The budget of an answer's thinking, in tokens.

    The first `waits` times that the model would end its thinking, `wait_text` is written in place of the end. Then,
    below `min_tokens`, the end cannot be sampled. At `max_tokens` the thinking ends, with `closing_text` before the
    marker. A Wait that would not fit under the maximum is left out. With `margin` the thinking ends early at the end of
    a sentence where the marker's log-probability (natural) is at most so much below the likeliest token's.

    Raises:
        InvalidParameter: a value is out of range, or two contradict each other.
    """

    min_tokens: int = 0
    max_tokens: int | None = None
    waits: int = 0
    wait_text: str = "Wait"
    closing_text: str = ""
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.min_tokens < 0:
            raise _refused("min_tokens", self.min_tokens, "0 or more tokens")
        if self.max_tokens is not None and self.max_tokens < 2:
            raise _refused("max_tokens", self.max_tokens, "2 or more tokens, as the two markers count")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refused("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.waits < 0:
            raise _refused("waits", self.waits, "0 or more")
        if self.waits and not self.wait_text:
            raise _refused("wait_text", self.wait_text, "some text, as there are waits")
        if self.margin is not None and not 0 <= self.margin <= 100:
            raise _refused("margin", self.margin, "None, or 0 to 100")
        if self.margin is not None and self.waits:
            raise _refused("margin", self.margin, "None, as waits make the thinking go on where a margin ends it")

    @property
    def demands_thinking(self) -> bool:
        """Returns whether the model must think, rather than may."""
        return self.min_tokens > 0 or self.waits > 0


class BudgetForcing:
    """One answer's budget, over all its turns: `answer` is `think_and_answer` within it.

    Afterwards it has the spending: `thinking_tokens`, `waits` that were written, and the reason the thinking `ended`.
    """

    def __init__(self, budget: ThinkingBudget, tokenizer: Tokenizer) -> None:
        """
        Raises:
            InvalidParameter: the model does not think, a text of the budget has one of its markers, or the waits and
                the closing text do not fit under the maximum.
        """
        markers = Markers.of(tokenizer)
        if markers is None:
            raise InvalidParameter("thinking", "thinking has a budget; this model does not think; accepted: None.")
        self.budget = budget
        self._markers = markers
        self._wait = tokenizer.encode(budget.wait_text) if budget.waits else []
        self._closing = tokenizer.encode(budget.closing_text)
        for name, ids in (("wait_text", self._wait), ("closing_text", self._closing)):
            if {markers.opening, markers.closing} & set(ids):
                raise _refused(name, getattr(budget, name), "text without the markers of thinking")
        self._least = 2 + len(self._closing) + budget.waits * (len(self._wait) + 1)
        if budget.max_tokens is not None and budget.max_tokens < self._least:
            what = "two markers, the closing text, and each Wait with a token after it"
            raise _refused("max_tokens", budget.max_tokens, f"{self._least} or more tokens: {what}")
        self.thinking_tokens = 0
        self.waits = 0
        self.ended: Ended | None = None
        self._tail = ""  # of the thinking's text

    async def answer(
        self,
        seq: EngineSequence,
        span: Span,
        markers: Markers | None = None,
        *,
        opened: bool,
        closed: bool = False,
        calls: bool = False,
        answer_tokens: int | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """`think_and_answer` within the budget. A budget that demands thinking opens it, if the prompt has not.

        `markers` are the tokenizer's own; the parameter is there for the signature. Once the budget is spent there is
        no more thinking: neither in this turn nor in those that follow.

        Raises:
            InvalidParameter: the budget and `span.max_tokens`, or a prompt that has `closed` the thinking, contradict
                each other.
            EngineError: as `generate` raises it.
        """
        demanded = self.budget.demands_thinking and not self.thinking_tokens
        if demanded:
            self._check(span, closed)
        if closed and span.constraint is not None and not span.constraint.free:
            unthinking = think_and_answer(
                seq, span, self._markers, opened=opened, closed=True, calls=calls, answer_tokens=answer_tokens
            )
            async with aclosing(unthinking) as pieces:
                async for piece in pieces:
                    yield piece
            return
        answer = Answering(seq, span, self._markers, opened=opened, calls=calls, answer_tokens=answer_tokens)
        if demanded and not opened:
            answer.marker = self._markers.opening
            for piece in answer.switch():
                yield self._counted(piece)
        elif opened and self._remaining(answer) < 0:
            answer.marker = self._markers.closing
            # closed as a template closes it: the marker is the prompt's
            answer.left += len(answer.header(answer.marker))
            answer.switch()
        while answer.left > 0:
            part = self._think(answer) if answer.part == "thinking" else answer.write(self._answer_span(answer))
            async with aclosing(part) as pieces:
                async for piece in pieces:
                    yield self._counted(piece)
            if answer.marker is None:
                return
            if answer.marker == self._markers.opening and not self._may_open(answer):
                yield Piece("answer", "", 0, finish_reason="stop")  # sampled against the bias: there is no way on
                return
            for piece in answer.switch():  # white space before a model's own thinking is none of the budget's
                yield self._counted(piece) if piece.marker else replace(piece, part="answer")

    def _check(self, span: Span, closed: bool) -> None:
        assert span.max_tokens is not None
        if closed:
            raise InvalidParameter(
                "thinking", "thinking has a minimum or waits, and the prompt has closed the thinking; accepted: a "
                "prompt that leaves it open."
            )  # fmt: skip
        if self.budget.min_tokens > span.max_tokens:
            raise _refused("min_tokens", self.budget.min_tokens, f"at most max_tokens of all, {span.max_tokens}")
        if self._least > span.max_tokens:
            raise _refused("waits", self.budget.waits, f"what fits into max_tokens of all, {span.max_tokens}")

    def _counted(self, piece: Piece) -> Piece:
        self.thinking_tokens += piece.spent if piece.part == "thinking" else 0
        return piece

    def _remaining(self, answer: Answering) -> int:
        """Tokens that the thinking may still grow by before its end must be written."""
        if self.budget.max_tokens is None:
            return sys.maxsize
        remaining = self.budget.max_tokens - self.thinking_tokens - 1
        # Without tokens beyond the thinking an answer has no place, and the closing text is left out.
        return remaining - len(self._closing) if answer.left > remaining + 1 else remaining

    def _may_open(self, answer: Answering) -> bool:
        return self._remaining(answer) >= 1

    def _answer_span(self, answer: Answering) -> Span:
        """Once the budget is spent, the answer's span cannot open the thinking again."""
        span = answer.next_span()
        if self._may_open(answer):
            return span
        constraint = span.constraint
        if constraint is not None:
            constraint = replace(constraint, layout=replace(constraint.layout, think=None))
        bias = {**span.sampling.logit_bias, self._markers.opening: NEVER}
        return replace(span, sampling=replace(span.sampling, logit_bias=bias), constraint=constraint)

    async def _think(self, answer: Answering) -> AsyncGenerator[Piece, None]:
        """One stretch of thinking, up to its end: `answer.marker` is then the closing marker, or None at a limit."""
        waited = False
        while (remaining := min(self._remaining(answer), answer.left)) > 0:
            end: Piece | None = None
            brakes = False
            async with aclosing(answer.write(self._thinking_span(answer, remaining, waited))) as pieces:
                async for piece in pieces:
                    end, brakes = piece, self._brakes(piece)
                    if brakes:
                        break
                    self._tail = (self._tail + piece.text)[-8:]
                    over = piece.finish_reason == "length" and answer.left == 0
                    stopped = piece.finish_reason in ("stop", "length") and not over
                    piece = replace(piece, logprobs=())
                    yield replace(piece, finish_reason=None, stop_reason=None) if stopped else piece
            assert end is not None
            if brakes:
                answer.take_back(end)
                self._close(answer, "margin")
                return
            if answer.marker is None and end.finish_reason != "stop":
                if end.finish_reason != "length" or answer.left == 0:
                    return
                continue  # the maximum, or the last place where a Wait would fit: the minimum then forbids the end
            if self._before_wait(answer) < 0:
                self._close(answer, "model")  # by its marker, or by ending its turn in mid-thought
                return
            waited = True
            self.waits += 1
            yield answer.append(self._wait, self.budget.wait_text)
        if self._closing and answer.left > len(self._closing) + 1:
            yield answer.append(self._closing, self.budget.closing_text)
        self._close(answer, "maximum")

    def _close(self, answer: Answering, why: Ended) -> None:
        self.ended = why
        answer.marker = self._markers.closing

    def _thinking_span(self, answer: Answering, remaining: int, waited: bool) -> Span:
        """After a Wait the end is not sampled at once; below the minimum it is not, where no Wait can replace it."""
        limit, least = remaining, 1 if waited else 0
        below, before_wait = self.budget.min_tokens - self.thinking_tokens - 1, self._before_wait(answer)
        if before_wait <= 0:
            least = max(least, below)
        elif below > before_wait:
            limit = before_wait
        logprobs = None if self.budget.margin is None else MAX_LOGPROBS
        return replace(answer.next_span(), max_tokens=limit, min_tokens=min(least, limit), logprobs=logprobs)

    def _before_wait(self, answer: Answering) -> int:
        """Tokens before the last place where the next Wait, and one token after it, would fit; negative: nowhere."""
        if self.waits == self.budget.waits:
            return -1
        return min(self._remaining(answer), answer.left) - len(self._wait) - 1

    def _brakes(self, piece: Piece) -> bool:
        """Returns whether the thinking should have ended before this piece, which is one token."""
        margin = self.budget.margin
        if margin is None or not piece.logprobs or self.thinking_tokens + 1 < self.budget.min_tokens:
            return False
        if not self._tail.rstrip(" ").endswith(SENTENCE_ENDS):
            return False
        top = piece.logprobs[0].top
        closing = dict(top).get(self._markers.closing)
        return closing is not None and top[0][1] - closing <= margin


class BudgetOptions(Options):
    """The fields of `ThinkingBudget`."""

    min_tokens: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=2)
    waits: int = Field(0, ge=0, le=64)
    wait_text: str = Field("Wait", max_length=200)
    closing_text: str = Field("", max_length=2_000)
    margin: float | None = Field(None, ge=0, le=100)


@strategy("budget", BudgetOptions)
async def budget(seq: EngineSequence, context: Context, options: BudgetOptions) -> Yields:
    """Makes the thinking as long as it should be: not below a minimum, not above a maximum, made to go on by "Wait"."""
    forcing = BudgetForcing(ThinkingBudget(**dict(options)), context.tokenizer)
    async with aclosing(
        forcing.answer(seq, context.span, opened=context.opened, closed=context.closed, calls=context.calls)
    ) as pieces:
        async for piece in pieces:
            yield piece


def _refused(name: str, value: object, accepted: str) -> InvalidParameter:
    name = f"thinking.{name}"
    return InvalidParameter(name, f"{name} is {value!r}; accepted: {accepted}.")
