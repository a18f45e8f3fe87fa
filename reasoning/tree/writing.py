"""The task of writing any answer, as a problem: a state is what was written so far, a step the next paragraph.

Which of several beginnings is promising the model says itself, asked as a user would ask it. Knows nothing of what the
question is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from reasoning.dialogue import after_answer
from reasoning.strategy import Context
from reasoning.thinking import Piece, think_and_answer
from reasoning.tree.problem import Reply, Thought
from reasoning.written import pieces_of

if TYPE_CHECKING:
    from engine import Sequence as EngineSequence
    from engine.outputs import FinishReason

State = tuple[tuple[int, ...], bool]
QUESTION = "Is this right so far? Answer with one word: {labels}."


class Writing:
    """A problem whose states are the tokens written, and whether the answer is finished.

    Raises:
        NoWayOn: the chat template takes no question after an answer.
    """

    def __init__(self, context: Context, labels: Sequence[str], stop: tuple[str, ...] = ("\n\n", "\n")) -> None:
        asked = QUESTION.format(labels=", ".join(labels[:-1]) + f" or {labels[-1]}")
        self.start: State = ((), False)
        self.writes_on = True
        self.stop = stop
        self._context = context
        self.told: State = self.start
        self._limit = context.span.max_tokens or 0
        self._question = after_answer(context.tokenizer, asked, {"enable_thinking": False, **context.variables})

    def propose_prompt(self, state: State) -> Sequence[int]:
        return ()

    def read(self, state: State, reply: Reply) -> Sequence[Thought[State]]:
        if not reply.token_ids and not reply.ended:
            return ()
        written = state[0] + reply.token_ids
        return (Thought(reply.text, (written, reply.ended or len(written) >= self._limit)),)

    def value_prompt(self, state: State) -> Sequence[int]:
        return self._question

    def check(self, state: State) -> float | None:
        return None

    def done(self, state: State) -> bool:
        return state[1]

    def answer(self, state: State) -> str:
        self.told = state
        return "".join(piece.text for piece in self.pieces() if piece.part == "answer")

    def pieces(self, finish: FinishReason | None = None) -> list[Piece]:
        """Of the answer that was asked for last. `finish` is why it ends unfinished; None where it goes on."""
        tokens, done = self.told
        if done:
            finish = "length" if len(tokens) >= self._limit else "stop"
        return pieces_of(tokens, self._context, finish)

    def rest(self, seq: EngineSequence) -> AsyncGenerator[Piece, None]:
        """Write the answer that was asked for last on to its end, on `seq`, which ends with what there is of it."""
        tokens, _ = self.told
        left, least = self._limit - len(tokens), self._context.span.min_tokens - len(tokens)
        span = replace(self._context.span, max_tokens=left, min_tokens=max(0, least))
        opened = self.pieces()[-1].part == "thinking"
        return think_and_answer(seq, span, self._context.markers, opened=opened)
