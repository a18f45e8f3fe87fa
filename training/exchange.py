"""The plain data that the generators make and the trainer reads.

An exchange is one question and its answer; a conversation is a system prompt, the exchanges that went before, and the
one that is to be learned. Knows nothing of tokens or templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phrasing = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """`right` is a regular expression that a correct answer contains (case ignored)."""

    task: str
    user: str
    thinking: str
    answer: str
    right: str


@dataclass(frozen=True, slots=True)
class MultiTurn:
    exchanges: tuple[Exchange, ...]  # the last one is learned, the others are history
    system: str | None = None
    enable_thinking: bool = True

    @property
    def last(self) -> Exchange:
        return self.exchanges[-1]

    def prompt(self) -> list[dict[str, str]]:
        """Messages up to and with the last question."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges[:-1]:
            messages.append({"role": "user", "content": exchange.user})
            messages.append({"role": "assistant", "content": exchange.answer})
        messages.append({"role": "user", "content": self.last.user})
        return messages

    def completion(self) -> str:
        """Returns the text that the model is to write after the generation prompt, without the end-of-turn token."""
        if self.enable_thinking:
            return f"<think>\n{self.last.thinking}\n</think>\n\n{self.last.answer}"
        return self.last.answer
