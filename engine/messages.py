"""What passes between an engine's clients and its core: commands in, replies out. Plain data, nothing else.

Either side may live in another thread or, later, another process: no object is shared, and order is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.constrain.compiler import Outcome
from engine.outputs import Prefill, SpanOutput, Stats
from engine.params import Span


@dataclass(frozen=True, slots=True)
class Open:
    sequence: int
    tokens: tuple[int, ...]
    tenant: str
    priority: int
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Append:
    sequence: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generate:
    sequence: int
    request: int
    span: Span
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Score:
    sequence: int
    request: int
    candidates: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """New sequences that continue as `sequence`, and close when `scope` closes."""

    sequence: int
    children: tuple[int, ...]
    scope: int


@dataclass(frozen=True, slots=True)
class Truncate:
    sequence: int
    length: int


@dataclass(frozen=True, slots=True)
class Hold:
    sequence: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the sequence's span or score; what it has generated stays."""

    sequence: int
    request: int


@dataclass(frozen=True, slots=True)
class Close:
    sequence: int


@dataclass(frozen=True, slots=True)
class GetStats:
    request: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the constraint of a span that waits for it compiled to. From the core's own compiler, not from a client."""

    sequence: int
    request: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Stop:
    """End the core's loop; whatever runs is cancelled."""


Command = Open | Append | Generate | Score | Fork | Truncate | Hold | Cancel | Close | GetStats | Compiled | Stop


@dataclass(frozen=True, slots=True)
class Reading:
    """A span whose sequence takes several steps to read has come so far."""

    request: int
    prefill: Prefill


@dataclass(frozen=True, slots=True)
class Piece:
    """Progress of a span. The request is over when the output has a finish reason."""

    request: int
    output: SpanOutput


@dataclass(frozen=True, slots=True)
class Scored:
    request: int
    logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """The sequence closed while the request ran on it: by its owner, a scope around it, or its deadline."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The span's constraint cannot be held, or not in time. The sequence is as it was."""

    request: int
    reasons: tuple[str, ...]
    timed_out: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The span's constraint could not go on. The sequence may have tokens that no piece told of: truncate it."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class StatsReply:
    request: int
    stats: Stats


Reply = Reading | Piece | Scored | Refused | Failed | Closed | StatsReply
