"""A question as one model reads it: the conversation's tokens, how the answer is drawn, and how long it may get.

Knows nothing of how answers are written or told.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.admission.ticket import output_limit
from app.errors import ApiError, invalid
from app.served import Served
from engine.errors import ChatTemplateError
from engine.params import Span

if TYPE_CHECKING:
    from app.manner import Manner
    from app.runs.grounded import Grounds
    from app.runs.history import History, Messages

LEAST_ROOM = 256  # tokens for an answer; with fewer, what earlier answers called is left out of the prompt


@dataclass(frozen=True, slots=True)
class Prepared:
    """`room`: tokens that the context leaves after the prompt; `span` has the limit of what is written."""

    served: Served
    prompt: list[int]
    span: Span
    room: int
    variables: dict[str, Any]  # Any: a model's authors name them

    @property
    def limit(self) -> int:
        assert self.span.max_tokens is not None
        return self.span.max_tokens


async def prepare(
    served: Served,
    manner: Manner,
    history: History,
    found: Grounds | None,
    specs: Sequence[dict[str, Any]],  # Any: JSON, as OpenAI's `tools` has it
    *,
    sampling: Mapping[str, Any],
    max_tokens: int | None,
) -> Prepared:
    """`sampling` has what is to be other than the model's authors chose it.

    Raises:
        ApiError: the conversation leaves no room for an answer.
        ChatTemplateError: the model's template does not take the conversation.
    """
    variables = manner.variables

    async def tokens(messages: Messages) -> list[int]:
        shown = messages if found is None else found.messages(messages)
        return manner.prompt(await served.chat_tokens(shown, variables, specs), served)

    prompt: list[int] | None = None
    if history.messages != history.plain:
        with suppress(ChatTemplateError, ApiError):  # not every template takes calls and results; or it is too long
            whole = await tokens(history.messages)
            prompt = whole if served.engine.max_tokens - len(whole) >= LEAST_ROOM else None
    if prompt is None:
        try:
            prompt = await tokens(history.plain)
        except ApiError as error:
            raise invalid(
                "content", f"{error.message} Start a new chat, or ask a shorter question.", error.code or "",
            ) from None  # fmt: skip
    room = served.engine.max_tokens - len(prompt)
    longest = output_limit(max_tokens)
    if room < 1:
        raise invalid(
            "content", f"This conversation has {len(prompt)} tokens and the model's context "
            f"{served.engine.max_tokens}. Start a new chat, or ask a shorter question.", "context_length_exceeded",
        )  # fmt: skip
    drawn = replace(served.sampling, **sampling)
    if drawn.seed is None:
        drawn = replace(drawn, seed=secrets.randbits(53))  # so that it can be made again
    return Prepared(
        served, prompt, Span(sampling=drawn, max_tokens=min(max_tokens or longest or room, room)), room, variables
    )
