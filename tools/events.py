"""What happens while calls run, as data that a page can show. `ms`: milliseconds since the call was started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.context import Step
from tools.outcome import Outcome


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
    step: Step
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
