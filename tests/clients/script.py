"""A script for the model of `tests.clients.scripted_model`, as a client's message carries it. Standard library alone: a
client's own environment imports it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

MARK = "PLAY "


@dataclass(frozen=True)
class Turn:
    """An answer of the model: its thinking, its text, and its calls as (name, arguments)."""

    text: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    thinking: str = ""

    def text_of_turn(self) -> str:
        """Returns the turn as the bundled model's template writes it."""
        calls = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
            for name, arguments in self.calls
        ]
        return f"<think>\n{self.thinking}\n</think>\n\n" + "\n".join([*([self.text] if self.text else []), *calls])


def play(*turns: Turn) -> str:
    """Returns a user's message that makes the model answer with `turns`, one after the other."""
    return MARK + json.dumps([asdict(turn) for turn in turns], ensure_ascii=False)
