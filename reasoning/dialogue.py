"""The tokens that a chat format adds to a sequence that goes on: the end of a turn, results of tools, the next turn's
head.

Only the new part is tokenized, from a conversation of that turn alone: the earlier part is in the sequence already, as
the model wrote it. Results are somebody else's text, so nothing in them becomes a control token. Knows nothing of
engines or calls under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Json = dict[str, Any]  # Any: plain JSON
_EARLIER = {"role": "user", "content": "?"}  # templates want a question before an answer
_SOME_TOOL: Json = {"type": "function", "function": {"name": "tool", "parameters": {"type": "object"}}}


class ChatFormat(Protocol):
    """The part of a tokenizer that a dialogue needs."""

    @property
    def control_ids(self) -> frozenset[int]: ...

    def apply_chat_template(
        self,
        messages: list[Json],
        *,
        tools: list[Json] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]: ...


class CannotContinue(ValueError):
    """The model's chat template cannot take the results of tools after a call."""


def turn_messages(content: str, calls: Sequence[tuple[str, str, Json]], results: Sequence[str]) -> list[Json]:
    """Returns a turn that ended with calls, (id, name, arguments) each, and their results, as messages."""
    spoken = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in calls
    ]
    answered = [
        {"role": "tool", "tool_call_id": id, "name": name, "content": result}
        for (id, name, _), result in zip(calls, results, strict=True)
    ]
    return [{"role": "assistant", "content": content, "tool_calls": spoken}, *answered]


def after_calls(
    format: ChatFormat, calls: Sequence[tuple[str, str]], results: Sequence[str], variables: Mapping[str, Any]
) -> list[int]:
    """Tokens that follow a turn which ended with calls, (id, name) each: their results, and the head of the next turn.

    They begin with the end of the turn, as the stop token that ended it is not part of the sequence. `variables` are
    the template's; Any: a model's authors name them.

    Raises:
        CannotContinue: the template refuses results, or renders them before the turn.
    """
    asked, *answered = turn_messages("", [(id, name, {}) for id, name in calls], results)
    try:
        before = format.apply_chat_template(
            [_EARLIER, asked], tools=[_SOME_TOOL], add_generation_prompt=False, **variables
        )
        whole = format.apply_chat_template([_EARLIER, asked, *answered], tools=[_SOME_TOOL], **variables)
    except ValueError as error:
        raise CannotContinue(f"This model's chat template takes no results of tools: {error}") from None
    if whole[: len(before)] != before:
        raise CannotContinue("This model's chat template writes a turn otherwise once it has results of tools.")
    return [*_end_of_turn(format, before), *whole[len(before) :]]


def after_answer(format: ChatFormat, question: str, variables: Mapping[str, Any]) -> list[int]:
    """Tokens that follow an answer: the end of its turn, a user's question, and the head of the next turn.

    Raises:
        CannotContinue: the template refuses a second question.
    """
    first, other = (
        _apply(
            format, [_EARLIER, {"role": "assistant", "content": said}, {"role": "user", "content": question}], variables
        )
        for said in ("?", "!")
    )
    # Templates may drop an earlier turn's thinking: the tokens after an answer are those that no answer changes.
    same = 0
    while same < min(len(first), len(other)) and first[-1 - same] == other[-1 - same]:
        same += 1
    return first[len(first) - same :]


def _apply(format: ChatFormat, messages: list[Json], variables: Mapping[str, Any]) -> list[int]:
    try:
        return format.apply_chat_template(messages, **variables)
    except ValueError as error:
        raise CannotContinue(f"This model's chat template takes no second question: {error}") from None


def _end_of_turn(format: ChatFormat, turn: Sequence[int]) -> list[int]:
    """From the last control token on: the mark that ends a turn, and the line break that some templates put behind."""
    at = next((at for at in range(len(turn) - 1, -1, -1) if turn[at] in format.control_ids), len(turn))
    return list(turn[at:])
