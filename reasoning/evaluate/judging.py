"""Judges an answer by one of a few comparisons with the expected one.

Comparisons are of text alone, and none asks a model. Knows nothing of how answers are made.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

Judge = Callable[[str], bool]
COMPARISONS = ("exact", "number", "contains", "choice", "regex", "puzzle")
MAX_EXPRESSION_LENGTH = 200  # characters
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")"})


class BadAnswer(ValueError):
    """The expected answer does not go with the comparison; the message names the accepted values."""


@dataclass(frozen=True, slots=True)
class Choices:
    """One of several: `wanted` is among `all`."""

    wanted: str
    all: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Make `target` of `numbers` with + - * / and brackets, each used exactly once."""

    numbers: tuple[int, ...]
    target: int

    def solved_by(self, answer: str) -> bool:
        """Returns whether the answer is such an expression, `= target` after it or not. Exact, by fractions."""
        expression, equals, said = answer.strip().removesuffix(".").partition("=")
        if equals and said.strip() != str(self.target):
            return False
        numbers: list[int] = []
        try:
            value = _value(expression, numbers)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return False
        return value == self.target and sorted(numbers) == sorted(self.numbers)


def judge_of(compare: str, wanted: str | float | Sequence[str] | Choices | Puzzle) -> Judge:
    """
    `exact`: the same text, ignoring case, white space and a full stop at its end. `number`: the last number of the
    answer. `contains`: all of these texts are in it, ignoring case. `choice`: the last choice that it names. `regex`:
    it has a match of this expression (Python's `re`). `puzzle`: see `Puzzle`.

    Raises:
        BadAnswer: there is no such comparison, or `wanted` does not go with it.
    """
    match compare, wanted:
        case "exact", str() if _plain(wanted):
            return lambda text: _plain(text) == _plain(wanted)
        case "number", str() | int() | float() if not isinstance(wanted, bool) and (number := _last_number(wanted)):
            (value,) = number
            return lambda text: _last_number(text) == [value]
        case "contains", str() if wanted.strip():
            return lambda text: wanted.strip().casefold() in text.casefold()
        case "contains", [*parts] if parts and all(isinstance(part, str) and part.strip() for part in parts):
            return lambda text: all(part.strip().casefold() in text.casefold() for part in parts)
        case "choice", Choices(one, every) if one in every and len(set(map(str.casefold, every))) == len(every) > 1:
            return lambda text: _last_choice(text, every) == one
        case "regex", str() if wanted:
            try:
                expression = re.compile(wanted)
            except re.error as error:
                raise BadAnswer(f"answer is no regular expression ({error}); accepted: one of Python's re.") from None
            return lambda text: expression.search(text) is not None
        case "puzzle", Puzzle(numbers) if numbers:
            return wanted.solved_by
    accepted = {
        "exact": "some text",
        "number": "a number, or text with exactly one",
        "contains": "some text, or a list of texts",
        "choice": "one of choices, a list of two or more different texts",
        "regex": "a regular expression",
        "puzzle": '{"numbers": [4, 6, 9, 1], "target": 24}',
    }
    if compare not in accepted:
        raise BadAnswer(f"compare is {compare!r}; accepted: {', '.join(COMPARISONS)}.")
    raise BadAnswer(f"answer does not go with compare {compare!r}; accepted: {accepted[compare]}.")


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".")


def _last_number(said: str | float) -> list[Decimal]:
    """The last number of an answer, or the only one of the expected answer; else none."""
    if not isinstance(said, str):
        return [Decimal(str(said))]
    found = _NUMBER.findall(said)
    return [Decimal(found[-1].replace(",", ""))] if found else []


def _last_choice(text: str, choices: Sequence[str]) -> str | None:
    """The choice that is named last as a word of its own; the longest where several end there."""
    found = []
    for choice in choices:
        ends = [m.end() for m in re.finditer(rf"(?<!\w){re.escape(choice)}(?!\w)", text, re.IGNORECASE)]
        found += [(ends[-1], len(choice), choice)] if ends else []
    return max(found)[2] if found else None


def _value(expression: str, numbers: list[int]) -> Fraction:
    """Raises ValueError for all but + - * / of whole numbers, which are added to `numbers`."""
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError("too long")

    def walk(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(int() as number) if not isinstance(number, bool):
                numbers.append(number)
                return Fraction(number)
            case ast.BinOp(left, ast.Add(), right):
                return walk(left) + walk(right)
            case ast.BinOp(left, ast.Sub(), right):
                return walk(left) - walk(right)
            case ast.BinOp(left, ast.Mult(), right):
                return walk(left) * walk(right)
            case ast.BinOp(left, ast.Div(), right):
                return walk(left) / walk(right)
        raise ValueError("no plain arithmetic")

    return walk(ast.parse(expression.translate(_SIGNS).strip(), mode="eval").body)
