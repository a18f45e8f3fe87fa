"""The engine's outputs. Plain data; knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Literal

FinishReason = Literal["stop", "length", "repetition", "cancelled", "deadline"]
Kind = Literal["text", "thought", "body"]  # free text, thinking as marked by a layout, and a constrained body


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

    A span with a layout (engine/structured_output) has sections, told apart by markers that are no text: `section`
    counts the markers so far, and `kind` is the kind of this piece's text. Every other span is all one section of text.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of token_ids, when the span asked for them
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # first piece only; None for position 0 and images
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0  # tokens in the sequence when the span began
    cached_tokens: int = 0  # of those, from the prefix cache
    kind: Kind = "text"
    section: int = 0
    fallback: bool = False  # its tokens were sampled by the engine's fallback weights
    drafted: bool = False  # its tokens were proposed by a draft before they were sampled
    forgotten_tokens: int = 0  # of the text so far, that the model no longer sees (`StreamingWindow`)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Progress of a prefill, in tokens: `processed` of `total`, of which `cached` came from the prefix cache."""

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
    forgotten_tokens: int = 0  # at the span's end


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of the offload tiers. Bytes are those in use now and the limits; the rest counts blocks since start.

    A block is offloaded when it is evicted from the pool, and loaded when a sequence wants it. All is 0 without tiers.
    """

    host_bytes: int = 0
    host_bytes_total: int = 0
    disk_bytes: int = 0
    disk_bytes_total: int = 0
    saved_blocks: int = 0  # copied from the pool to host memory
    written_blocks: int = 0  # to disk
    host_hit_blocks: int = 0  # loaded to the pool from host memory
    disk_hit_blocks: int = 0
    passed_over_blocks: int = 0  # offloaded, but recomputing them was faster by the measured rates
    lost_blocks: int = 0  # evicted with no copy left
    bad_blocks: int = 0  # files that were damaged or cut short; their tokens were recomputed
    failed_writes: int = 0
    host_bytes_per_s: float = 0.0  # of loads, as learnt
    disk_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StateStats:
    """Slots of recurrent states, each of `slot_bytes` bytes; all 0 for a model without recurrent layers."""

    used: int = 0  # live states, and checkpoints that some sequence goes on from
    cached: int = 0  # checkpoints that nothing refers to
    free: int = 0
    slot_bytes: int = 0
    found: int = 0  # checkpoints that a sequence went on from, since start
    tiers: TierStats = field(default_factory=TierStats)


@dataclass(slots=True)
class KVTransferStats:
    """K/V exchanged with other engines since start; all 0 without `kv_transfer`."""

    received_blocks: int = 0  # loaded to the pool from the engine that prefilled them
    received_bytes: int = 0
    failed_loads: int = 0  # loads that ended early: the rest of their tokens was computed here
    sent_blocks: int = 0
    sent_bytes: int = 0
    send_seconds: float = 0.0  # of sending blocks, checksums included
    overlapped_seconds: float = 0.0  # of those, while the rest of the same prompt was still being computed
    layerwise_blocks: int = 0  # of the blocks sent, those that went layer by layer
    computed_at: float = 0.0  # by `time.monotonic`, of one machine: the last layer of what a peer asked for last
    loaded_at: float = 0.0  # the same: the last load had all of its blocks
    lookups: int = 0  # of prompts at K/V stores
    lookup_seconds: float = 0.0
    unsent_blocks: int = 0  # not saved to a store: it was away, slow or full
    passed_over_blocks: int = 0  # not looked up, as computing them seemed faster


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Drafted tokens since start. `rows`: decodes with a draft, each of which made one token and those accepted."""

    drafted: int = 0  # tokens that were verified
    accepted: int = 0
    rows: int = 0
    steps: int = 0  # with a draft
    drafted_at: tuple[int, ...] = ()  # by position in the draft
    accepted_at: tuple[int, ...] = ()
    saved_s: float = 0.0  # estimated, by the time of steps without a draft

    @property
    def tokens_per_step(self) -> float:
        """Returns the mean tokens that a decode with a draft made; 1 before there was any."""
        return 1.0 + self.accepted / self.rows if self.rows else 1.0


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """An adapter that is loaded. Counts are since it was."""

    name: str
    sequences: int = 0  # open ones
    opened: int = 0  # sequences, forks included
    resident: bool = False  # ready for steps
    loading: bool = False  # on its way there
    loads: int = 0  # times that it became resident
    evictions: int = 0  # times that another took its slot
    prompt_tokens: int = 0  # prefilled, cache hits excluded
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the engine, by its own counters. Tokens and hits count since start.

    `prefix_hit_tokens / prefix_query_tokens` is the hit rate of the prefix cache. Both count a job's first admission
    and leave out K/V that the sequence still held itself: tokens found again after a preemption, or kept between two
    spans or over a fork, are in neither.
    """

    waiting: int = 0
    running: int = 0
    sequences: int = 0  # open handles, idle ones included
    adapters: tuple[AdapterStats, ...] = ()
    blocks_total: int = 0
    blocks_used: int = 0  # referenced by some sequence; these and the next five make the total
    blocks_cached: int = 0  # without references, but findable by prefix
    blocks_free: int = 0  # empty
    adapter_blocks_pinned: int = 0  # of resident adapters that are never evicted
    adapter_blocks_used: int = 0  # of those that a running sequence uses, or that are on their way in
    adapter_blocks_idle: int = 0  # of the others, which are evicted as cached blocks are
    block_size: int = 0
    kv_groups: int = 1  # blocks that `block_size` new tokens take: one of each K/V group
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # prefilled, cache hits excluded
    generated_tokens: int = 0
    recomputed_tokens: int = 0  # recomputed after a preemption
    steps: int = 0
    step_tokens: int = 0  # tokens through the model, all steps together
    step_seconds: float = 0.0
    decodes: tuple[
        tuple[int, int, float], ...
    ] = ()  # of steps without prompts, of 1, 2–3, 4–7, … rows: (steps, rows, s)
    last_batch: int = field(default=0)  # rows in the newest step
    held: int = 0  # sequences that wait for a tool or the like, with a KV pin
    resumed: int = 0  # sequences that went on after such a wait
    resumed_late: int = 0  # of those, after their pin's TTL
    resumed_tokens: int = 0  # tokens that had K/V when the wait began, of all that went on
    resumed_reused_tokens: int = 0  # of those, not recomputed
    warmed_tokens: int = 0  # prefilled while idle, see `Engine.warm`; in no other count of prompts
    warmed_hit_tokens: int = 0  # of those, found by a request; each counts once
    chunk_hit_tokens: int = 0  # of chunks whose K/V was copied from another place, see `ChunkReuseConfig`
    encoded_tokens: int = 0  # of images
    encoder_seconds: float = 0.0
    tiers: TierStats = field(default_factory=TierStats)
    states: StateStats = field(default_factory=StateStats)
    kv_transfer: KVTransferStats = field(default_factory=KVTransferStats)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @classmethod
    def total(cls, parts: Sequence[Stats]) -> Stats:
        """Returns the statistics of replicas of one engine, of which there is at least one, added up."""
        adapters: dict[str, list[AdapterStats]] = {}
        for part in parts:
            for each in part.adapters:
                adapters.setdefault(each.name, []).append(each)
        whole: Stats = _added([replace(part, adapters=()) for part in parts])
        return replace(whole, adapters=tuple(map(_added, adapters.values())))

    @property
    def blocks_in_use(self) -> int:
        """Counts the blocks that no sequence can have now."""
        return self.blocks_used + self.adapter_blocks_pinned + self.adapter_blocks_used

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


_ALIKE = ("block_size", "kv_groups", "slot_bytes", "host_bytes_per_s", "disk_bytes_per_s")  # in all parts


def _added(parts: Sequence[Any]) -> Any:  # Any: of every type that statistics are made of
    """Adds numbers up, within tuples and dataclasses; of what is alike in all parts it takes the largest. Names are the
    first one's, and truths alternatives."""
    first = parts[0]
    match first:
        case bool():
            return any(parts)
        case int() | float():
            return sum(parts)
        case str():
            return first
        case tuple():
            columns = zip_longest(*parts)
            return tuple(_added([each for each in column if each is not None]) for column in columns)
    values = {each.name: [getattr(part, each.name) for part in parts] for each in fields(first)}
    return replace(first, **{name: max(some) if name in _ALIKE else _added(some) for name, some in values.items()})


def sections_of(pieces: Sequence[SpanOutput]) -> tuple[tuple[Kind, str], ...]:
    """Joins the texts of a span's sections, those without text left out."""
    texts: dict[tuple[int, Kind], str] = {}
    for piece in pieces:
        if piece.text:
            key = (piece.section, piece.kind)
            texts[key] = texts.get(key, "") + piece.text
    return tuple((kind, text) for (_, kind), text in texts.items())
