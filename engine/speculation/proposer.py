"""Interface of a proposer: tokens that a sequence may go on with, and how sure it is of each.

A draft is only a guess: the target samples every position itself, by a number that is keyed by seed, place and
position, and a drafted token counts where it is that sample. So a proposer changes a span's time, never its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import entry_points
from typing import NamedTuple, TypeVar

from engine.core.request import SequenceState
from engine.core.token_tree import reordered

GROUP = "ponder.proposers"  # of entry points: each names a subclass of Proposer, or a function that returns one
T = TypeVar("T")
log = logging.getLogger(__name__)


class DraftTokens(NamedTuple):
    """Proposed tokens. `confidence` (tokens,): of each, the estimated probability that the target samples it, given
    that it samples those before it.

    Several continuations are a token tree: `parents` (tokens,) has of each token the index of the one that it follows,
    an earlier one, or -1 where it follows the sequence. Without parents each follows the one before. Tokens of one
    parent differ."""

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    parents: tuple[int, ...] = ()

    def cut(self, count: int) -> DraftTokens:
        """Returns the first `count` tokens."""
        return DraftTokens(self.tokens[:count], self.confidence[:count], self.parents[:count])

    def chosen(self, order: Sequence[int]) -> DraftTokens:
        """Returns the tokens `order`, by index; each after its parent, which is among them."""
        return DraftTokens(
            tuple(self.tokens[at] for at in order),
            tuple(self.confidence[at] for at in order),
            reordered(self.parents, order) if self.parents else (),
        )

    def parent(self, at: int) -> int:
        """Returns the index of the token that token `at` follows; -1: none."""
        return self.parents[at] if self.parents else at - 1

    def check(self) -> None:
        """Raises ValueError unless there is a confidence for each token, and its parent, if any, comes before it."""
        if len(self.confidence) != len(self.tokens) or len(self.parents) not in (0, len(self.tokens)):
            raise ValueError("a draft needs a confidence for each token, and a parent for each or none")
        if any(not -1 <= parent < at for at, parent in enumerate(self.parents)):
            raise ValueError("a token of a draft comes before the one that it follows")
        if self.parents and len(set(zip(self.parents, self.tokens, strict=True))) < len(self.tokens):
            raise ValueError("a draft has one token twice after the same one")


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


class PluginProposer(Proposer):
    """A proposer of another package. One that raises is reported and asked no more: a guess is never worth a crash."""

    def __init__(self, inner: Proposer) -> None:
        self.name, self.model = inner.name, inner.model
        self._inner: Proposer | None = inner

    def propose_all(self, asked: Sequence[tuple[SequenceState, int]], min_confidence: float) -> list[DraftTokens]:
        nothing = [NOTHING] * len(asked)

        def checked(inner: Proposer) -> list[DraftTokens]:
            drafts = inner.propose_all(asked, min_confidence)
            for draft in drafts:
                draft.check()
            return drafts

        drafts = self._guarded(checked, nothing)
        return [draft.cut(budget) for draft, (_, budget) in zip(drafts, asked, strict=True)]

    def sampled(self, seq: SequenceState, row: int) -> None:
        self._guarded(lambda inner: inner.sampled(seq, row), None)

    def ended(self, seq: SequenceState, start: int) -> None:
        self._guarded(lambda inner: inner.ended(seq, start), None)

    def forget(self, seq: SequenceState) -> None:
        self._guarded(lambda inner: inner.forget(seq), None)

    def _guarded(self, call: Callable[[Proposer], T], otherwise: T) -> T:
        if self._inner is None:
            return otherwise
        try:
            return call(self._inner)
        except Exception:
            log.exception("the proposer %s failed, and is asked no more", self.name)
            self._inner = None
            return otherwise


def plugins() -> Iterator[PluginProposer]:
    """Loads the proposers of other packages; one that cannot be loaded is reported."""
    for point in entry_points(group=GROUP):
        try:
            made = point.load()()
            assert isinstance(made, Proposer), f"{point.value} returns no engine.speculation.Proposer"
            yield PluginProposer(made)
        except Exception:
            log.exception("the proposer %s cannot be loaded", point.name)
