"""Which rows of a step are constrained: their masks are begun before the model runs and applied after it.

Knows rows and jobs on one side and masks on the other; nothing of scheduling or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.constrain.masks import Masks
from engine.constrain.matcher import ConstraintFailed
from engine.constrain.modes import Modes
from engine.jobs import SpanJob
from engine.step import Row


class Masking:
    """The constrained spans of one step at a time. `masks` may be None where no span has a constraint."""

    def __init__(self, masks: Masks | None) -> None:
        self._masks = masks
        self._modes: dict[int, Modes] = {}  # by request

    def start(self, rows: Sequence[Row]) -> None:
        """Begin to fill the masks of the rows that draw in this step."""
        self._modes = {}
        for row in rows:
            job = row.seq.job
            if isinstance(job, SpanJob) and job.modes is not None and row.end == len(row.seq):
                self._modes[job.id] = job.modes
        if self._modes:
            assert self._masks is not None
            self._masks.start(list(self._modes.values()))

    def forbid(self, jobs: Sequence[SpanJob], failed: dict[int, ConstraintFailed]) -> Callable[[Tensor], None] | None:
        """What forbids tokens in logits with a row for each of `jobs`, noting the rows that failed; None if nothing."""
        if not self._modes:
            return None
        assert self._masks is not None
        masks, at = self._masks, {job.id: i for i, job in enumerate(jobs)}
        rows = [at[id] for id in self._modes]
        return lambda logits: failed.update(masks.apply(logits, rows))
