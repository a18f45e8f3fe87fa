"""Arithmetic as a calculator tool reads it: `12 * 8 - 5`, evaluated exactly.

`value` reads digits, decimals, + - * / ** and brackets, and nothing else: it walks the syntax tree with fractions and
runs no code. `written` gives a result as plain text, exact where a few decimals suffice. Knows nothing of callers.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

MAX_LENGTH = 200  # characters
HIGHEST_POWER = 20
SIGNIFICANT = 10  # digits of a result that does not end

_ALLOWED = re.compile(r"[0-9.+\-*/() ]+")
_NUMBER = re.compile(r"(?<![\w.,])(?<!\d )(-?)(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)(?!\d)")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class ExpressionError(ValueError):
    """The text is no arithmetic, or has no value."""


def value(text: str) -> Fraction:
    """The exact value; raises ExpressionError with a text that a tool may answer."""
    unreadable = ExpressionError(f'error: cannot read "{text[:MAX_LENGTH]}"')
    if len(text) > MAX_LENGTH or not _ALLOWED.fullmatch(text):
        raise unreadable
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body, text.strip())
    except ZeroDivisionError:
        raise ExpressionError("error: division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise unreadable from None


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        # The digits as written, for a float would not be exact.
        return Fraction(ast.get_source_segment(text, node) or "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        inner = _value(node.operand, text)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            if right.denominator != 1 or abs(right) > HIGHEST_POWER:
                raise ValueError
            return Fraction(left ** int(right))
        if type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](left, right)
    raise ValueError


def ends(number: Fraction, decimals: int = 6) -> bool:
    """Returns whether `decimals` places after the point write it exactly."""
    return (number * 10**decimals).denominator == 1


def written(number: Fraction) -> str:
    """Plain text: exact with up to six decimals, otherwise ten significant digits."""
    if number.denominator == 1:
        return str(number.numerator)
    exact = Context(prec=60)
    quotient = exact.divide(Decimal(number.numerator), Decimal(number.denominator))
    if not ends(number):
        quotient = Context(prec=SIGNIFICANT).plus(quotient)
    text = format(quotient, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def answer(text: str) -> str:
    """Returns a calculator's answer to an expression: its value or an error."""
    try:
        return written(value(text))
    except ExpressionError as error:
        return str(error)


def numbers(text: str) -> list[Fraction]:
    """All numbers in a sentence, thousands separators allowed; a minus counts where no digit stands before it."""
    return [Fraction(match[1] + match[2].replace(",", "")) for match in _NUMBER.finditer(text)]


def states(text: str, result: Fraction, asked: str = "") -> bool:
    """Returns whether a final sentence gives `result`, and no other number but those of the question."""
    _, equals, after = text.rpartition("=")
    given = numbers(after if equals else text)
    known = set() if equals else set(numbers(asked))
    rounded = Fraction(written(result))
    right = [number for number in given if number in (result, rounded)]
    return bool(right) and all(number in right or number in known for number in given)
