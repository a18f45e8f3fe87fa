"""What can run on a sequence: a span that generates, or a score that reads log-probabilities. Plain state.

A job says from which position on it wants logits, and whether it goes on after the next token; the scheduler needs to
know nothing else about it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.constrain.compiler import Done
from engine.constrain.modes import Modes
from engine.outputs import FinishReason, Kind, SpanOutput, TokenLogprob
from engine.params import Span
from engine.text import SpanText


@dataclass(slots=True, eq=False)
class SpanJob:
    """A running span: its limits resolved to numbers, and what it has produced."""

    id: int
    span: Span
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    prompt_tokens: int
    greedy: bool = False  # nothing but the likeliest token is asked for
    looks_back: bool = False  # draws depend on the tokens before them by more than the model's logits
    produced: int = 0
    reading_prompt: bool = False  # prompt log-probabilities are still being gathered
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    announced: bool = False  # the first piece, with the prompt's figures, was sent
    delivered: tuple[int, ...] = ()  # tokens that another core generated, still to be replayed
    awaited: Done | None = None  # who hears of the constraint: until then the scheduler knows nothing of the job
    modes: Modes | None = None  # of a constrained span
    text: SpanText | None = None  # of the section that is being written, from its first text on
    kind: Kind = "text"
    section: int = 0
    fresh: list[SpanOutput] = field(default_factory=list)  # of a constrained span: not yet told
    token: int | None = None  # of any other: drawn and not yet told
    logprob: TokenLogprob | None = None  # the token's
    ended: tuple[FinishReason, int | None] | None = None  # what the newest token's id or the span's length ended it by

    def logits_from(self, length: int) -> int:
        return 0 if self.reading_prompt else length - 1

    def goes_on(self) -> bool | None:
        """Whether the token that is being drawn will not be the last by the span's length; None where what is asked of
        the one after it depends on it. (Where any token may come, the next one is taken to leave it so.)"""
        if self.looks_back or not self.open:
            return None
        return self.produced + 1 < self.max_tokens

    @property
    def open(self) -> bool:
        """Whether any token may come next."""
        return self.modes is None or self.modes.open


@dataclass(slots=True, eq=False)
class ScoreJob:
    """Reads the log-probabilities of given tokens at given positions on a throw-away child.

    `targets` maps a position to (candidate, index in it, token id) triples: the logits at that position decide them.
    """

    request: ScoreRequest
    first: int
    targets: dict[int, list[tuple[int, int, int]]]

    def logits_from(self, length: int) -> int:
        return self.first

    def goes_on(self) -> None:
        """A score draws nothing."""


@dataclass(slots=True, eq=False)
class ScoreRequest:
    """All children that one `score` call reads."""

    id: int
    logprobs: list[list[float]]
    open_children: int = 0


Job = SpanJob | ScoreJob
