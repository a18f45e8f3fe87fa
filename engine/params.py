"""The engine's request parameters: sampling parameters and spans. Plain data; knows nothing of tensors.

A *span* is one stretch of generation on a sequence. Stops, limits and constraints belong to the span, not to the
request, so thinking and answering can each have their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.config import MAX_DRAFT
from engine.errors import InvalidParameter
from engine.structured_output.layout import Constrained

MAX_TOP_K = 2**31 - 1  # tensors hold it


def _check(ok: bool, name: str, value: object, accepted: str) -> None:
    if not ok:
        raise InvalidParameter(name, f"{name} is {value!r}; accepted: {accepted}.")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters by which the next token is sampled from the logits.

    Applied in this order: logit bias, repetition, presence and frequency penalties, mask, temperature, min-p, top-k,
    top-p. `temperature=0` is greedy and ignores the filters after it. Samples are keyed by (`seed`, the sequence's
    place in its fork tree, token position), so a row's result does not depend on its batch.

    Raises:
        InvalidParameter: a value is out of range; the message names it and the accepted values.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # in [0, 1): drop tokens less likely than min_p x the likeliest
    repetition_penalty: float = 1.0  # > 0; over prompt and output (Keskar et al. 2019, CTRL)
    presence_penalty: float = 0.0  # in [-2, 2]; over the output alone
    frequency_penalty: float = 0.0  # in [-2, 2]; over the output alone
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit, in [-100, 100]
    seed: int | None = None  # None: random, chosen by the engine when the span starts

    def __post_init__(self) -> None:
        _check(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "0 (greedy) to 100")
        _check(0 <= self.top_k <= MAX_TOP_K, "top_k", self.top_k, f"0 (off), or 1 to {MAX_TOP_K}")
        _check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "greater than 0, at most 1")
        _check(0.0 <= self.min_p < 1.0, "min_p", self.min_p, "0 to less than 1")
        _check(
            0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", self.repetition_penalty, "0 (excl.) to 100"
        )
        _check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", self.presence_penalty, "-2 to 2")
        _check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", self.frequency_penalty, "-2 to 2")
        for token, bias in self.logit_bias.items():
            _check(token >= 0 and -100.0 <= bias <= 100.0, "logit_bias", {token: bias}, "token ids >= 0, -100 to 100")
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit signed integer")


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """An engine that prefills the same prompt and serves its K/V (vLLM's `do_remote_prefill`), at its `kv_ip` and
    `kv_port`."""

    host: str
    port: int


MAX_CHUNKS = 256  # of a prompt
ChunkSpans = tuple[tuple[int, int], ...]  # [start, end) of positions in a prompt, in order and apart


def check_chunks(spans: Iterable[tuple[int, int]], tokens: int, *, reuses: bool) -> ChunkSpans:
    """Returns the chunks of a prompt of so many `tokens`, in order. `reuses`: the engine's `chunk_reuse` is set.

    Raises:
        InvalidParameter: a span is empty or outside of the prompt, two overlap, there are too many, or the engine
            reuses none.
    """
    found = tuple(sorted((start, end) for start, end in spans))
    _check(reuses or not found, "chunks", f"{len(found)} spans", "none, as the engine's chunk_reuse is not set")
    _check(len(found) <= MAX_CHUNKS, "chunks", f"{len(found)} spans", f"at most {MAX_CHUNKS}")
    for at, (start, end) in enumerate(found):
        free = found[at - 1][1] if at else 0
        _check(free <= start < end <= tokens, "chunks", (start, end), f"spans within {free} to {tokens}, not empty")
    return found


@dataclass(frozen=True, slots=True)
class StreamingWindow:
    """Tokens of an endless sequence that the model sees: the first `sinks` (attention sinks) and up to `window` of the
    last ones (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453). Once there are more, the oldest half of the window is
    forgotten at once, and those that stay get the positions behind the sinks: each counts from the context's beginning,
    not the text's.

    Raises:
        InvalidParameter: a number is out of range.
    """

    sinks: int = 16
    window: int = 1024

    def __post_init__(self) -> None:
        _check(self.sinks >= 0, "streaming.sinks", self.sinks, "0 or more tokens")
        _check(self.window >= 2, "streaming.window", self.window, "2 or more tokens")

    @property
    def total(self) -> int:
        """Returns the most tokens that the model sees."""
        return self.sinks + self.window

    def forgotten(self, length: int) -> int:
        """Returns the number of tokens behind the sinks that are forgotten of a text of so many."""
        step = self.window // 2
        return max(0, -(-(length - self.total) // step) * step)

    def in_blocks(self, block_size: int, max_model_len: int) -> StreamingWindow:
        """Returns the window in whole K/V blocks: the sinks rounded up, the window down to an even number of blocks.

        Raises:
            InvalidParameter: no two blocks are left of the window, or it is longer than the context.
        """
        sinks, pair = -(-self.sinks // block_size) * block_size, 2 * block_size
        most = (max_model_len - sinks) // pair * pair
        if not pair <= self.window <= max_model_len - sinks or most < pair:
            accepted = f"{pair} to {most} tokens" if most >= pair else f"fewer sinks than {self.sinks}"
            message = f"streaming.window is {self.window} beside {sinks} sinks in blocks of {block_size}"
            message = f"{message}, and the context holds {max_model_len}; accepted: {accepted}."
            raise InvalidParameter("streaming", message)
        return StreamingWindow(sinks, self.window // pair * pair)


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """A span ends once its newest tokens are one pattern, of `min_pattern_size` to `max_pattern_size` tokens, that
    stands there `min_count` times without a gap. Named as in vLLM.

    Raises:
        InvalidParameter: a value is out of range.
    """

    max_pattern_size: int  # in tokens; each token costs one comparison for each size
    min_pattern_size: int = 1
    min_count: int = 8

    def __post_init__(self) -> None:
        name, accepted = "repetition_detection.max_pattern_size", f"1 to {MAX_PATTERN_SIZE} tokens"
        _check(1 <= self.max_pattern_size <= MAX_PATTERN_SIZE, name, self.max_pattern_size, accepted)
        name, accepted = "repetition_detection.min_pattern_size", f"1 to max_pattern_size ({self.max_pattern_size})"
        _check(1 <= self.min_pattern_size <= self.max_pattern_size, name, self.min_pattern_size, accepted)
        name, accepted = "repetition_detection.min_count", f"2 to {MAX_REPETITIONS}"
        _check(2 <= self.min_count <= MAX_REPETITIONS, name, self.min_count, accepted)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding of a span. `proposer` is one of the engine's, "auto" for those that it is set to, or "off";
    `max_tokens` bounds a draft, up to the engine's own bound. `prediction` is a text that the span may repeat in part,
    as an edited file does: the suffix proposer looks there, too.

    Raises:
        InvalidParameter: `max_tokens` is out of range.
    """

    proposer: str = "auto"
    max_tokens: int | None = None
    prediction: tuple[int, ...] = ()  # token ids

    def __post_init__(self) -> None:
        known = self.max_tokens is None or 1 <= self.max_tokens <= MAX_DRAFT
        _check(known, "speculation.max_tokens", self.max_tokens, f"None, or 1 to {MAX_DRAFT} tokens")

    def check_unused(self, what: str) -> None:
        """Raises InvalidParameter where a proposer is named, for `what` verifies no drafts."""
        if self.proposer not in ("auto", "off") and not self.prediction:
            message = f"speculation.proposer is {self.proposer!r}, and {what} verifies no drafts; accepted: auto, off."
            raise InvalidParameter("speculation.proposer", message)


MAX_PATTERN_SIZE = 256
MAX_REPETITIONS = 100_000


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of generation.

    `max_tokens=None` runs to the end of the context; with a `StreamingWindow`, which has none, for as many tokens. Stop
    strings may span tokens; nothing at or past a stop string is ever emitted as text. A stop token ends the span and is
    neither emitted as text nor kept in the sequence, unless `keep_stop_token`. `ignore_eos` ignores the model's own
    end-of-sequence tokens; `stop_token_ids` still count.

    With a `constraint` the span writes nothing else, up to a stop or `max_tokens`, and ends where the constraint does.
    `min_tokens` then holds in free text alone, and stop strings are looked for in free text and in a body that is the
    whole answer, not in sections between markers. Where only one text can follow it is appended without running the
    model (jump-forward), unless `logprobs` are requested.

    With `repetition_detection` a span that runs in circles ends, with the finish reason "repetition" and the repeated
    tokens in it; not before `min_tokens`. It sees this span's own tokens, and none of a constrained body or of markers:
    JSON may have as many zeros as it likes.

    `min_confidence` is for an engine with fallback weights: they sample the first token at which the likeliest one has
    no larger probability, and all after it. None is the engine's own threshold; 0 leaves the span to the first weights,
    1 to the others.

    Raises:
        InvalidParameter: a value is out of range.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    min_tokens: int = 0  # end-of-sequence and stop tokens cannot be sampled, nor stop strings match, before this many
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keep_stop_token: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's log-probability and the k likeliest (k may be 0)
    prompt_logprobs: int | None = None  # the same for the tokens already in the sequence, sent with the first output
    constraint: Constrained | None = None
    repetition_detection: RepetitionDetection | None = None
    min_confidence: float | None = None
    speculation: Speculation | None = None  # None: as the engine is set

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check(
                self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1, or None for the rest of the context"
            )
        _check(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None:
            _check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "at most max_tokens")
        _check(all(self.stop), "stop", self.stop, "non-empty strings")
        _check(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids >= 0")
        known = self.min_confidence is None or 0.0 <= self.min_confidence <= 1.0
        _check(known, "min_confidence", self.min_confidence, "None, or a probability, 0 to 1")
        constrained = self.constraint is not None
        _check(not (constrained and self.ignore_eos), "ignore_eos", True, "False, in a span with a constraint")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"None, or 0 to {MAX_LOGPROBS}")


MAX_LOGPROBS = 64
