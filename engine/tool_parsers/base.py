"""Interface of a tool parser: the constraint and the reading of a model's calls.

The layout has the control tokens by which bodies begin and end, the constraint enforces the text of a body, and the
parser reads it. A tool parser is made once for a model and makes a plan for each request. `Sections` are for calls that
stand each between the tokens `<tool_call>` and `</tool_call>`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol, Self

from engine.errors import InvalidParameter
from engine.structured_output.layout import Constrained, Layout
from engine.structured_output.spec import JSON_OBJECT, Constraint, JsonSchema, OneOf
from engine.tool_parsers.streaming import BodyParser
from engine.tool_parsers.tools import Named, ToolChoice, ToolSpec


class Tokens(Protocol):
    """The part of a tokenizer that a tool parser needs."""

    @property
    def vocab_size(self) -> int: ...

    def token_id(self, token: str) -> int | None: ...

    def token_bytes(self, id: int) -> bytes: ...

    def is_special(self, id: int) -> bool: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The plan of one request's calls: their layout, constraint and parser. `parser` makes a parser for one body; see
    `Bodies` for all. `answer` constrains an answer without calls."""

    layout: Layout
    body: Constraint
    parser: Callable[[], BodyParser]
    answer: Constraint | None = None

    @property
    def marker(self) -> int | None:
        """Returns the control token that begins each call, and nothing else; None where there is none."""
        return None if self.layout.text_header else self.layout.begin

    @property
    def constrained(self) -> Constrained:
        return Constrained(self.body, self.layout, self.answer)

    @property
    def without_calls(self) -> Constrained | None:
        """Returns the constraint of an answer that may call nothing."""
        return None if self.answer is None else Constrained(self.answer, Layout(breaks=self.layout.breaks))


class ToolParser(Protocol):
    @property
    def name(self) -> str: ...

    def plan(
        self,
        tools: Sequence[ToolSpec],
        choice: ToolChoice,
        parallel: bool = True,
        loose: Set[str] = frozenset(),
    ) -> ToolPlan:
        """A plan for calls of these tools.

        "auto" leaves free text or calls to the model; "required" is one call at least and nothing else; a named tool is
        called exactly once. `parallel=False` allows one call at most. The arguments of `loose` tools are any JSON
        object, for schemas that no backend can enforce.

        Raises:
            InvalidParameter: the choice cannot be met, as there are no tools or none of that name; or the model writes
                calls in a way that this engine cannot enforce.
            ConstraintRefused: a tool cannot be written in this tool parser as its schema asks.
            ValueError: the choice is "none", which needs no plan, or a loose tool is strict.
        """
        ...


def offered(tools: Sequence[ToolSpec], choice: ToolChoice, loose: Set[str]) -> list[ToolSpec]:
    """The tools that may be called. Raises as `ToolParser.plan` does."""
    if choice == "none":
        raise ValueError('tool_choice "none" needs no plan')
    if strict := [tool.name for tool in tools if tool.strict and tool.name in loose]:
        raise ValueError(f"strict tools cannot be loose: {', '.join(strict)}")
    chosen = [tool for tool in tools if not isinstance(choice, Named) or tool.name == choice.name]
    if not chosen:
        wanted = f"there is no tool {choice.name!r}" if isinstance(choice, Named) else "there are no tools"
        accepted = ", ".join(tool.name for tool in tools) or "at least one tool"
        raise InvalidParameter("tool_choice", f"{wanted}; accepted: {accepted}.")
    return chosen


def one_of(parts: Sequence[Constraint]) -> Constraint:
    return parts[0] if len(parts) == 1 else OneOf(tuple(parts))


def arguments(tool: ToolSpec, loose: Set[str]) -> JsonSchema:
    """Returns the constraint of a tool's arguments as JSON text."""
    return JSON_OBJECT if tool.name in loose else JsonSchema.of(tool.arguments)


def line_breaks(tokens: Tokens) -> frozenset[int]:
    """Returns the tokens that are one or two line feeds and nothing else. Reads the whole vocabulary."""
    return frozenset(id for id in range(tokens.vocab_size) if tokens.token_bytes(id) in (b"\n", b"\n\n"))


BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Sections:
    """The tokens' ids. `breaks` may stand between sections."""

    begin: int
    end: int
    breaks: frozenset[int]

    @classmethod
    def of(cls, tokens: Tokens) -> Self:
        """Returns a tag's token. Raises ValueError where a tag is not a token."""
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
