"""Asking the person: "which do you mean?" is an answer too, and better than a guess."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ponder import Context, NotAnswered, Retry, tool

Choice = Annotated[str, Field(min_length=1, max_length=200)]


@tool(permission="none", timeout=5)
async def ask_user(
    ctx: Context,
    question: Annotated[str, Field(min_length=1, max_length=1000)],
    choices: Annotated[list[Choice], Field(min_length=2, max_length=10)] | None = None,
) -> str:
    """Ask the user which of several meanings is meant, or for what only they know, and wait for the answer.

    Args:
        question: one question, in the user's language.
        choices: the answers to choose from; left out, the user writes freely.
    """
    if choices is not None and len(set(choices)) < len(choices):
        raise Retry("Give each choice once.")
    try:
        answer = await ctx.ask(question, choices)
    except NotAnswered:
        return "Nobody answered. Go on with what is likeliest and say what you took it to mean, or say what is missing."
    return f"The user answered: {answer}"
