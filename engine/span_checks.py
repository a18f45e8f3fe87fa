"""Checks a span against the sequence that it is to run on: its length, its engine, and what an endless one refuses."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.errors import ContextLengthExceeded, InvalidParameter
from engine.ipc.link import Client
from engine.multimodal.image_input import has_images
from engine.params import ChunkSpans, Span, Speculation, StreamingWindow


def check_span(span: Span, length: int, engine: Client, adapter: str | None, streaming: StreamingWindow | None) -> int:
    """Returns the `max_tokens` of a span on a sequence of `length` tokens, as a number that fits.

    Raises:
        ContextLengthExceeded, InvalidParameter: those of `Sequence.generate`.
    """
    engine.check_tokens((*span.stop_token_ids, *span.sampling.logit_bias))
    engine.check_speculation(span.speculation)
    if span.min_confidence and engine.fallback is None:
        raise InvalidParameter(
            "min_confidence", f"min_confidence is {span.min_confidence}, and the engine has no fallback weights; "
            "accepted: None.",
        )  # fmt: skip
    if span.min_confidence and adapter is not None:
        raise InvalidParameter(
            "min_confidence", f"min_confidence is {span.min_confidence}, and the fallback weights have no adapter "
            f"{adapter!r}; accepted: None.",
        )  # fmt: skip
    if streaming is not None:
        if span.prompt_logprobs is not None:
            refuse_endless(streaming, "log-probabilities of its prompt would be read across what it forgets")
        if span.speculation is not None:
            span.speculation.check_unused("an endless sequence")
        return span.max_tokens or max(engine.max_model_len, span.min_tokens)
    remaining = engine.max_model_len - length
    if remaining < max(1, span.min_tokens) or (span.max_tokens or 1) > remaining:
        asked = f" and max_tokens is {span.max_tokens}" if span.max_tokens is not None else ""
        raise ContextLengthExceeded(
            f"The sequence has {length} tokens{asked}; the context holds {engine.max_model_len} in all."
        )
    return span.max_tokens or remaining


def deadline_of(deadline_s: float | None) -> float | None:
    """Returns the time of `time.monotonic` at which a sequence closes that is opened now; None: at none.

    Raises:
        InvalidParameter: it is not positive.
    """
    if deadline_s is None:
        return None
    if deadline_s <= 0:
        raise InvalidParameter("deadline_s", f"deadline_s is {deadline_s}; accepted: None, or more than 0 seconds.")
    return time.monotonic() + deadline_s


def check_speculation(speculation: Speculation, proposers: Sequence[str], max_model_len: int) -> None:
    """Raises InvalidParameter for a proposer that is none of the engine's, or a prediction longer than the context."""
    if speculation.proposer not in ("auto", "off", *proposers):
        accepted = ", ".join(("auto", "off", *proposers))
        message = f"speculation.proposer is {speculation.proposer!r}; accepted: {accepted}."
        raise InvalidParameter("speculation.proposer", message)
    if len(speculation.prediction) > max_model_len:
        message = f"prediction has {len(speculation.prediction)} tokens; accepted: up to {max_model_len}."
        raise InvalidParameter("prediction", message)


def check_endless(
    tokens: Sequence[int], streaming: StreamingWindow | None, config: EngineConfig | None = None,
    chunks: ChunkSpans = (),
) -> None:  # fmt: skip
    """Raises InvalidParameter for what an endless sequence cannot have. `config`: of the engine that opens it."""
    if config is not None and not config.context_shift:
        refuse_endless(streaming, "the engine's context_shift is not set")
    if has_images(tokens):
        refuse_endless(streaming, "an image would be forgotten in part")
    if chunks:
        refuse_endless(streaming, "chunks are at places of the text")


def refuse_endless(streaming: StreamingWindow | None, why: str) -> None:
    """Raises InvalidParameter where a sequence has a window."""
    if streaming is not None:
        raise InvalidParameter("streaming", f"the sequence has a streaming window, and {why}; accepted: without one.")
