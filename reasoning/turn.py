"""An assistant's turn as it grows: pieces of the engine become deltas of content, reasoning and tool calls.

A stream sends the deltas, a whole reply joins them, so the two can't differ. Knows nothing of chunks or encodings.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.outputs import TokenLogprob
from engine.tool_parsers import BodyParser, CallArguments, CallBegun, CallEvent, Malformed
from engine.tool_parsers.streaming import Bodies
from reasoning.thinking import Piece

_ID_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates require it; others take any


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))


@dataclass(frozen=True, slots=True)
class Content:
    """`drafted`: its tokens were proposed before they were sampled."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: bool = False


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow. `index` counts the calls of this turn from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallMore:
    index: int
    arguments: str


Delta = Content | Reasoning | CallStart | CallMore
TurnFinish = Literal["stop", "length", "repetition", "tool_calls"]


class Turn:
    """One answer. `parser` reads the bodies of its calls, None where there can be none."""

    def __init__(self, parser: Callable[[], BodyParser] | None = None) -> None:
        self.finish_reason: TurnFinish | None = None
        self._bodies = None if parser is None else Bodies(parser)
        self._calls = 0
        self._space = ""  # white space that may stand before a call: then it is nobody's, and so are its tokens
        self._space_logprobs: tuple[TokenLogprob, ...] = ()

    def take(self, piece: Piece) -> list[Delta]:
        """Returns a piece's deltas."""
        deltas: list[Delta] = []
        if piece.part == "thinking":
            deltas += [Reasoning(piece.text)] if piece.text else []
        elif self._bodies is None:
            if piece.text or piece.logprobs:
                deltas.append(Content(piece.text, piece.logprobs, piece.drafted > 0))
        elif piece.part == "call":
            deltas += self._read(self._bodies.push(piece.section, piece.text))
        else:
            deltas += self._read(self._bodies.end()) if piece.text else []  # free text ends a body
            deltas += self._content(piece)
        if piece.finish_reason is not None:
            deltas += self._end(piece)
        return deltas

    def _content(self, piece: Piece) -> list[Delta]:
        text = self._space + piece.text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._space_logprobs += () if piece.section else piece.logprobs  # in a section they are those of its markers
        if not shown:
            return []
        logprobs, self._space_logprobs = self._space_logprobs, ()
        return [Content(shown, logprobs, piece.drafted > 0)]

    def _read(self, events: list[CallEvent]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            match event:
                case CallBegun(name):
                    self._space, self._space_logprobs = "", ()
                    deltas.append(CallStart(self._calls, new_call_id(), name))
                    self._calls += 1
                case CallArguments(fragment):
                    deltas.append(CallMore(self._calls - 1, fragment))
                case Malformed(text):
                    deltas.append(Content(self._space + text, self._space_logprobs))
                    self._space, self._space_logprobs = "", ()
        return deltas

    def _end(self, piece: Piece) -> list[Delta]:
        deltas = [] if self._bodies is None else self._read(self._bodies.end())
        if self._space and not self._calls:
            deltas.append(Content(self._space, self._space_logprobs))
        match piece.finish_reason:
            case "stop":
                self.finish_reason = "tool_calls" if self._calls else "stop"
            case "repetition":
                self.finish_reason = "repetition"
            case _:
                self.finish_reason = "length"
        return deltas


@dataclass(slots=True)
class WholeTurn:
    """The deltas of a turn, joined. Where there may be calls, no content is null and not an empty string."""

    may_call: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[tuple[CallStart, list[str]]] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        match delta:
            case Content(text, logprobs):
                self.content.append(text)
                self.logprobs += logprobs
            case Reasoning(text):
                self.reasoning.append(text)
            case CallStart():
                self.calls.append((delta, []))
            case CallMore(index, arguments):
                self.calls[index][1].append(arguments)

    def message(self) -> dict[str, Any]:
        """The assistant's message in OpenAI's shape. Any: it is JSON."""
        content = "".join(self.content)
        shown = content or None if self.may_call else content
        message: dict[str, Any] = {"role": "assistant", "content": shown, "refusal": None}
        if reasoning := "".join(self.reasoning):
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": start.id,
                    "type": "function",
                    "function": {"name": start.name, "arguments": "".join(arguments)},
                }
                for start, arguments in self.calls
            ]
        return message
