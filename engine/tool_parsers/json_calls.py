"""Calls written as JSON objects, `{"name": …, "arguments": {…}}`, alone or in a list; or as a name and such arguments.

Keys may come in any order and `parameters` is another word for `arguments`. The arguments are an object, passed on as
it is written, or a string that holds one, unescaped on the way; before the name is known they wait. Text of other forms
is handled so:

- No arguments, `null` or a blank string: the call has the arguments `{}`. Keys of other names are skipped.
- A name or arguments of another type, an empty name, one that is not Unicode, a second name or second arguments: no
  call; after its arguments have begun, the call ends there. In a list the other calls are read all the same.
- Text that is not JSON (NaN, a comma too many, a raw line break in a string): the rest of the body is malformed.
- A key that occurs twice *within* the arguments is passed on as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from engine.tool_parsers.json_text import SPACE, JsonStep, JsonText
from engine.tool_parsers.streaming import Body, NotACall, Reading, exactly, nonspace, only_space

_ARGUMENTS = frozenset({"arguments", "parameters"})
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def one_call() -> Body:
    """A parser of bodies that are one call."""
    return Body(_single)


def calls_in_a_row() -> Body:
    """A parser of bodies that are calls with nothing, or white space, between them."""
    return Body(_row)


def list_of_calls() -> Body:
    """A parser of bodies that are a JSON array of calls. An empty one is malformed."""
    return Body(_list)


def named_call(opening: str, closing: str, *, id_length: int = 0) -> Body:
    """A parser of bodies that are `opening`, the tool's name, with an id of `id_length` characters behind it, `closing`
    and the rest of the arguments, whose brace ends `closing`. It begins with a character that is in no name."""
    return Body(lambda body: _named(body, opening, closing, id_length))


def _named(body: Body, opening: str, closing: str, id_length: int) -> Reading[None]:
    body.candidate()
    yield from exactly(opening)
    written = ""
    while (character := (yield)) != closing[0]:
        if character in SPACE:
            raise NotACall
        written += character
    yield from exactly(closing[1:])
    if not (name := written[: len(written) - id_length]):
        raise NotACall
    body.begin(name)
    yield from _arguments(body.give)
    body.finish()
    yield from only_space()


def _arguments(give: Callable[[str], None]) -> Reading[None]:
    """Reads an object whose brace has been read."""
    text, character = JsonText(), "{"
    while True:
        step = text.feed(character)
        if step is JsonStep.BAD:
            raise NotACall
        give(character)
        if step is JsonStep.END:
            return
        character = yield


def _single(body: Body) -> Reading[None]:
    if (yield from nonspace()) != "{":
        raise NotACall
    yield from _Element(body).read("{")
    yield from only_space()


def _row(body: Body) -> Reading[None]:
    while True:
        if (yield from nonspace()) != "{":
            raise NotACall
        yield from _Element(body).read("{")


def _list(body: Body) -> Reading[None]:
    if (yield from nonspace()) != "[":
        raise NotACall
    separator = ","
    while separator == ",":
        character = yield from nonspace()
        if character == "]":
            raise NotACall
        separator = (yield from _Element(body).read(character)) or (yield)
        if separator in SPACE:
            separator = yield from nonspace()
    if separator != "]":
        raise NotACall
    yield from only_space()


class _Element:
    """One value where a call is expected. `spoilt`: it is JSON, but not, or no longer, a call."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._name: str | None = None
        self._has_arguments = False
        self._waiting: list[str] = []  # arguments that came before the name
        self._begun = False
        self._spoilt = False

    def read(self, character: str) -> Reading[str]:
        """Reads the value that begins with `character`; returns the character past its end, where that had to be
        read."""
        self._body.candidate()
        past = ""
        if character == "{":
            yield from self._object()
        else:
            self._spoilt = True
            past = yield from _skip(character)
        if self._spoilt or self._name is None:
            self._body.reject()
        else:
            if not self._begun:
                self._give("{}")
            self._body.finish()
        return past

    def _object(self) -> Reading[None]:
        character = yield from nonspace()
        while character != "}":
            if character != '"':
                raise NotACall
            key = yield from _string()
            if (yield from nonspace()) != ":":
                raise NotACall
            first = yield from nonspace()
            character = (yield from self._member(key, first)) or (yield)
            if character in SPACE:
                character = yield from nonspace()
            if character == ",":
                if (character := (yield from nonspace())) != '"':
                    raise NotACall
            elif character != "}":
                raise NotACall

    def _member(self, key: str, first: str) -> Reading[str]:
        """Reads a value of the call's object; returns the character past its end, where that had to be read."""
        if self._spoilt or (key != "name" and key not in _ARGUMENTS):
            return (yield from _skip(first))
        if key == "name":
            if first != '"' or self._name is not None:
                self._spoil()
                return (yield from _skip(first))
            name = yield from _string()
            if not name or any("\ud800" <= character <= "\udfff" for character in name):
                self._spoil()
                return ""
            self._name = name
            if self._waiting:
                self._give("")
            return ""
        if first not in '{"n' or self._has_arguments:
            self._spoil()
            return (yield from _skip(first))
        self._has_arguments = True
        if first == "{":
            yield from _arguments(self._give)
        elif first == '"':
            yield from self._string_arguments()
        else:
            past = yield from _skip(first)
            self._give("{}")
            return past
        return ""

    def _string_arguments(self) -> Reading[None]:
        """A string whose value is an object. A fault in it spoils the call but not the list around it."""
        text = _Inner()
        high = ""
        while unit := (yield from _unit()):
            if self._spoilt:
                continue
            if high and "\udc00" <= unit <= "\udfff":
                unit, high = (high + unit).encode("utf-16", "surrogatepass").decode("utf-16"), ""
            ready, high = (high, unit) if "\ud800" <= unit <= "\udbff" else (high + unit, "")
            self._inner(text, ready)
        if not self._spoilt and high:
            self._inner(text, high)
        if not self._spoilt and not text.ended:
            if text.begun:
                self._spoil()
            else:
                self._give("{}")

    def _inner(self, text: _Inner, characters: str) -> None:
        for character in characters:
            # Half of a pair cannot stand in a text, but its escape can stand in JSON.
            plain = character if not "\ud800" <= character <= "\udfff" else f"\\u{ord(character):04x}"
            for one in plain:
                if not text.feed(one):
                    self._spoil()
                    return
                if text.counts:
                    self._give(one)

    def _give(self, text: str) -> None:
        self._waiting.append(text)
        if self._name is None:
            return
        if not self._begun:
            self._begun = True
            self._body.begin(self._name)
        self._body.give("".join(self._waiting))
        self._waiting.clear()

    def _spoil(self) -> None:
        self._spoilt = True
        self._body.cut()


