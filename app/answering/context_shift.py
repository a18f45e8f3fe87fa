"""Windows of endless chats: what of a chat a model sees that has grown past its context, and what it no longer sees.

Only a prompt that leaves no room for its answer gets a window: all others run as they would without. The sinks are all
that stands before the first message of a user: the system prompt, and the tools. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.admission.request_budget import output_limit
from app.answering.reasoning_config import ReasoningConfig
from app.answering.served_model import ServedModel
from app.errors import invalid
from engine.params import StreamingWindow

Messages = Sequence[dict[str, Any]]  # Any: JSON
Rendered = Callable[[Messages], Awaitable[list[int]]]  # a prompt of these messages, however long it is
SHARE = 0.5  # of the context: for sinks at most, and for an answer without a limit


@dataclass(frozen=True, slots=True)
class EndlessPrompt:
    """A prompt, the most tokens of its answer, and the window that it is seen through; None: it is seen whole."""

    tokens: list[int]
    limit: int
    streaming: StreamingWindow | None = None


def check_endless(served: ServedModel, reasoning_config: ReasoningConfig) -> None:
    """
    Raises:
        ApiError: 400: the server has no endless chats, or the request's strategy has none.
    """
    why = None if served.engine.config.context_shift else "this server's setting context_shift is off"
    if reasoning_config.strategy is not None:
        why = f"the strategy {reasoning_config.strategy.name!r} forks and scores a whole prompt"
    if why is not None:
        message = f"context_shift is true, and {why}; accepted: false."
        raise invalid("context_shift", message, "unsupported_parameter")


async def plan_endless(
    served: ServedModel, prompt: list[int], messages: Messages, rendered: Rendered, limit: int | None, param: str
) -> EndlessPrompt:
    """Plans the prompt of a chat that may grow past the context. `limit`: of its answer, if the request has one.

    Raises:
        ApiError: 400 `context_length_exceeded`: the sinks, of `param`, are more than half of the context.
    """
    context, most = served.engine.max_model_len, output_limit(limit)
    half = int(SHARE * context)
    wanted = limit or min(half, most or half)
    if len(prompt) + wanted <= context:
        rest = context - len(prompt)
        return EndlessPrompt(prompt, rest if most is None else min(rest, most))
    sinks = _shared(prompt, await rendered(_opening(messages)))
    size = served.engine.config.block_size
    blocks = -(-sinks // size) * size
    if blocks > half:
        raise invalid(
            param, f"The system prompt and the tools have {sinks} tokens, which are never forgotten; accepted: at most "
            f"{half}, half of this model's context of {context} tokens.", "context_length_exceeded",
        )  # fmt: skip
    window = StreamingWindow(sinks, context - blocks).in_blocks(size, context)
    return EndlessPrompt(prompt, limit or (context if most is None else min(context, most)), window)


async def first_seen(messages: Messages, prompt: Sequence[int], seen_from: int, rendered: Rendered) -> int:
    """Returns the number of the first question, of those in `messages`, that is seen from its beginning where the model
    sees nothing of the prompt between the sinks and position `seen_from`: all of them where there is none."""
    begins = [at for at, message in enumerate(messages) if message["role"] == "user"]
    low, high = 1, len(begins)  # the first is behind the sinks
    while low < high:
        middle = (low + high) // 2
        if _shared(prompt, await rendered(messages[: begins[middle]])) >= seen_from:
            high = middle
        else:
            low = middle + 1
    return low


def _opening(messages: Messages) -> Messages:
    """Returns a chat with the same beginning and another question."""
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return [*messages[:first], {"role": "user", "content": "\u2026"}]


def _shared(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Counts the tokens with which both begin."""
    return next(
        (at for at, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), min(len(tokens), len(others))
    )
