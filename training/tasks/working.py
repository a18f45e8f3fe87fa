"""Written arithmetic, column by column, as the model is to think it.

    >>> print(*work(47, "+", 85), sep="\\n")
    47+85
    ones: 7+5=12, carry 1, so 2
    tens: 4+8+1=13, carry 1, so 32
    carry 1, so 132

Each line ends in the result so far, so no line needs more than the one before it and the padded operands. Knows
nothing of wording: it takes two whole numbers and an operator.
"""

from __future__ import annotations

PLACES = ("ones", "tens", "hundreds", "thousands", "ten thousands")
Operator = str  # one of + - × /


def result(a: int, operator: Operator, b: int) -> str:
    """Returns the answer as it is written: a whole number, or `quotient remainder rest`."""
    if operator == "+":
        return str(a + b)
    if operator == "-":
        return str(a - b)
    if operator == "×":
        return str(a * b)
    quotient, rest = divmod(a, b)
    return f"{quotient} remainder {rest}" if rest else str(quotient)


def work(a: int, operator: Operator, b: int) -> list[str]:
    """The lines of the working. Division wants b > 0, multiplication takes the number with more digits first."""
    if operator == "+":
        return _add(a, b)
    if operator == "-":
        return _subtract(a, b)
    return _multiply(max(a, b), min(a, b)) if operator == "×" else _divide(a, b)


def _padded(a: int, b: int) -> tuple[str, str]:
    width = max(len(str(a)), len(str(b)))
    return str(a).zfill(width), str(b).zfill(width)


def _add(a: int, b: int) -> list[str]:
    first, second = _padded(a, b)
    lines, carry, done = [f"{first}+{second}"], 0, ""
    for place, (x, y) in enumerate(zip(reversed(first), reversed(second), strict=True)):
        total = int(x) + int(y) + carry
        terms = f"{x}+{y}" + ("+1" if carry else "")
        carry, done = total // 10, str(total % 10) + done
        lines.append(f"{PLACES[place]}: {terms}={total}, " + ("carry 1, " if carry else "") + f"so {done}")
    if carry:
        lines.append(f"carry 1, so 1{done}")
    return lines


def _subtract(a: int, b: int) -> list[str]:
    first, second = _padded(a, b)
    lines = [f"{first}-{second}"]
    if a < b:
        lines.append(f"less than zero, so minus {second}-{first}")
        first, second = second, first
    borrow, done = 0, ""
    for place, (x, y) in enumerate(zip(reversed(first), reversed(second), strict=True)):
        tail = f"-{y}" + ("-1" if borrow else "")
        left = int(x) - int(y) - borrow
        borrow = int(left < 0)
        head = f"1{x}" if borrow else x
        done = str(left % 10) + done
        lines.append(f"{PLACES[place]}: {head}{tail}={left % 10}, " + ("borrow 1, " if borrow else "") + f"so {done}")
    lines.append(f"= {a - b}")
    return lines


def _times_digit(a: int, digit: int) -> str:
    """One row of long multiplication, on one line."""
    steps, carry, done = [], 0, ""
    digits = str(a)
    for place, x in enumerate(reversed(digits)):
        product = int(x) * digit
        step = f"{x}×{digit}={product}"
        if carry:
            step += f"+{carry}={product + carry}"
        total, last = product + carry, place == len(digits) - 1
        carry, done = total // 10, (str(total) if last else str(total % 10)) + done
        steps.append(step + ("" if last or not carry else f" carry {carry}") + f" so {done}")
    return ", ".join(steps)


def _multiply(a: int, b: int) -> list[str]:
    lines = [f"{a}×{b}"]
    if b < 10:
        return [*lines, _times_digit(a, b)]
    tens, ones = divmod(b, 10)
    lines.append(f"{a}×{ones}: {_times_digit(a, ones)}")
    lines.append(f"{a}×{tens}: {_times_digit(a, tens)}, tens so {a * tens}0")
    return [*lines, *_add(a * ones, a * tens * 10), f"= {a * b}"]


def _divide(a: int, b: int) -> list[str]:
    lines, rest, done = [f"{a}/{b}"], 0, ""
    for x in str(a):
        part = rest * 10 + int(x)
        quotient, rest = divmod(part, b)
        done += str(quotient)
        lines.append(f"{part}/{b}={quotient} left {rest}, so {done}")
    lines.append(f"= {result(a, '/', b)}")
    return lines
