"""One JSON value, checked character by character as RFC 8259 has it. Keeps nothing of the text.

It returns after each character whether the value is over, so a value can be passed on while it is still being written.
Nesting is a list and not the call stack: depth is bounded by the text alone.
"""

from __future__ import annotations

from enum import Enum, auto

SPACE = " \t\n\r"
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}


class JsonStep(Enum):
    MORE = auto()  # the value goes on
    END = auto()  # this character ended it
    PAST = auto()  # it ended before this character: numbers show their end only so
    BAD = auto()  # no JSON value goes on like this


class JsonText:
    """The state of one value. Feed it from the value's first character to the first `JsonStep` that is not MORE."""

    __slots__ = ("_closers", "_in_key", "_next", "_rest")

    def __init__(self) -> None:
        self._closers: list[str] = []  # of the arrays and objects around this place
        self._in_key = False
        self._rest = ""  # of a word; of \u, as many characters as there are digits to come
        self._next = self._value

    def feed(self, character: str) -> JsonStep:
        return self._next(character)

    def _value(self, character: str) -> JsonStep:
        if character in SPACE:
            return JsonStep.MORE
        if character == "{":
            self._closers.append("}")
            self._next = self._key_or_close
        elif character == "[":
            self._closers.append("]")
            self._next = self._item_or_close
        elif character == '"':
            self._in_key = False
            self._next = self._string
        elif character in _WORDS:
            self._rest = _WORDS[character]
            self._next = self._word
        elif character == "-":
            self._next = self._minus
        else:
            return self._minus(character)
        return JsonStep.MORE

    def _ended(self) -> JsonStep:
        self._next = self._after
        return JsonStep.MORE if self._closers else JsonStep.END

    def _after(self, character: str) -> JsonStep:
        if character in SPACE:
            return JsonStep.MORE
        if character == self._closers[-1]:
            self._closers.pop()
            return self._ended()
        if character != ",":
            return JsonStep.BAD
        self._next = self._key if self._closers[-1] == "}" else self._value
        return JsonStep.MORE

    def _key(self, character: str) -> JsonStep:
        if character in SPACE:
            return JsonStep.MORE
        self._in_key = True
        self._next = self._string
        return JsonStep.MORE if character == '"' else JsonStep.BAD

    def _key_or_close(self, character: str) -> JsonStep:
        return self._after(character) if character == "}" else self._key(character)

    def _item_or_close(self, character: str) -> JsonStep:
        return self._after(character) if character == "]" else self._value(character)

    def _colon(self, character: str) -> JsonStep:
        if character in SPACE:
            return JsonStep.MORE
        self._next = self._value
        return JsonStep.MORE if character == ":" else JsonStep.BAD

    def _string(self, character: str) -> JsonStep:
        if character == "\\":
            self._next = self._escape
        elif character == '"':
            if not self._in_key:
                return self._ended()
            self._next = self._colon
        elif character < " ":
            return JsonStep.BAD
        return JsonStep.MORE

    def _escape(self, character: str) -> JsonStep:
        if character == "u":
            self._rest = "0000"
            self._next = self._hex
            return JsonStep.MORE
        self._next = self._string
        return JsonStep.MORE if character in '"\\/bfnrt' else JsonStep.BAD

    def _hex(self, character: str) -> JsonStep:
        self._rest = self._rest[1:]
        if not self._rest:
            self._next = self._string
        return JsonStep.MORE if character in _HEX else JsonStep.BAD

    def _word(self, character: str) -> JsonStep:
        if character != self._rest[0]:
            return JsonStep.BAD
        self._rest = self._rest[1:]
        return JsonStep.MORE if self._rest else self._ended()

    def _minus(self, character: str) -> JsonStep:
        if character not in _DIGITS:
            return JsonStep.BAD
        self._next = self._zero if character == "0" else self._integer
        return JsonStep.MORE

    def _integer(self, character: str) -> JsonStep:
        return JsonStep.MORE if character in _DIGITS else self._zero(character)

    def _zero(self, character: str) -> JsonStep:
        if character == ".":
            self._next = self._point
            return JsonStep.MORE
        return self._fraction_ended(character)

    def _point(self, character: str) -> JsonStep:
        self._next = self._fraction
        return JsonStep.MORE if character in _DIGITS else JsonStep.BAD

    def _fraction(self, character: str) -> JsonStep:
        return JsonStep.MORE if character in _DIGITS else self._fraction_ended(character)

    def _fraction_ended(self, character: str) -> JsonStep:
        if character in "eE":
            self._next = self._exponent
            return JsonStep.MORE
        return self._number_ended(character)

    def _exponent(self, character: str) -> JsonStep:
        if character in "+-":
            self._next = self._exponent_sign
            return JsonStep.MORE
        return self._exponent_sign(character)

    def _exponent_sign(self, character: str) -> JsonStep:
        self._next = self._exponent_digits
        return JsonStep.MORE if character in _DIGITS else JsonStep.BAD

    def _exponent_digits(self, character: str) -> JsonStep:
        return JsonStep.MORE if character in _DIGITS else self._number_ended(character)

    def _number_ended(self, character: str) -> JsonStep:
        if not self._closers:
            return JsonStep.PAST
        self._next = self._after
        return self._after(character)
