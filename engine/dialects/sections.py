"""Calls that stand each in a section of its own, between the tokens `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from engine.constrain.layout import Layout
from engine.dialects.dialect import Tokens, line_breaks
from engine.dialects.tools import Named, ToolChoice

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Sections:
    """The tokens' ids. `breaks` may stand between sections."""

    begin: int
    end: int
    breaks: frozenset[int]

    @classmethod
    def of(cls, tokens: Tokens) -> Self:
        """Raises ValueError where a tag is not a token."""
        begin, end = tokens.token_id(BEGIN), tokens.token_id(END)
        if begin is None or end is None:
            raise ValueError(f"{BEGIN if begin is None else END} is not a token")
        return cls(begin, end, line_breaks(tokens))

    def layout(self, choice: ToolChoice, parallel: bool) -> Layout:
        return Layout(
            begin=self.begin,
            end=self.end,
            free=choice == "auto",
            several=parallel and not isinstance(choice, Named),
            breaks=self.breaks,
        )
