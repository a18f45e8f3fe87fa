"""The engine's outputs. Plain data; knows nothing of HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "deadline"]
Kind = Literal["text", "thought", "body"]  # free text, what a layout marks as thinking, and a constrained body


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position, from the model's own logits (before bias, penalties and temperature)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the k likeliest (token id, log-probability), likeliest first


@dataclass(frozen=True, slots=True)
class SpanOutput:
    """A piece of a running span. Concatenated `text` and `token_ids` of all pieces are the span's whole result.

    `text` can lag `token_ids`: text that may be the start of a stop string, or half a character, is held back until it
    is decided. The last piece of a span is the only one with a `finish_reason`. `stop_reason` is the stop string or
    token id that matched, None for end of sequence.

    A span with a layout (engine/constrain) has sections, told apart by markers that are no text: `section` counts the
    markers so far, and `kind` says what this piece's text is. Every other span is all one section of text.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of token_ids, when the span asked for them
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # first piece only; None for position 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0  # tokens in the sequence when the span began
    cached_tokens: int = 0  # of those, how many needed no computing
    kind: Kind = "text"
    section: int = 0


@dataclass(frozen=True, slots=True)
class Prefill:
    """The progress of a prefill, in tokens: `processed` of `total`, of which `cached` needed no computing."""

    processed: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class SpanResult:
    """A finished span, whole. `sections` are its texts in order with their kinds; `text` is all of them joined."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    sections: tuple[tuple[Kind, str], ...]


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of the offload tiers. Bytes are those in use now and those there may be; the rest counts blocks since
    start.

    A block goes down when it is evicted from the pool, and comes up when a sequence wants it. All is 0 without tiers.
    """

    host_bytes: int = 0
    host_bytes_total: int = 0
    disk_bytes: int = 0
    disk_bytes_total: int = 0
    saved_blocks: int = 0  # copied from the pool to host memory
    written_blocks: int = 0  # to disk
    host_hit_blocks: int = 0  # that came back to the pool from host memory
    disk_hit_blocks: int = 0
    passed_over_blocks: int = 0  # were there, but computing them again was faster by the measured rates
    lost_blocks: int = 0  # given up by the lowest tier, or for want of room, with no copy left
    bad_blocks: int = 0  # files that were damaged or cut short; their tokens were computed again
    failed_writes: int = 0
    host_bytes_per_s: float = 0.0  # at which blocks come up, as learnt
    disk_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the engine, by its own counters. Tokens and hits count since start.

    `prefix_hit_tokens / prefix_query_tokens` is the hit rate of the prefix cache. Both count a job's first admission
    and leave out what the sequence still held itself: what is found again after a preemption, or kept between two spans
    or over a fork, is in neither.
    """

    waiting: int = 0
    running: int = 0
    sequences: int = 0  # open handles, idle ones included
    blocks_total: int = 0
    blocks_used: int = 0  # referenced by some sequence
    blocks_cached: int = 0  # free to take, but still holding a prefix that can be found
    blocks_free: int = 0  # free and empty
    block_size: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # prefilled, cache hits excluded
    generated_tokens: int = 0
    recomputed_tokens: int = 0  # computed again after a preemption
    steps: int = 0
    step_tokens: int = 0  # tokens through the model, all steps together
    step_seconds: float = 0.0
    last_batch: int = field(default=0)  # rows in the newest step
    held: int = 0  # sequences that wait for a tool or the like, and whose K/V is kept for them
    resumed: int = 0  # sequences that went on after such a wait
    resumed_late: int = 0  # of those, after their lease was over
    resumed_tokens: int = 0  # tokens that had K/V when the wait began, of all that went on
    resumed_reused_tokens: int = 0  # of those, how many needed no computing again
    tiers: TierStats = field(default_factory=TierStats)

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0
