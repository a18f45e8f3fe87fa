"""The agent's loop for the model being served: its calls held to the tools' schemas, in its own format."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.errors import invalid
from app.plans import plan_of
from app.served import Served
from engine.params import Span
from engine.tool_parsers import read_tools
from reasoning.agent import Agent, Limits, Style, Tools
from reasoning.dialogue import after_calls
from reasoning.thinking import Answers, think_and_answer


async def agent_of(
    served: Served,
    specs: Sequence[Mapping[str, Any]],  # Any: JSON, as OpenAI's `tools` has it
    tools: Tools,
    span: Span,
    limits: Limits,
    variables: Mapping[str, Any],  # Any: a model's authors name their template's variables
    answers: Answers = think_and_answer,
    clock: Callable[[], float] = time.monotonic,
    user: str = "",
) -> Agent:
    """`answers` writes its turns. `clock` gives the seconds that `limits` are held to.

    Raises:
        ApiError, InvalidParameter: the tools cannot be offered to this model.
    """
    if served.dialect is None:
        raise invalid(
            "tools", "This model's chat template has no form of tool call that Ponder knows; accepted: a model that "
            "calls tools, or the server's option --tool-dialect.", "unsupported_parameter",
        )  # fmt: skip
    style = Style(
        await plan_of(served, read_tools(specs), "auto", True, user),
        served.markers,
        lambda calls, texts: after_calls(served.engine.tokenizer, calls, texts, variables),
        served.opens_thinking,
        served.closes_thinking,
    )
    return Agent(style, tools, span, limits, answers=answers, clock=clock)
