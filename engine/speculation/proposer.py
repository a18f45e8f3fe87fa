"""Interface of a proposer: tokens that a sequence may go on with, and how sure it is of each.

A draft is only a guess: the target samples every position itself, by a number that is keyed by seed, place and
position, and a drafted token counts where it is that sample. So a proposer changes a span's time, never its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.request import SequenceState


class DraftTokens(NamedTuple):
    """Proposed tokens. `confidence` (tokens,): of each, the estimated probability that the target samples it, given
    that it samples those before it."""

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()

    def cut(self, count: int) -> DraftTokens:
        """Returns the first `count` tokens."""
        return DraftTokens(self.tokens[:count], self.confidence[:count])


NOTHING = DraftTokens()


class Proposer:
    """Base of all proposers. `name` is what requests and metrics call it."""

    name: str
    model = False  # whether it computes: it is asked only where a draft is likely to be worth its time

    def propose(self, seq: SequenceState, budget: int) -> DraftTokens:
        """Returns at most `budget` tokens that may follow `seq.tokens`; none where it has no idea."""
        raise NotImplementedError

    def propose_all(self, asked: Sequence[tuple[SequenceState, int]], min_confidence: float) -> list[DraftTokens]:
        """Proposes for several sequences with their budgets. `min_confidence`: a further token costs more than it gains
        where it is less likely than that, as the engine has measured."""
        return [self.propose(seq, budget) for seq, budget in asked]

    def sampled(self, seq: SequenceState, row: int) -> None:
        """Reports that the newest token was sampled from this row of the step's logits."""

    def ended(self, seq: SequenceState, start: int) -> None:
        """Reports a span's end; its tokens are those from position `start` on."""

    def forget(self, seq: SequenceState) -> None:
        """Drops what is kept for a sequence that is closed."""
