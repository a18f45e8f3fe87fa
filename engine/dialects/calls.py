"""Tool calls as they arrive: a name, then fragments of the arguments' JSON text, then the end. Plain data.

`fold` makes whole calls of events. However the text behind them was split, the folded result is the same. Knows nothing
of how any model writes a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of `name`, which no list of tools was asked about."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the newest call's arguments. A complete call's fragments join to one JSON object."""

    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The newest call is over; complete, or as far as it came."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that stood where a call should, and is none. It never comes between a call's beginning and its end."""

    text: str


CallEvent = CallBegun | CallArguments | CallEnded | Malformed


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is JSON text: one object, or the beginning of one where the answer was cut off."""

    name: str
    arguments: str


def fold(events: Iterable[CallEvent]) -> tuple[list[Call], str]:
    """The calls of a stream of events, and the text in it that was no call."""
    calls: list[Call] = []
    name, fragments, text = "", [""], ""
    for event in events:
        match event:
            case CallBegun():
                name, fragments = event.name, []
            case CallArguments(fragment):
                fragments.append(fragment)
            case CallEnded():
                calls.append(Call(name, "".join(fragments)))
            case Malformed(more):
                text += more
    return calls, text
