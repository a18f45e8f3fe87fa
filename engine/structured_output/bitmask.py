"""Token bitmasks of one step, filled on threads while the model runs and then applied to its logits.

Every constrained sequence has a row of bits; one whose mode allows everything takes no part. The bits are packed 32 to
a word because the copy to the device dominates the cost there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.core.request import FollowerJob, SpanJob
from engine.core.step import Row
from engine.core.token_tree import Tree, path_to, runs
from engine.kernels.buffers import to_device
from engine.kernels.token_bitmask import apply_token_bitmask
from engine.structured_output.compiler import Compiler
from engine.structured_output.matcher import ConstraintFailed, words
from engine.structured_output.mode_machine import ModeMachine


class Masks:
    """Rows for the sequences of one step at a time: `apply` ends the work of `start`. Grows with the largest step."""

    def __init__(self, vocab_size: int, device: torch.device, threads: int = 2) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None  # threads begin with the first constrained step
        self._bits = torch.zeros(0, words(vocab_size), dtype=torch.int32)
        self._filling: list[Future[list[Filled]]] = []
        self._count = 0

    def start(self, modes: Sequence[ModeMachine], drafts: Sequence[Tree] | None = None) -> None:
        """Starts filling a row from each of `modes`, which must not move before `apply`, and one more after each token
        of its draft: tokens, and their parents (see `token_tree`)."""
        drafts = drafts or [((), ())] * len(modes)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="mask")
        self.wait()  # a step that failed may have left its threads writing
        starts = list(accumulate((1 + len(tokens) for tokens, _ in drafts), initial=0))
        self._count = starts[-1]
        if self._count > len(self._bits):
            pinned = self._device.type == "cuda"
            self._bits = torch.zeros(self._count, words(self._vocab_size), dtype=torch.int32, pin_memory=pinned)
        rows = self._bits.numpy()
        share = -(-len(modes) // self._threads)  # a task a thread: handing one over costs as much as filling a row
        self._filling = [
            self._pool.submit(_fill, rows[starts[at] :], modes[at : at + share], drafts[at : at + share])
            for at in range(0, len(modes), share)
        ]

    def apply(self, logits: Tensor, rows: Sequence[int]) -> dict[int, ConstraintFailed]:
        """Sets the logits of forbidden tokens to -inf, in place.

        `logits` is (n, vocabulary); `rows[i]` is the row for the i-th row of `start`. Returns the errors by row: such a
        row is left as it was, and its sample is invalid.
        """
        outcomes = self.wait()
        failed = {rows[i]: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, ConstraintFailed)}
        filled = [i for i, outcome in enumerate(outcomes) if outcome is True]
        if not filled:
            return failed
        if len(filled) < self._count:  # rows are compacted in place: other memory is not page-locked
            self._bits[: len(filled)] = self._bits[filled]
        bits = self._bits[: len(filled)].to(self._device, non_blocking=True)
        apply_token_bitmask(logits, bits, to_device(torch.tensor([rows[i] for i in filled]), self._device))
        return failed

    def wait(self) -> list[Filled]:
        """Waits until all rows are filled. Returns for each whether its mode forbids anything; none the second time."""
        filling, self._filling = self._filling, []
        return [outcome for share in filling for outcome in share.result()]


Filled = bool | ConstraintFailed


def _fill(rows: np.ndarray, modes: Sequence[ModeMachine], drafts: Sequence[Tree]) -> list[Filled]:
    """Fills the rows of some machines and their drafts; a failure affects no other row."""
    filled: list[Filled] = []
    for each, (tokens, parents) in zip(modes, drafts, strict=True):
        filled.append(_filled(each, rows[len(filled)]))
        for nodes in runs(len(tokens), parents):
            ahead = each.lookahead() if nodes else each
            for node in path_to(parents, nodes.stop - 1):
                accepted = ahead.accept(tokens[node])
                assert accepted, "a draft is cut where its span's constraint does not take it"
                if node in nodes:
                    filled.append(_filled(ahead, rows[len(filled)]))
    return filled


def _filled(modes: ModeMachine, row: np.ndarray) -> Filled:
    try:
        return modes.fill(row)
    except ConstraintFailed as failed:
        return failed


@dataclass(frozen=True, slots=True)
class Constraints:
    """The constraint services of a core: masks and compiler."""

    compiler: Compiler
    masks: Masks


class Masking:
    """Masks the constrained spans of one step at a time. `masks` may be None where no span has a constraint."""

    def __init__(self, masks: Masks | None) -> None:
        self._masks = masks
        self._modes: dict[int, tuple[ModeMachine, Tree]] = {}  # by request, with the draft of its row

    def start(self, rows: Sequence[Row]) -> None:
        """Starts filling the masks of the rows that sample in this step."""
        self._modes = {}
        ending = {row.seq.id: (row.seq.job, (row.draft, row.parents)) for row in rows if row.end == len(row.seq)}
        for job, draft in ending.values():
            leading = job.leader.job if isinstance(job, FollowerJob) else job
            if not isinstance(leading, SpanJob) or leading.modes is None:
                continue
            if leading.mixture is None or leading.mixture.completed_by(ending.keys()):
                self._modes[leading.id] = leading.modes, draft
        if self._modes:
            assert self._masks is not None
            machines, drafts = zip(*self._modes.values(), strict=True)
            self._masks.start(machines, drafts)

    def apply_mask(
        self, sampling: Sequence[tuple[int, int]], failed: dict[int, ConstraintFailed]
    ) -> Callable[[Tensor], None] | None:
        """Returns the function that masks logits, noting the rows that failed; None if none is needed. `sampling`: the
        spans that sample, by request, and the length of each one's draft; a span has a row of logits, and one more for
        each token of its draft."""
        if not self._modes:
            return None
        assert self._masks is not None
        masks, at, first = self._masks, dict[int, range](), 0
        for request, draft in sampling:
            at[request] = range(first, first + 1 + draft)
            first += 1 + draft
        rows = [row for request in self._modes for row in at[request]]
        return lambda logits: failed.update(masks.apply(logits, rows))
