"""A step for the device: rows of tokens, and what must be copied first. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from engine.core.request import SequenceState


@dataclass(slots=True, eq=False)
class Row:
    """`count` tokens of a sequence from position `start` on, in one step.

    Logits are wanted from position `logits_from` (it may lie past the row). `copy` is a block to copy first. With
    `drawn_at` its one token is what the step before draws at that place, and nobody here knows it yet.
    """

    seq: SequenceState
    start: int
    count: int
    logits_from: int
    copy: tuple[int, int] | None = None
    drawn_at: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def logits(self) -> int:
        """Returns how many rows of logits are wanted."""
        return max(0, self.end - max(self.start, self.logits_from))


@dataclass(slots=True)
class Step:
    """`saves`: (block, row of host memory) pairs to copy before anything is written. `drawn` (rows,): what the step
    before draws, on the device, where rows of this one begin with it.
    """

    rows: list[Row] = field(default_factory=list)
    tokens: int = 0
    saves: list[tuple[int, int]] = field(default_factory=list)
    drawn: Tensor | None = None
