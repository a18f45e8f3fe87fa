"""Deferral inside an answer as a strategy: the engine's fallback weights go on where the first ones are not sure.

The engine does it, token by token; see `engine.ipc.fallback_link`. Other strategies and budgets defer by the threshold
that the engine was started with; this one brings its own.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from ponder import Options, Yields, strategy, think_and_answer
from ponder import StrategyContext as Context

if TYPE_CHECKING:
    from ponder import Sequence as EngineSequence


class FallbackOptions(Options):
    """`min_confidence`: the probability that the likeliest token must have; with 0 the first weights write it all."""

    min_confidence: float = Field(0.3, ge=0, le=1)


@strategy("fallback", FallbackOptions)
async def fallback(seq: EngineSequence, context: Context, options: FallbackOptions) -> Yields:
    """Writes the answer, and hands it to the fallback weights at the first token of which the model is not sure.

    Raises:
        InvalidParameter: the engine has no fallback weights.
    """
    span = replace(context.span, min_confidence=options.min_confidence)
    written = think_and_answer(
        seq, span, context.markers, opened=context.opened, closed=context.closed, calls=context.calls
    )
    async with aclosing(written) as pieces:
        async for piece in pieces:
            yield piece
