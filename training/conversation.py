"""The plain data that the generators make, the trainer reads and the evaluation asks.

A conversation is a list of messages in the shapes of the chat API, with the tools it may use. Every assistant message
with `learned` set is trained on, so one long prompt (passages, tools) can carry several questions. A case is a
conversation that the model is to continue, and the right replies. Knows nothing of tokens or templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Phrasing = Literal["train", "held_out"]
Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}: any JSON Schema


@dataclass(frozen=True, slots=True)
class SpokenCall:
    name: str
    arguments: dict[str, Any]  # JSON

    def written(self) -> str:
        """As the model writes it, between its marks."""
        body = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Message:
    """`thinking`, `calls` and `learned` are the assistant's. Thinking is kept only after the last user message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str = ""
    calls: tuple[SpokenCall, ...] = ()
    learned: bool = True

    def as_json(self) -> dict[str, Any]:
        """The message in the shape of the chat API."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            out["reasoning_content"] = self.thinking
        if self.calls:
            out["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return out


@dataclass(frozen=True, slots=True)
class Conversation:
    """`enable_thinking` false asks for answers without thinking, as the chat template's variable of that name does."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    enable_thinking: bool = True

    def as_json(self) -> list[dict[str, Any]]:
        return [message.as_json() for message in self.messages]


@dataclass(frozen=True, slots=True)
class ModelReply:
    """One message that the model wrote; `broken` when a tool call is no valid JSON or it ran out of tokens."""

    thinking: str
    content: str
    calls: tuple[SpokenCall, ...]
    broken: bool = False


Verdict = dict[str, bool | tuple[int, int]]  # measure → right or wrong, or right parts of how many


@dataclass(frozen=True, slots=True)
class Case:
    """One question of the evaluation: the conversation, the answers to its calls, and its judge.

    `answer_call` gives the content of the tool message for a call (without it, the model's first message is its last).
    `judge` gets all the model's messages in order. `wanted` is a sequence of replies that it calls right throughout:
    the proof that the case can be passed.
    """

    prompt: Conversation
    judge: Callable[[Sequence[ModelReply]], Verdict]
    wanted: tuple[ModelReply, ...]
    answer_call: Callable[[SpokenCall], str] | None = None
