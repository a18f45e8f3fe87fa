"""A tool call, its events while it runs, and its outcome.

Every way a call can end is an outcome that the model reads. `ms` is milliseconds since the call was started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tools.context import ToolProgressStep
from tools.result import Result, shorten
from tools.tool import Tool

_MAX_LENGTH = 8000  # characters of a message of ours, which may quote the model's text

Kind = Literal[
    "ok",
    "unknown_tool",
    "bad_arguments",
    "rate_limited",
    "denied",
    "retry",
    "timeout",
    "error",
    "interrupted",
]


@dataclass(frozen=True, slots=True)
class Call:
    """A model's wish. `id` is unique in its run; `arguments` may still be the JSON text that the model wrote."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a call; `result.text` is the message where it failed.

    `replayed`: it is a journal's, and nothing ran. `cached`: it is an earlier call's. `retry_after_s`: seconds to wait
    where the rate was exceeded.
    """

    call_id: str
    name: str
    kind: Kind
    result: Result
    replayed: bool = False
    cached: bool = False
    retry_after_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    @property
    def text(self) -> str:
        """As the model reads it: the error comes first, and text from outside is framed."""
        framed_text = self.result.framed(self.name)
        match self.kind:
            case "error":
                return f"The call failed: {framed_text}"
            case "retry":
                return f"Call again, as the tool says: {framed_text}"
            case _:
                return framed_text


def failed(call: Call, kind: Kind, message: str, tool: Tool | None = None) -> Outcome:
    """The outcome of a failed call. A tool's own message is as untrusted as its results."""
    text, cut = shorten(message, _MAX_LENGTH if tool is None else tool.max_chars)
    return Outcome(call.id, call.name, kind, Result(text, None, (), tool is not None and tool.untrusted, cut))


@dataclass(frozen=True, slots=True)
class CallStarted:
    """First of every call. The arguments are as the model gave them; they may yet be refused."""

    call_id: str
    name: str
    arguments: Mapping[str, Any] | str
    ms: float


@dataclass(frozen=True, slots=True)
class CallProgress:
    call_id: str
    name: str
    step: ToolProgressStep
    ms: float


@dataclass(frozen=True, slots=True)
class CallOutput:
    """A piece of a streaming tool's output, as it came: not capped, not framed."""

    call_id: str
    name: str
    text: str
    ms: float


@dataclass(frozen=True, slots=True)
class CallResult:
    """Last of a call that went well."""

    call_id: str
    name: str
    outcome: Outcome
    ms: float


@dataclass(frozen=True, slots=True)
class CallError:
    """Last of a call that did not; `outcome.kind` says how. A cancelled call has no last event."""

    call_id: str
    name: str
    outcome: Outcome
    ms: float


Event = CallStarted | CallProgress | CallOutput | CallResult | CallError
