"""Numbers that stay exact as long as they can, and bounded operations on them.

A number is a fraction, and a decimal of 50 digits once a root or a logarithm is no fraction. Every operation is bounded
before it is done: a power that would fill the memory is refused by its size.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal, Inexact, InvalidOperation, Overflow, localcontext
from fractions import Fraction


class CalculationError(ValueError):
    """The text cannot be read, has no value, or goes beyond a limit."""


Number = Fraction | Decimal  # a Decimal is an approximation

MAX_LENGTH = 4000  # digits of a whole number, of a numerator or of a denominator
SIGNIFICANT = 10  # digits shown of a number that does not end
_BITS = int(MAX_LENGTH * math.log2(10))
APPROXIMATE = Context(prec=50, Emax=MAX_LENGTH, Emin=-MAX_LENGTH)
_SHOWN = 60  # digits of an exact number beside which a rounded one is shown


def approximate(number: Number) -> Decimal:
    if isinstance(number, Decimal):
        return number
    return APPROXIMATE.divide(Decimal(number.numerator), Decimal(number.denominator))


def bounded(number: Number) -> Number:
    """
    Raises:
        CalculationError: it has more digits than are kept.
    """
    if isinstance(number, Decimal):
        if not number.is_finite():
            raise CalculationError("The result is beyond the largest number that is kept here.")
        return number
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > _BITS:
        raise CalculationError(f"The result has more than {MAX_LENGTH:,} digits, which is the limit.")
    return number


def add(a: Number, b: Number) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return bounded(a + b)
    return bounded(APPROXIMATE.add(approximate(a), approximate(b)))


def multiply(a: Number, b: Number) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return bounded(a * b)
    return _checked(lambda: APPROXIMATE.multiply(approximate(a), approximate(b)))


def inverse(number: Number) -> Number:
    if not number:
        raise CalculationError("Division by zero has no result.")
    return 1 / number if isinstance(number, Fraction) else APPROXIMATE.divide(Decimal(1), number)


def negative(number: Number) -> Number:
    return -number if isinstance(number, Fraction) else APPROXIMATE.minus(number)


def power(base: Number, exponent: Number) -> Number:
    """
    Raises:
        CalculationError: it has no real value, or one beyond the limit.
    """
    if not base and exponent < 0:
        raise CalculationError("Zero to a negative power has no result.")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            return _whole_power(base, exponent.numerator)
        root = _root(base, exponent.denominator) if exponent.denominator <= 64 else None
        if root is not None:
            return _whole_power(root, exponent.numerator)
    if base < 0:
        raise CalculationError("A negative number to a power that is not whole has no real result.")
    return _checked(lambda: APPROXIMATE.power(approximate(base), approximate(exponent)))


def root(number: Number, degree: int) -> Number:
    """The real root; of a negative number where the degree is odd."""
    if number < 0 and degree % 2:
        return negative(power(negative(number), Fraction(1, degree)))
    if number < 0:
        raise CalculationError("The even root of a negative number is not real.")
    return power(number, Fraction(1, degree))


def logarithm(number: Number, base: int | None) -> Number:
    """To a whole base, or the natural one where `base` is None; exact where it is a whole number."""
    if number <= 0:
        raise CalculationError("The logarithm of zero or of a negative number has no real result.")
    natural = APPROXIMATE.ln(approximate(number))
    if base is None:
        return natural if number != 1 else Fraction(0)
    quotient = APPROXIMATE.divide(natural, APPROXIMATE.ln(Decimal(base)))
    whole = int(quotient.to_integral_value())
    if isinstance(number, Fraction) and abs(whole) < _BITS and Fraction(base) ** whole == number:
        return Fraction(whole)
    return quotient


def exponential(number: Number) -> Number:
    return Fraction(1) if number == 0 else _checked(lambda: APPROXIMATE.exp(approximate(number)))


def _whole_power(base: Fraction, exponent: int) -> Fraction:
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size > 1 and size * abs(exponent) > _BITS + size:
        # From the exact logarithm where the number itself would be too large to make.
        digits = math.log10(max(abs(base.numerator), base.denominator)) * abs(exponent)
        if digits > MAX_LENGTH:
            raise CalculationError(f"The power has about {digits:,.0f} digits; the limit is {MAX_LENGTH:,}.")
    return Fraction(base**exponent)


def _root(number: Fraction, degree: int) -> Fraction | None:
    """The root where it is a fraction."""
    if number < 0:
        return None
    parts = [_whole_root(part, degree) for part in (number.numerator, number.denominator)]
    return None if None in parts else Fraction(parts[0] or 0, parts[1] or 1)


def _whole_root(number: int, degree: int) -> int | None:
    if degree == 2:
        found = math.isqrt(number)
    else:
        with localcontext(APPROXIMATE) as context:
            context.prec = number.bit_length() // (3 * degree) + 10
            found = int((Decimal(number) ** (Decimal(1) / degree)).to_integral_value()) if number else 0
    return found if found**degree == number else None


def _checked(work: object) -> Number:
    try:
        return bounded(work())  # type: ignore[operator]
    except (Overflow, InvalidOperation):
        raise CalculationError(f"The result has more than {MAX_LENGTH:,} digits, or no real value.") from None


def written(number: Number) -> str:
    """Exact as far as a person reads it, with a rounded form beside: `1/3 ≈ 0.3333333333`, `1.4142135624` after ≈."""
    if isinstance(number, Decimal):
        return f"≈ {rounded(number)}"
    if number.denominator == 1:
        digits = str(number.numerator)
        return digits if len(digits) <= _SHOWN else f"{digits} ≈ {rounded(number)}"
    ended = _ended(number)
    if ended is not None:
        return ended
    exact = f"{number.numerator}/{number.denominator}"
    return f"{exact} ≈ {rounded(number)}" if len(exact) <= _SHOWN else f"≈ {rounded(number)}"


def _ended(number: Fraction) -> str | None:
    """The decimal form of a fraction that has one of at most 30 digits."""
    exact = Context(prec=30)
    exact.traps[Inexact] = True
    try:
        text = format(exact.divide(Decimal(number.numerator), Decimal(number.denominator)), "f")
    except (Inexact, Overflow):
        return None
    return text if len(text) <= 32 else None


def rounded(number: Number) -> str:
    """Ten significant digits, and four decimals at least of numbers that are not very large."""
    value = approximate(number)
    if not value:
        return "0"
    whole = value.adjusted() + 1
    value = Context(prec=max(SIGNIFICANT, min(whole + 4, 20))).plus(value)
    if -7 < value.adjusted() < 20:
        text = format(value, "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = format(value, "E").partition("E")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"
