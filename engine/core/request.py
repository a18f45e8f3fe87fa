"""State of a sequence in the core, and the jobs that run on it: spans, scores, mixtures, prefills. Plain data.

A sequence has its tokens, which of them have K/V, and in which blocks. K/V is only a cache of the tokens: `table` and
`kv_len` may be dropped at any time and are recomputed. A job gives the first position whose logits it needs, and
whether it goes on after the next token; the scheduler knows nothing else of it.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field, replace

from engine.core.mixture import Mixture
from engine.core.repetition import RepetitionDetector
from engine.core.sampling_types import mix64
from engine.kv_cache.block_pool import chain_digest
from engine.model.detokenizer import SpanText
from engine.multimodal.image_input import ImageSpans, without_images
from engine.outputs import FinishReason, Kind, SpanOutput, TokenLogprob
from engine.params import RemotePrefill, Span, StreamingWindow
from engine.structured_output.compiler import Done
from engine.structured_output.matcher import Compiled
from engine.structured_output.mode_machine import ModeMachine


@dataclass(slots=True, eq=False)
class SpanJob:
    """A running span: its limits resolved to numbers, and its output so far."""

    id: int
    span: Span
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    prompt_tokens: int
    speculates: bool = False  # drafts may be proposed for it
    greedy: bool = False  # takes the likeliest token, and asks for no log-probabilities
    looks_back: bool = False  # samples depend on earlier tokens by more than the model's logits
    produced: int = 0
    reading_prompt: bool = False  # prompt log-probabilities are incomplete
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    announced: bool = False  # the first piece, with the prompt's figures, was sent
    delivered: tuple[int, ...] = ()  # tokens that another core generated, still to be replayed
    awaited: Done | None = None  # callback of the pending compilation: until then the scheduler does not know the job
    compiled: tuple[Compiled, ...] = ()  # of the constraint's parts, in order
    modes: ModeMachine | None = None  # of a constrained span
    text: SpanText | None = None  # of the current section, from its first text on
    kind: Kind = "text"
    section: int = 0
    fresh: list[SpanOutput] = field(default_factory=list)  # outputs not yet emitted
    token: int | None = None  # sampled, and its output not yet made
    logprob: TokenLogprob | None = None  # the token's
    ended: tuple[FinishReason, int | None] | None = None  # by the newest token's id, a repetition or the span's length
    repetition: RepetitionDetector | None = None
    mixture: Mixture | None = None  # that this sequence leads

    def logits_from(self, length: int) -> int:
        return 0 if self.reading_prompt else length - 1

    def goes_on(self) -> bool | None:
        """Returns whether the token in flight will not be the last by the span's length; None where the sampling of the
        one after depends on it. (While any token may come, the constraint is assumed to stay open.)"""
        if self.looks_back or self.speculates or not self.open or self.mixture is not None:
            return None
        return self.produced + 1 < self.max_tokens

    def defers(self, logprob: TokenLogprob | None) -> bool:
        """Returns whether the model is not surer of the next token than the span demands: by its own likeliest token,
        which neither a mask nor a random number changes."""
        if not self.span.min_confidence or logprob is None:
            return False
        return math.exp(logprob.top[0][1]) <= self.span.min_confidence

    def requested(self, logprob: TokenLogprob | None) -> TokenLogprob | None:
        """Returns as much of a sample's log-probabilities as the span asks for."""
        if logprob is None or self.span.logprobs is None:
            return None
        return logprob if self.span.logprobs else replace(logprob, top=())

    @property
    def open(self) -> bool:
        """Returns whether any token may come next."""
        return self.modes is None or self.modes.open


@dataclass(slots=True, eq=False)
class ScoreJob:
    """Reads the log-probabilities of given tokens at given positions on a throw-away child.

    `targets` maps a position to (candidate, index in it, token id) triples: the logits at that position decide them.
    Without any it reads the value head, after the last token.
    """

    request: ScoreGroup
    first: int
    targets: dict[int, list[tuple[int, int, int]]]

    def logits_from(self, length: int) -> int:
        return self.first

    def goes_on(self) -> None:
        """Returns None: a score samples nothing."""


