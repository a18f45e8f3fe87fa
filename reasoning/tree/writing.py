"""The task of writing any answer, as a problem: a state is what was written so far, a step the next paragraph.

Which of several beginnings is promising the model says itself, asked as a user would ask it. Knows nothing of what the
question is.
"""

from __future__ import annotations

from collections.abc import Sequence

from reasoning.dialogue import after_answer
from reasoning.strategy import Context
from reasoning.thinking import Piece
from reasoning.tree.problem import Reply, Thought
from reasoning.written import pieces_of

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

    def pieces(self) -> list[Piece]:
        """Of the answer that was asked for last."""
        tokens, done = self.told
        cut = not done or len(tokens) >= self._limit
        return pieces_of(tokens, self._context, "length" if cut else "stop")