class _Inner:
    """An object inside a string: white space around it is dropped."""

    def __init__(self) -> None:
        self._text = JsonText()
        self.begun = False
        self.ended = False
        self.counts = False  # whether the newest character belongs to the object

    def feed(self, character: str) -> bool:
        """Returns whether the character may stand here."""
        self.counts = self.begun and not self.ended
        if not self.counts:
            if character in SPACE:
                return True
            if self.ended or character != "{":
                return False
            self.begun = self.counts = True
        step = self._text.feed(character)
        self.ended = step is JsonStep.END
        return step is not JsonStep.BAD


def _skip(character: str) -> Reading[str]:
    """Reads any value from its first character on; returns the character past its end, where that had to be read."""
    text = JsonText()
    while (step := text.feed(character)) is JsonStep.MORE:
        character = yield
    if step is JsonStep.BAD:
        raise NotACall
    return character if step is JsonStep.PAST else ""


def _string() -> Reading[str]:
    """Reads the value of a string whose opening quote has been read."""
    text, written = JsonText(), ['"']
    step = text.feed('"')
    while step is JsonStep.MORE:
        written.append((yield))
        step = text.feed(written[-1])
    if step is JsonStep.BAD:
        raise NotACall
    return str(json.loads("".join(written)))


def _unit() -> Reading[str]:
    """Reads one character of a string, or half of a surrogate pair; nothing at its closing quote."""
    character = yield
    if character == '"':
        return ""
    if character < " ":
        raise NotACall
    if character != "\\":
        return character
    character = yield
    if character != "u":
        if character not in _ESCAPES:
            raise NotACall
        return _ESCAPES[character]
    digits = ""
    for _ in range(4):
        digits += yield
        if digits[-1] not in "0123456789abcdefABCDEF":
            raise NotACall
    return chr(int(digits, 16))