@dataclass(slots=True, eq=False)
class ScoreGroup:
    """The children that one `score` call reads."""

    id: int
    logprobs: list[list[float]]
    open_children: int = 0


@dataclass(slots=True, eq=False)
class FollowerJob:
    """Gives its logits to a mixture, and takes over the tokens of `leader`, which has the span. `start`: the follower's
    length before it."""

    mixture: Mixture
    leader: SequenceState
    start: int

    def logits_from(self, length: int) -> int:
        return length - 1

    def goes_on(self) -> None:
        """Returns None: its next token is its leader's."""


@dataclass(slots=True, eq=False)
class PrefillJob:
    """Computes K/V for the prefix cache, and needs no logits (`engine.core.prefix_warming`)."""

    def logits_from(self, length: int) -> int:
        return length

    def goes_on(self) -> None:
        """Returns None: it samples nothing."""


NO_ADAPTER = -1
APPROXIMATE = -1  # the id of no token: see `SequenceState._content`

Job = SpanJob | ScoreJob | FollowerJob | PrefillJob


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence.

    `kv_len` tokens have valid K/V in `table`'s blocks. `cursor` is the next position to run through the model: equal to
    `kv_len`, or less when logits are needed at positions whose K/V exists (those are run without writing).
    """

    id: int
    tokens: list[int]
    root: bytes
    arrival: int
    priority: int = 0
    tenant: str = ""
    adapter: int = NO_ADAPTER  # the number of a known one
    adapter_slot: int = NO_ADAPTER  # its place among the resident ones, from admission on
    parent: SequenceState | None = None  # the scope that closes this one with it
    children: dict[int, SequenceState] = field(default_factory=dict)
    stream: int = 0  # keys the random numbers, with a seed and a position
    forks: int = 0
    generated: bytearray = field(default_factory=bytearray)  # 1 where the token was sampled here, 0 where it was given
    counts: Counter[int] = field(default_factory=Counter)  # of generated tokens, for penalties

    table: list[int] = field(default_factory=list)
    windowed: list[tuple[int, ...]] = field(default_factory=list)  # of each, the blocks of windowed groups: `KVGroups`
    window_from: int = 0  # the first block of the table whose windowed ones are held
    moves: int = 0  # times that a block of the table was removed or replaced: else it has only grown
    writable: int = 0  # the table's blocks from K/V's end to this position are shared with no other sequence
    kv_len: int = 0
    cursor: int = 0
    state: int = 0  # the slot of recurrent state that stands for the first `state_len` tokens; 0: of none
    state_len: int = 0
    branch: int = 0  # where the job's cached K/V ended, in whole blocks: a checkpoint is due there
    rolling: bytes = b""  # the newest checkpoint that the current job's decodes have made
    digests: list[bytes] = field(default_factory=list)  # of the leading full blocks, computed as needed
    chunks: tuple[tuple[int, int], ...] = ()  # spans whose K/V may be copied: `kv_cache.chunk_reuse`
    approximate_from: int | None = None  # the first position from which K/V may be such a copy, or depend on one
    streaming: StreamingWindow | None = None  # in whole blocks; `tokens` are then those that the model sees
    forgotten: array[int] = field(default_factory=lambda: array("q"))  # tokens that stood behind the sinks
    forgotten_generated: bytearray = field(default_factory=bytearray)
    moved: bool = False  # K/V behind the sinks was moved: it depends on forgotten tokens, and is found by nobody

    job: Job | None = None
    queued_at: float = 0.0  # when the job came; preemption keeps it
    admitted: bool = False  # the current job was counted in the prefix statistics
    own_tokens: int = 0  # tokens whose K/V the sequence had kept when the current job came: no hits of the prefix cache
    cached_tokens: int = 0  # tokens that the current job did not need to compute, when it was admitted
    preempted_at: int = 0  # tokens below this position were computed before and lost: not counted twice
    used_at: float = 0.0
    pinned_at: float | None = None  # when it began to wait for a tool, with `pinned_tokens` of K/V
    pinned_tokens: int = 0
    pinned_until: float = 0.0  # end of the KV pin
    waiting_for: tuple[str, ...] = ()
    tail: int = 0  # where K/V ended when it was dropped, if inside a block: that block may be offloaded
    turned_at: float = 0.0  # when it was preempted
    fetches: int = 0  # times that the current job waited for loads
    deadline: float | None = None
    remote_prefill: RemotePrefill | None = None  # until its K/V was asked for
    _seen: set[int] = field(default_factory=set, repr=False)
    _seen_length: int = 0
    _image_spans: ImageSpans = field(default_factory=ImageSpans, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def text_len(self) -> int:
        """Counts all of its tokens, those forgotten included."""
        return len(self.tokens) + len(self.forgotten)

    @property
    def remaining(self) -> int:
        """Counts the tokens still to run through the model before the job gets its logits."""
        return len(self.tokens) - self.cursor

    def seen(self) -> Set[int]:
        """Returns the set of the sequence's tokens of the vocabulary. Cached, and only added to while the sequence
        grows."""
        if self._seen_length < len(self.tokens):
            self._seen.update(without_images(self.tokens[self._seen_length :]))
            self._seen_length = len(self.tokens)
        return self._seen

    def image_spans(self) -> list[tuple[int, int]]:
        """Returns where its images are: see `ImageSpans`."""
        return self._image_spans.among(self.tokens)

    def append(self, tokens: list[int], *, generated: bool) -> None:
        self.tokens.extend(tokens)
        self.generated.extend((b"\1" if generated else b"\0") * len(tokens))
        if generated:
            self.counts.update(tokens)

    def push(self, token: int) -> None:
        """Appends one sampled token."""
        self.tokens.append(token)
        self.generated.append(1)
        self.counts[token] += 1

    def digest(self, index: int, block_size: int) -> bytes:
        """Returns the chained digest of full block `index`."""
        while len(self.digests) <= index:
            start = len(self.digests) * block_size
            previous = self.digests[-1] if self.digests else self.root
            self.digests.append(chain_digest(previous, self._content(start, start + block_size)))
        return self.digests[index]

    def _content(self, start: int, end: int) -> list[int]:
        """Returns the tokens of a block as its digest has them. The one in which K/V may begin to be approximate has a
        mark: so no sequence without chunks finds it, or any that follows."""
        marked = self.approximate_from is not None and start <= self.approximate_from < end
        return [APPROXIMATE, *self.tokens[start:end]] if marked else self.tokens[start:end]

    def partial_digest(self, end: int, block_size: int) -> bytes:
        """Returns the digest of the tokens before `end` that fill a part of a block."""
        full = end // block_size
        previous = self.digest(full - 1, block_size) if full else self.root
        return chain_digest(previous, self._content(full * block_size, end))

    @property
    def blocks(self) -> list[int]:
        """Returns all of its blocks, of all groups."""
        return [*self.table, *(block for each in self.windowed for block in each)]

    @property
    def held(self) -> int:
        """Counts its blocks, of all groups."""
        windowed = len(self.windowed) - self.window_from
        return len(self.table) + (windowed * len(self.windowed[-1]) if windowed else 0)

    def forget(self, count: int, block_size: int) -> None:
        """Forgets `count` tokens behind the sinks, whole blocks. The caller sees to their K/V, and to that behind."""
        assert self.streaming is not None
        first = self.streaming.sinks
        self.seen()  # a penalty knows what the model does not
        self._seen_length -= count
        self.forgotten.extend(self.tokens[first : first + count])
        self.forgotten_generated += self.generated[first : first + count]
        del self.tokens[first : first + count], self.generated[first : first + count]
        del self.digests[first // block_size :]
        self.preempted_at = max(min(self.preempted_at, first), self.preempted_at - count)
        self.tail = self.writable = 0
        self.moves += 1

    def _recall(self, length: int, block_size: int) -> int:
        """Puts the forgotten tokens back where a text of `length` sees more than is left. Returns its length in
        `tokens`. So what is seen depends on the text alone, and on none of what was cut off."""
        if self.streaming is None or self.streaming.forgotten(length) >= len(self.forgotten):
            return length - len(self.forgotten)
        first = self.streaming.sinks
        self.tokens[first:first], self.generated[first:first] = self.forgotten, self.forgotten_generated
        self.forgotten, self.forgotten_generated, self.moved = array("q"), bytearray(), False
        self.kv_len = min(self.kv_len, first)
        del self.digests[first // block_size :]
        return length

    def truncate(self, length: int, block_size: int) -> list[int]:
        """Removes the text's tokens from `length` on; returns the blocks that are no longer needed, in table order."""
        length = self._recall(length, block_size)
        for token, was_generated in zip(self.tokens[length:], self.generated[length:], strict=True):
            if was_generated:
                self.counts[token] -= 1
        self.counts = +self.counts
        self._seen, self._seen_length = set(), 0
        self._image_spans.cut(length)
        del self.tokens[length:], self.generated[length:], self.digests[length // block_size :]
        self.kv_len = min(self.kv_len, length)
        self.cursor = min(self.cursor, self.kv_len)
        self.preempted_at = min(self.preempted_at, length)
        self.chunks = tuple(chunk for chunk in self.chunks if chunk[1] <= length)
        if self.approximate_from is not None and length <= self.approximate_from:
            self.approximate_from = None
        self.moves += 1
        self.writable = 0
        self.tail = self.tail if self.tail <= length else 0
        return self.trim(block_size)

    def trim(self, block_size: int) -> list[int]:
        """Removes the blocks beyond K/V's end; returns them, in table order."""
        keep = -(-self.kv_len // block_size)
        dropped = [*self.table[keep:], *(block for each in self.windowed[keep:] for block in each)]
        if dropped:
            del self.table[keep:], self.windowed[keep:]
            self.window_from = min(self.window_from, len(self.windowed))
            self.moves += 1
            self.writable = min(self.writable, keep * block_size)
        return dropped

    def drop_kv(self) -> list[int]:
        """Drops all K/V; returns its blocks."""
        dropped, self.table, self.windowed, self.window_from = self.blocks, [], [], 0
        self.moves += 1
        self.writable = 0
        self.preempted_at = max(self.preempted_at, self.kv_len)
        self.kv_len = self.cursor = 0
        self.moved = False  # what is computed next is the K/V of `tokens` alone
        return dropped

    def fork(self, child_id: int, arrival: int) -> SequenceState:
        """Copies the sequence with a random key of its own. The caller takes the references to its blocks."""
        self.forks += 1
        self.writable = 0
        return SequenceState(
            id=child_id,
            tokens=self.tokens.copy(),
            root=self.root,
            arrival=arrival,
            priority=self.priority,
            tenant=self.tenant,
            adapter=self.adapter,
            stream=mix64(self.stream, self.forks),
            generated=self.generated.copy(),
            counts=self.counts.copy(),
            table=self.table.copy(),
            windowed=self.windowed.copy(),
            window_from=self.window_from,
            kv_len=self.kv_len,
            cursor=self.kv_len,
            state=self.state,
            state_len=self.state_len,
            digests=self.digests.copy(),
            chunks=self.chunks,
            approximate_from=self.approximate_from,
            streaming=self.streaming,
            forgotten=self.forgotten[:],
            forgotten_generated=self.forgotten_generated.copy(),
            moved=self.moved,
            preempted_at=self.preempted_at,
            tail=self.tail,
            deadline=self.deadline,
        )
