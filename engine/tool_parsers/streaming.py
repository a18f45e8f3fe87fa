"""Parses tool calls while they are streamed: characters go in, events of calls come out.

A call is its name, then fragments of the arguments' JSON text, then the end; `fold` makes whole calls of events.
However the text was split, the folded result is the same. A body keeps the text that no call has taken yet: should the
reading fail, it is passed on as malformed, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.tool_parsers.json_text import SPACE


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The beginning of a call of `name`, which no list of tools has checked."""

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
    """Text in place of a call that is none. It never comes between a call's beginning and its end."""

    text: str


CallEvent = CallBegun | CallArguments | CallEnded | Malformed


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """`arguments` is JSON text: one object, or the beginning of one where the answer was cut off."""

    name: str
    arguments: str


def fold(events: Iterable[CallEvent]) -> tuple[list[ParsedCall], str]:
    """Folds a stream of events into calls, and the text in it that was no call."""
    calls: list[ParsedCall] = []
    name, fragments, text = "", [""], ""
    for event in events:
        match event:
            case CallBegun():
                name, fragments = event.name, []
            case CallArguments(fragment):
                fragments.append(fragment)
            case CallEnded():
                calls.append(ParsedCall(name, "".join(fragments)))
            case Malformed(more):
                text += more
    return calls, text


T = TypeVar("T")
Reading = Generator[None, str, T]


class NotACall(Exception):
    """Raised by a reading: no call goes on like this, and where the next could begin is unknown."""


class BodyParser(Protocol):
    """Reads one body. Its events do not depend on the splitting of the text, except for the cuts between fragments."""

    def push(self, text: str) -> list[CallEvent]:
        """Returns the events of this much more text."""
        ...

    def end(self) -> list[CallEvent]:
        """Ends the body: complete, or cut off."""
        ...


class Body:
    """A `BodyParser`, made of a reading.

    - A call that is cut off keeps the arguments that came.
    - Where the reading fails inside a call, the call ends with the text so far, and the rest of the body is malformed.
    - Where it fails outside of one, the text since the last call's end is malformed, and so is the rest.
    - White space and punctuation before and after calls are dropped, but not around text that is no call.
    """

    def __init__(self, reading: Callable[[Body], Reading[None]]) -> None:
        self._events: list[CallEvent] = []
        self._fragments: list[str] = []  # arguments that are not yet an event
        self._held: list[str] = []  # characters that no call and no event has taken
        self._inside = False  # a candidate has begun and not ended
        self._open = False  # a call has begun and not ended
        self._after_call = False  # the last candidate was a call
        self._failed = False
        self._reading = reading(self)
        next(self._reading)

    def push(self, text: str) -> list[CallEvent]:
        if self._failed:
            return [Malformed(text)] if text else []
        for at, character in enumerate(text):
            self._held.append(character)
            try:
                self._reading.send(character)
            except NotACall:
                self._failed = True
                self.cut()
                self._emit(Malformed("".join(self._held) + text[at + 1 :]))
                self._held.clear()
                break
        return self._taken()

    def end(self) -> list[CallEvent]:
        text = "".join(self._held)
        if self._open:
            self.cut()
        elif (self._inside or not self._after_call) and text.strip(SPACE):
            self._emit(Malformed(text))
        self._held.clear()
        return self._taken()

    # Reports of a reading. The character it was sent last is already held.

    def candidate(self) -> None:
        """Begins a candidate for a call with this character."""
        self._inside = True

    def begin(self, name: str) -> None:
        self._emit(CallBegun(name))
        self._open = True
        self._held.clear()

    def give(self, arguments: str) -> None:
        """Adds to the begun call's arguments; the held text was read as these."""
        self._fragments.append(arguments)
        self._held.clear()

    def cut(self) -> None:
        """Ends the begun call, if one is, as far as it came. Held text stays."""
        if self._open:
            self._emit(CallEnded())
            self._open = False

    def finish(self) -> None:
        """The begun call is complete."""
        self.cut()
        self._held.clear()
        self._inside, self._after_call = False, True

    def reject(self) -> None:
        """The candidate was no call, or ended before its text did."""
        self._emit(Malformed("".join(self._held)))
        self._held.clear()
        self._inside, self._after_call = False, False

    def _emit(self, event: CallEvent) -> None:
        if self._fragments:
            self._events.append(CallArguments("".join(self._fragments)))
            self._fragments.clear()
        self._events.append(event)

    def _taken(self) -> list[CallEvent]:
        if self._fragments:
            self._events.append(CallArguments("".join(self._fragments)))
            self._fragments.clear()
        events, self._events = self._events, []
        return events


class Bodies:
    """All the bodies of an answer, each identified by its section's number."""

    def __init__(self, parser: Callable[[], BodyParser]) -> None:
        self._new = parser
        self._section: int | None = None
        self._parser: BodyParser | None = None

    def push(self, section: int, text: str) -> list[CallEvent]:
        """Returns the events of more text of a section's body; a new section ends the one before."""
        events: Sequence[CallEvent] = ()
        if section != self._section or self._parser is None:
            events = self.end()
            self._section, self._parser = section, self._new()
        return [*events, *self._parser.push(text)]

    def end(self) -> list[CallEvent]:
        """Ends the section: the answer is over, or free text goes on."""
        parser, self._parser = self._parser, None
        return [] if parser is None else parser.end()


def nonspace() -> Reading[str]:
    """The next character that is no white space."""
    while (character := (yield)) in SPACE:
        pass
    return character


def exactly(text: str) -> Reading[None]:
    """This text, now."""
    for expected in text:
        if (yield) != expected:
            raise NotACall


def only_space() -> Reading[None]:
    """No more calls."""
    while True:
        if (yield) not in SPACE:
            raise NotACall
