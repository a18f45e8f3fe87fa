"""Counters of the scheduler: tokens computed, recomputed and found in the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.request import SequenceState
from engine.core.step import Row


@dataclass(slots=True)
class SchedulerStats:
    """Counters of the scheduler since start."""

    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    resumed: int = 0
    resumed_late: int = 0
    resumed_tokens: int = 0
    resumed_reused_tokens: int = 0
    warmed_tokens: int = 0
    warmed_hit_tokens: int = 0
    chunk_hit_tokens: int = 0

    def admitted(self, seq: SequenceState, reused: int) -> None:
        """Counts a job's first admission. `reused`: the tokens of the sequence that are not computed again."""
        if seq.admitted:
            return
        seq.admitted = True
        seq.cached_tokens = seq.cursor
        if seq.pinned_at is not None:
            self.resumed += 1
            self.resumed_late += seq.queued_at > seq.pinned_until
            self.resumed_tokens += seq.pinned_tokens
            self.resumed_reused_tokens += min(reused, seq.pinned_tokens)
            seq.pinned_at, seq.pinned_until = None, 0.0
        self.prefix_query_tokens += len(seq) - seq.own_tokens
        self.prefix_hit_tokens += max(0, seq.cursor - seq.own_tokens)

    def computed(self, row: Row) -> None:
        """Counts the tokens of a row that ran."""
        seq, end = row.seq, row.end
        if row.move is not None and seq.streaming is None:
            self.chunk_hit_tokens += (copied := row.move.end - row.move.start)
            seq.cached_tokens += copied if row.move.start >= seq.preempted_at else 0
        if row.count == 1 and row.start >= seq.preempted_at:  # a decode, as most are
            self.prompt_tokens += not seq.generated[row.start]
            return
        recomputed = max(0, min(end, seq.preempted_at) - row.start)
        self.recomputed_tokens += recomputed
        self.prompt_tokens += seq.generated.count(0, row.start + recomputed, end)
