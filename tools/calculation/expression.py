"""Arithmetic as people write it, read and worked out in one pass: `15% of 80`, `2 km + 300 m in miles`, `5!`, `√2`.

A parser of its own, so nothing is run. Where a text has two common readings it is refused with both written out.
Knows nothing of how numbers are kept or bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from tools.calculation import units
from tools.calculation.functions import FUNCTIONS, factorial
from tools.calculation.number import APPROXIMATE, CalculationError
from tools.calculation.units import Quantity

MAX_LENGTH = 1000  # characters
DEEPEST = 40  # brackets, signs and powers within one another

_TOKEN = re.compile(
    r"""(?P<number>0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+
          |(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4}(?!\d))?)
      | (?P<name>log2|log10|[°℃℉][A-Za-z]*|[^\W\d_]+)
      | (?P<operator>->|[-+*/^%!(),√])""",
    re.VERBOSE,
)

_SAME = str.maketrans(
    {"×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "∕": "/", "−": "-", "–": "-", "→": " to ", "∗": "*"}
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_CONVERT = ("in", "to", "as", "->")
_WORDS = frozenset({"in", "to", "as", "of", "per", "mod"})
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_CONSTANTS = {"pi": units.PI, "π": units.PI, "e": units.E, "tau": APPROXIMATE.multiply(units.PI, 2)}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # number, name, operator or end
    text: str
    at: int


def calculate(text: str) -> Quantity:
    """The value of an expression, in the units it asks for.

    Raises:
        CalculationError: it cannot be read, has no value, has two readings, or goes beyond a limit.
    """
    if len(text) > MAX_LENGTH:
        raise CalculationError(f"The expression has {len(text):,} characters; accepted: at most {MAX_LENGTH:,}.")
    plain = text.translate(_SAME).replace("**", "^").strip().removesuffix("=").removeprefix("=")
    plain = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: f"^({match[0].translate(_RAISED)})", plain)
    return _Reader(plain).all()


def _tokens(text: str) -> list[_Token]:
    found, at, calls = list[_Token](), 0, list[bool]()
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = _TOKEN.match(text, at)
        if match is None or not match[0]:
            raise CalculationError(
                f"{text[at]!r} cannot be read here; accepted: numbers, names, + - * / ^ % ! and brackets."
            )
        kind, written = match.lastgroup or "", match[0]
        if kind == "number" and "," in written and calls and calls[-1]:
            written = written.partition(",")[0]  # within max(1,234) a comma parts arguments
        if written == "(":
            calls.append(bool(found) and found[-1].kind == "name" and found[-1].text.lower() in FUNCTIONS)
        elif written == ")" and calls:
            calls.pop()
        found.append(_Token(kind, written, at))
        at += len(written)
    return [*found, _Token("end", "the end", at)]


class _Reader:
    """Precedence, from loose to tight: conversion; + -; * / % of per; signs; juxtaposition; ^; ! and %."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._at = 0
        self._depth = 0

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _after(self) -> _Token:
        return self._tokens[min(self._at + 1, len(self._tokens) - 1)]

    def _take(self, *texts: str) -> str | None:
        token = self._next
        if token.kind in ("operator", "name") and token.text.lower() in texts:
            self._at += 1
            return token.text.lower()
        return None

    def _unreadable(self) -> CalculationError:
        token = self._next
        if token.text == ",":
            return CalculationError("A comma parts thousands (1,234) or arguments (max(1, 2)); decimals are like 3.5.")
        where = "at the end" if token.kind == "end" else f"at {token.text!r} (character {token.at + 1})"
        return CalculationError(f"The expression cannot be read {where}; write it like (2 + 3) * 4 or 5 km in miles.")

    def all(self) -> Quantity:
        value = self._sum()
        if self._take(*_CONVERT):
            value = self._converted(value)
        if self._next.kind != "end":
            raise self._unreadable()
        return value

    def _converted(self, value: Quantity) -> Quantity:
        if self._take("%", "percent"):
            hundred = value.times(Quantity(Fraction(100)))
            return hundred.to(Quantity(Fraction(1))) if not hundred.plain else Quantity(hundred.number, _PERCENT)
        target = self._product()
        if target.plain or target.number != 1:
            raise CalculationError("After in, to or as stands a unit, such as miles or km/h.")
        return value.to(target)

    def _sum(self) -> Quantity:
        value = self._product()
        while operator := self._take("+", "-"):
            right = self._product()
            value = value.plus(right if operator == "+" else right.negative())
        return value

    def _product(self) -> Quantity:
        value, _ = self._signed()
        while operator := self._take("*", "/", "%", "mod", "of", "per"):
            right, joined = self._signed()
            if operator in ("/", "per"):
                if joined and (value.plain or right.plain):
                    raise CalculationError("a/b c has two readings; write (a/b) c or a/(b c).")
                value = value.times(right.inverse())
            elif operator in ("%", "mod"):
                value = FUNCTIONS["mod"]([value, right])
            else:
                value = value.times(right)
        return value

    def _signed(self) -> tuple[Quantity, bool]:
        """A value, and whether it is several that stand side by side."""
        self._deeper()
        if operator := self._take("-", "+"):
            value, joined = self._signed()
            value = value.negative() if operator == "-" else value
        else:
            value, joined = self._beside()
        self._depth -= 1
        return value, joined

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise CalculationError(f"The expression is nested deeper than {DEEPEST} levels, which is the limit.")

    def _beside(self) -> tuple[Quantity, bool]:
        value, joined, parts = self._power(), False, list[Quantity]()
        while True:
            token = self._next
            if token.kind == "number" and not value.plain and joined:
                parts.append(value)  # 5 ft 3 in: one length in two parts
                value, joined = self._power(), False
            elif token.text == "(" or (token.kind == "name" and self._is_factor()):
                value, joined = value.times(self._power()), True
            else:
                break
        for part in reversed(parts):
            if value.plain:
                raise self._unreadable()
            value = part.plus(value)
        return value, joined or bool(parts)

    def _is_factor(self) -> bool:
        """Returns whether a name continues the expression before it: a unit, a function, a constant; not a word
        between."""
        if self._next.text != "in":
            return self._next.text.lower() not in _WORDS
        before, after = self._tokens[self._at - 1], self._after()
        ends = after.kind == "end" or after.text in (*_CONVERT, *"+-*/^)%,")
        return before.kind == "number" and ends

    def _power(self) -> Quantity:
        self._deeper()
        value = self._postfix()
        if self._take("^"):
            sign = self._take("-", "+")
            exponent = self._power()
            value = value.to_power(exponent.negative() if sign == "-" else exponent)
        self._depth -= 1
        return value

    def _postfix(self) -> Quantity:
        value = self._atom()
        while self._next.text in ("!", "%") and self._next.kind == "operator":
            if self._next.text == "%":
                after = self._after()
                if (
                    after.kind == "number"
                    or after.text in ("(", "√")
                    or (after.kind == "name" and after.text not in _WORDS)
                ):
                    break  # 10 % 3 is a remainder
                self._at += 1
                value = Quantity(value.times(Quantity(Fraction(1, 100))).number, value.powers, percent=True)
            else:
                self._at += 1
                if not value.plain:
                    raise CalculationError(f"A factorial is of a plain number, not of one in {value.symbol}.")
                value = Quantity(factorial(value.number))
        return value

    def _atom(self) -> Quantity:
        token = self._next
        if token.kind == "number":
            self._at += 1
            return Quantity(_number(token.text))
        if self._take("("):
            self._deeper()
            value = self._sum()
            self._depth -= 1
            if not self._take(")"):
                raise self._unreadable()
            return Quantity(value.number, value.powers)
        if self._take("√"):
            return FUNCTIONS["sqrt"]([self._power()])
        if token.kind != "name":
            raise self._unreadable()
        self._at += 1
        return self._named(token.text)

    def _named(self, name: str) -> Quantity:
        if self._next.text == "(" and name.lower() in FUNCTIONS:
            return FUNCTIONS[name.lower()](self._arguments())
        if name.lower() in _POWERS and self._next.kind == "name":
            unit = self._atom()
            return unit.to_power(Quantity(Fraction(_POWERS[name.lower()])))
        if name == "percent":
            return Quantity(Fraction(1, 100), percent=True)
        if name in _CONSTANTS or name.lower() == "pi":
            return Quantity(_CONSTANTS.get(name, units.PI))
        unit_ = units.find(name)
        if unit_ is None:
            close = units.near(name, tuple(FUNCTIONS))
            hint = f"; near to it: {', '.join(close)}" if close else "; accepted: units, functions, pi and e"
            raise CalculationError(f"{name!r} is neither a unit nor a function{hint}.")
        return Quantity(Fraction(1), ((unit_, 1),))

    def _arguments(self) -> list[Quantity]:
        self._take("(")
        self._deeper()
        arguments = list[Quantity]()
        while not self._take(")"):
            if arguments and not self._take(","):
                raise self._unreadable()
            arguments.append(self._sum())
        self._depth -= 1
        return arguments


_PERCENT = ((units.Unit("%", Fraction(1, 100), units.NONE), 1),)


def _number(text: str) -> Fraction:
    if text[:2].lower() in ("0x", "0b", "0o"):
        return Fraction(int(text, 0))
    digits = text.replace(",", "").removesuffix(".")
    mantissa, _, exponent = digits.lower().partition("e")
    if exponent and abs(int(exponent)) > 1000:
        raise CalculationError(f"The exponent of {text} is too large; accepted: at most 1,000.")
    return Fraction(f"{mantissa.removesuffix('.')}e{exponent or 0}")
