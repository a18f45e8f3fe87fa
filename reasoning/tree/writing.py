"""The task of writing any answer, as a problem: a state is the text so far, a step the next paragraph.

The model itself judges which beginning is promising, asked as a user would ask it. Knows nothing of the question.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from ponder import InvalidParameter, Piece, after_answer, run_check, think_and_answer
from ponder import StrategyContext as Context
from reasoning.tree.grow import text_only
from reasoning.tree.problem import Reply, Thought

if TYPE_CHECKING:
    from ponder import FinishReason
    from ponder import Sequence as EngineSequence

State = tuple[tuple[int, ...], bool]
QUESTION = "Is this right so far? Answer with one word: {labels}."


class Writing:
    """A problem with the answer's tokens so far as states, none of them a control token, and whether it is finished.

    `spent` tokens of the answer's limit are used up before it begins.

    Raises:
        InvalidParameter: no token is left.
        CannotContinue: the chat template takes no question after an answer.
    """

    def __init__(
        self, context: Context, labels: Sequence[str], spent: int = 0, stop: tuple[str, ...] = ("\n\n", "\n")
    ) -> None:
        asked = QUESTION.format(labels=", ".join(labels[:-1]) + f" or {labels[-1]}")
        self.start: State = ((), False)
        self.writes_on = True
        self.stop = stop
        self.chosen: State = self.start
        self._context = context
        self._control = context.tokenizer.control_ids
        self._limit = (context.span.max_tokens or 0) - spent
        if self._limit < 1:
            message = (
                f"max_tokens is {context.span.max_tokens}; accepted: more than the {spent} that close the thinking."
            )
            raise InvalidParameter("max_tokens", message)
        self._question = after_answer(context.tokenizer, asked, {"enable_thinking": False, **context.variables})

    def propose_prompt(self, state: State) -> Sequence[int]:
        return ()

    def read(self, state: State, reply: Reply) -> Sequence[Thought[State]]:
        if (not reply.token_ids and not reply.ended) or not self._control.isdisjoint(reply.token_ids):
            return ()
        written = (state[0] + reply.token_ids)[: self._limit]
        return (Thought(reply.text, (written, reply.ended or len(written) >= self._limit)),)

    def value_prompt(self, state: State) -> Sequence[int]:
        return self._question

    def check(self, state: State) -> float | Awaitable[float | None] | None:
        if self._context.checker is None or not state[1]:
            return None
        return run_check(self._context.checker, self._text(state))

    def done(self, state: State) -> bool:
        return state[1]

    def answer(self, state: State) -> str:
        self.chosen = state
        return self._text(state)

    def pieces(self, finish: FinishReason | None = None) -> list[Piece]:
        """The answer that was chosen. `finish` is why it ends unfinished; None where it is written on."""
        tokens, done = self.chosen
        if done:
            finish = "length" if len(tokens) >= self._limit else "stop"
        return [Piece("answer", self._text(self.chosen), len(tokens), tokens, finish_reason=finish)]

    async def rest(self, seq: EngineSequence) -> AsyncGenerator[Piece, None]:
        """Write the chosen answer on to its end, on `seq`, which ends with its tokens so far."""
        tokens, _ = self.chosen
        left, least = self._limit - len(tokens), self._context.span.min_tokens - len(tokens)
        span = self._context.span
        bias = {**span.sampling.logit_bias, **text_only(self._context.tokenizer)}
        sampling = replace(span.sampling, logit_bias=bias)
        span = replace(span, sampling=sampling, max_tokens=left, min_tokens=max(0, least))
        async with aclosing(think_and_answer(seq, span, None, opened=False)) as pieces:
            async for piece in pieces:
                yield piece

    def _text(self, state: State) -> str:
        return self._context.tokenizer.decode(list(state[0]))
