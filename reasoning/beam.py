"""Beam search as a strategy: the likeliest answer of those that the engine's beam search finds on forks.

Knows nothing of how beams are kept: see `engine.beam_search`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from ponder import InvalidParameter, Options, Spent, Yields, beam_search, pieces_of, prefill, refuse_fields, strategy
from ponder import StrategyContext as Context

if TYPE_CHECKING:
    from ponder import Sequence as EngineSequence


class BeamOptions(Options):
    """`length_penalty`: scores are divided by length to this power; above 1 favours long answers."""

    width: int = Field(4, ge=1, le=32)
    length_penalty: float = Field(1.0, ge=0, le=4)


@strategy("beam", BeamOptions)
async def beam(seq: EngineSequence, context: Context, options: BeamOptions) -> Yields:
    """Searches for the likeliest answer, several beginnings side by side. Sampling parameters play no part in it.

    Raises:
        InvalidParameter: the span has a constraint, stops or log-probabilities, or names a proposer of drafts, which
            beams do not support.
    """
    span = context.span
    assert span.max_tokens is not None
    refuse_fields(context, "beam search", "constraint", "stop", "logprobs")
    if span.speculation is not None:
        span.speculation.check_unused("beam search")
    if options.width > context.quota.branches:
        raise InvalidParameter("width", f"width is {options.width}; accepted: at most {context.quota.branches} beams.")
    await prefill(seq)
    eos = tuple(dict.fromkeys((*context.tokenizer.eos_token_ids, *span.stop_token_ids)))
    found = await beam_search(
        seq, width=options.width, max_tokens=span.max_tokens, eos=eos, length_penalty=options.length_penalty
    )
    best = found[0]
    tokens = best.token_ids[:-1] if best.ended else best.token_ids
    yield Spent(max(0, options.width * len(best.token_ids) - len(tokens)))
    seq.append(tokens)
    for piece in pieces_of(tokens, context, "stop" if best.ended else "length"):
        yield piece
