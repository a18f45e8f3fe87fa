"""A step for the device: rows of tokens, and the block copies that precede them. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine.core.request import SequenceState


@dataclass(frozen=True, slots=True)
class KVMove:
    """K/V of tokens that a sequence gets at positions [start, end) by copying: from the places of positions less by
    `delta` in `blocks`, the first of which has that of `start`. Their keys are rotated by `delta` positions."""

    start: int
    end: int
    delta: int
    blocks: tuple[int, ...]

    def pairs(self, table: Sequence[int], size: int) -> list[tuple[int, int]]:
        """Returns the slots (source, destination) of each token, with the sequence's block table."""
        first = (self.start - self.delta) // size
        sources = range(self.start - self.delta, self.end - self.delta)
        return [
            (self.blocks[at // size - first] * size + at % size, table[to // size] * size + to % size)
            for at, to in zip(sources, range(self.start, self.end), strict=True)
        ]


@dataclass(slots=True, eq=False)
class Row:
    """`count` tokens of a sequence from position `start` on, in one step.

    Logits are needed from position `logits_from` (it may lie past the row). `copies`: block copies that must precede.
    `draft`: proposed tokens that follow in the same step, in a row that reaches the sequence's end; each needs logits.
    `parents`: of a draft that is a tree in preorder, see `token_tree`; token i of it has the place of position end + i.
    With `sampled_at` its one token is the sample of that row in the step before, still unknown to the host. `state` is
    the slot of recurrent state that the row advances, and `state_copy` a copy of slots that must precede. `move` is one
    of K/V of a chunk, up to `start`, which follows `copies`.
    """

    seq: SequenceState
    start: int
    count: int
    logits_from: int
    copies: tuple[tuple[int, int], ...] = ()
    sampled_at: int | None = None
    state: int = 0
    state_copy: tuple[int, int] | None = None
    draft: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    move: KVMove | None = None

    @property
    def width(self) -> int:
        """Returns the number of tokens that the row has in the step, its draft included."""
        return self.count + len(self.draft)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def extended(self) -> tuple[int, int, KVMove | None]:
        """Returns what a longer row takes over: its tokens, its rows of logits, and its move."""
        return self.count, self.logits, self.move

    @property
    def logits(self) -> int:
        """Returns the number of rows of logits."""
        return max(0, self.end - max(self.start, self.logits_from)) + len(self.draft)


@dataclass(slots=True)
class Step:
    """Rows of one forward pass. `saves`: (block, row of host memory) pairs to copy before anything is written, and
    `state_saves` those of recurrent states.
    `sampled` (rows,): the tokens that the step before samples, on the device, where rows of this one begin with them.
    `save_kv_layer` is called with the index of each layer once its K/V is written, or queued to be, where layers run
    one after another over all tokens.
    """

    rows: list[Row] = field(default_factory=list)
    tokens: int = 0
    saves: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)
    sampled: Tensor | None = None
    save_kv_layer: Callable[[int], None] | None = None

    def going_on(self, *, running: int, waiting: bool) -> list[tuple[int, SequenceState]] | None:
        """Returns the rows whose sequences go on after this step, which samples in each, whatever the samples are. None
        where that depends on them, the step has not all of the `running` sequences, or one of the `waiting` ones may
        get a place."""
        jobs = [(at, row.seq, row.seq.job) for at, row in enumerate(self.rows) if row.seq.job is not None]
        if len(jobs) != running:
            return None
        following: list[tuple[int, SequenceState]] = []
        for at, seq, job in jobs:
            goes_on = job.goes_on()
            if goes_on is None or (waiting and not goes_on):  # a place will become free
                return None
            if seq.streaming is not None and len(seq) >= seq.streaming.total:  # it has to forget first
                return None
            if goes_on:
                following.append((at, seq))
        return following
