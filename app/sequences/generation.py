"""One span on a leased sequence, as events: pieces as they come, and how it ended.

Closing the stream stops the span; the sequence stays, with the tokens that were read from the engine by then. Knows
nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from app.answering.answer_plan import remaining_context
from app.answering.served_model import ServedModel
from app.observability.metrics import Counting
from app.openai.chat_completions import finite_logprob, usage_json
from app.openai.completions import DEFAULT_MAX_TOKENS
from app.openai.event_stream import event
from app.openai.text_constraints import constrain_text
from app.sequences.leased import LeasedSequence
from app.sequences.registry import Sequences
from app.sequences.sequence_requests import GenerateRequest
from engine.outputs import SpanOutput, TokenLogprob
from engine.params import Span
from engine.structured_output.layout import Layout
from reasoning.thinking import Tally


async def written(
    leased: LeasedSequence, request: GenerateRequest, sequences: Sequences, counting: Counting
) -> AsyncGenerator[bytes, None]:
    """The events of `POST /api/sequences/{id}/generate`, `[DONE]` excepted.

    Raises:
        ApiError: the request cannot be met, now or at all.
        EngineError: see `engine.Sequence.generate`.
    """
    served = leased.served
    watch, tally = counting.watch("sequences"), Tally()
    end: dict[str, Any] = {}
    with watch.measured():
        with leased.call() as seq:
            span, warnings = await _span(leased, request, served)
            watch.admit([served], leased.user, len(seq), span.max_tokens or 0)
            sequences.check(leased.user, 0, span.max_tokens or 0)
            with leased.growing(span.max_tokens or 0), seq.generate(span) as outputs:
                async for out in outputs:
                    tally.prompt_tokens += out.prompt_tokens
                    tally.cached_tokens += out.cached_tokens
                    tally.completion_tokens += len(out.token_ids)
                    watch.tokens(0, len(out.token_ids), tally.cached_tokens)
                    if out.token_ids or out.text:
                        yield event(_piece(out, served, request))
                    if out.finish_reason is not None:
                        end = {"finish_reason": out.finish_reason, "stop_reason": out.stop_reason, "length": len(seq)}
        # A reader of this event may call again at once: the call is over.
        more = {"warnings": list(warnings)} if warnings else {}
        yield event({"type": "end", **end, "usage": usage_json(tally), **more})


async def _span(leased: LeasedSequence, request: GenerateRequest, served: ServedModel) -> tuple[Span, tuple[str, ...]]:
    held = await constrain_text(request, served, leased.user)
    constraint = None if held is None else held.constrained
    if constraint is not None:
        # The line breaks that models like to put before an answer would be tokens here that no piece has as text.
        constraint = replace(constraint, layout=Layout())
    remaining = remaining_context(served, range(len(leased)), request.max_tokens, "max_tokens")
    span = request.span(
        served.sampling, remaining=remaining, vocab_size=served.engine.vocab_size, default_limit=DEFAULT_MAX_TOKENS
    )
    served.engine.check_speculation(span.speculation)
    span = replace(span, logprobs=request.logprobs, keep_stop_token=request.keep_stop_token, constraint=constraint)
    return span, () if held is None else held.warnings


def _piece(out: SpanOutput, served: ServedModel, request: GenerateRequest) -> dict[str, Any]:
    piece: dict[str, Any] = {"type": "piece", "text": out.text, "tokens": list(out.token_ids)}
    if request.logprobs is not None:
        piece["logprobs"] = [_logprob(entry, served) for entry in out.logprobs]
    return piece


def _logprob(entry: TokenLogprob, served: ServedModel) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": token, "text": served.engine.tokenizer.token_text(token), "logprob": finite_logprob(logprob)}

    return {**one(entry.token_id, entry.logprob), "top": [one(token, value) for token, value in entry.top]}
