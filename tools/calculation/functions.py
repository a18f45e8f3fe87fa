"""The functions of the calculator, each bounded before it begins.

Results are exact where they can be; sines and the like are those of the floating-point library, to 15 digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_FLOOR, ROUND_HALF_UP, Decimal
from fractions import Fraction

from tools.calculation import number
from tools.calculation.number import APPROXIMATE, CalculationError, Number, approximate
from tools.calculation.units import UNITS, Quantity

__all__ = ["FUNCTIONS", "Function"]

MAX_FACTORIAL = 1400  # its result has 3,799 digits
_RADIAN = ((UNITS["rad"], 1),)


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    fewest: int
    most: int
    work: Callable[[list[Quantity]], Quantity]

    def __call__(self, arguments: list[Quantity]) -> Quantity:
        if not self.fewest <= len(arguments) <= self.most:
            expected = f"{self.fewest}" if self.fewest == self.most else f"{self.fewest} to {self.most}"
            raise CalculationError(f"{self.name} takes {expected} arguments, not {len(arguments)}.")
        return self.work(arguments)


def _plain(work: Callable[..., Number]) -> Callable[[list[Quantity]], Quantity]:
    def applied(arguments: list[Quantity]) -> Quantity:
        for each in arguments:
            if not each.plain:
                raise CalculationError(f"A plain number is expected here, not one in {each.symbol}.")
        return Quantity(number.bounded(work(*(each.number for each in arguments))))

    return applied


def _whole(value: Number) -> int:
    if isinstance(value, Fraction) and value.denominator == 1:
        return value.numerator
    raise CalculationError(f"A whole number is expected here, not {number.rounded(value)}.")


def factorial(value: Number) -> Fraction:
    n = _whole(value)
    if not 0 <= n <= MAX_FACTORIAL:
        raise CalculationError(f"The factorial of {n:,} is not worked out; accepted: 0 to {MAX_FACTORIAL:,}.")
    return Fraction(math.factorial(n))


def _chosen(work: Callable[[int, int], int]) -> Callable[[Number, Number], Fraction]:
    def applied(a: Number, b: Number) -> Fraction:
        n, k = _whole(a), _whole(b)
        if not 0 <= n <= 10_000 or not 0 <= k <= 10_000:
            raise CalculationError("comb and perm take whole numbers from 0 to 10,000.")
        if work is math.perm and k * max(n, 1).bit_length() > 4 * number.MAX_LENGTH:
            raise CalculationError(f"The result has more than {number.MAX_LENGTH:,} digits, which is the limit.")
        return Fraction(work(n, k))

    return applied


def _floating(work: Callable[[float], float]) -> Callable[[Number], Decimal]:
    def applied(value: Number) -> Decimal:
        try:
            return Decimal(f"{work(float(value)):.15g}")
        except (ValueError, OverflowError):
            raise CalculationError(f"There is no real result for {number.rounded(value)}.") from None

    return applied


def _of_angle(work: Callable[[float], float]) -> Callable[[list[Quantity]], Quantity]:
    """A function of an angle: of radians where no unit is written."""

    def applied(arguments: list[Quantity]) -> Quantity:
        (angle,) = arguments
        value = angle.number if angle.plain else angle.to(Quantity(Fraction(1), _RADIAN)).number
        if abs(found := work(float(value))) > 1e15:  # a pole, which no floating-point angle meets exactly
            raise CalculationError(f"There is no result at {angle}.")
        return Quantity(Decimal(f"{found:.15f}") if value else Fraction(round(work(0.0))))

    return applied


def _rounded(mode: str) -> Callable[[list[Quantity]], Quantity]:
    def applied(arguments: list[Quantity]) -> Quantity:
        value, *rest = arguments
        places = _whole(rest[0].number) if rest else 0
        if abs(places) > 50 or any(not each.plain for each in rest):
            raise CalculationError("Numbers are rounded to a whole number of places, at most 50.")
        scaled = number.multiply(value.number, Fraction(10) ** places)
        whole = _nearest(scaled, mode) if isinstance(scaled, Fraction) else int(scaled.to_integral_value(mode))
        return Quantity(Fraction(whole) / Fraction(10) ** places, value.powers)

    return applied


def _nearest(value: Fraction, mode: str) -> int:
    if mode == ROUND_FLOOR:
        return math.floor(value)
    if mode == ROUND_CEILING:
        return math.ceil(value)
    if mode == ROUND_DOWN:
        return math.trunc(value)
    away = math.floor(abs(value) + Fraction(1, 2))  # halves go away from zero, as people round
    return away if value >= 0 else -away


def _total(arguments: list[Quantity]) -> Quantity:
    total, *rest = arguments
    for each in rest:
        total = total.plus(each)
    return total


def _ordered(arguments: list[Quantity]) -> list[Quantity]:
    first = arguments[0]
    return sorted(arguments, key=lambda each: approximate(each.to(first).number))


def _mean(arguments: list[Quantity]) -> Quantity:
    return _total(arguments).times(Quantity(Fraction(1, len(arguments))))


def _median(arguments: list[Quantity]) -> Quantity:
    ordered, middle = _ordered(arguments), len(arguments) // 2
    return ordered[middle] if len(arguments) % 2 else _mean(ordered[middle - 1 : middle + 1])


def _spread(arguments: list[Quantity]) -> Quantity:
    """The standard deviation of a sample (divided by n - 1)."""
    mean = _mean(arguments).negative()
    squares = [each.plus(mean) for each in arguments]
    total = _total([each.times(each) for each in squares])
    return total.times(Quantity(Fraction(1, len(arguments) - 1))).to_power(Quantity(Fraction(1, 2)))


def _absolute(arguments: list[Quantity]) -> Quantity:
    return arguments[0].negative() if arguments[0].number < 0 else arguments[0]


def _root(degree: int) -> Callable[[list[Quantity]], Quantity]:
    def applied(arguments: list[Quantity]) -> Quantity:
        (value,) = arguments
        if value.plain:
            return Quantity(number.root(value.number, degree))
        return value.to_power(Quantity(Fraction(1, degree)))

    return applied


def _any_root(value: Number, degree: Number) -> Number:
    n = _whole(degree)
    if not 1 <= n <= 1000:
        raise CalculationError("The degree of a root is from 1 to 1,000.")
    return number.root(value, n)


def _log(value: Number, base: Number = Fraction(10)) -> Number:
    if base <= 0 or base == 1:
        raise CalculationError("The base of a logarithm is positive and not 1.")
    if isinstance(base, Fraction) and base.denominator == 1:
        return number.logarithm(value, base.numerator)
    return APPROXIMATE.divide(approximate(number.logarithm(value, None)), APPROXIMATE.ln(approximate(base)))


def _modulo(a: Number, b: Number) -> Number:
    if not b:
        raise CalculationError("Division by zero has no result.")
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a % b
    return approximate(a) - approximate(b) * (approximate(a) / approximate(b)).to_integral_value(ROUND_FLOOR)


_MANY = 100
_ALL = [
    Function("sqrt", 1, 1, _root(2)),
    Function("cbrt", 1, 1, _root(3)),
    Function("root", 2, 2, _plain(_any_root)),
    Function("abs", 1, 1, _absolute),
    Function("sign", 1, 1, _plain(lambda x: Fraction((x > 0) - (x < 0)))),
    Function("floor", 1, 1, _rounded(ROUND_FLOOR)),
    Function("ceil", 1, 1, _rounded(ROUND_CEILING)),
    Function("trunc", 1, 1, _rounded(ROUND_DOWN)),
    Function("round", 1, 2, _rounded(ROUND_HALF_UP)),
    Function("min", 1, _MANY, lambda arguments: _ordered(arguments)[0]),
    Function("max", 1, _MANY, lambda arguments: _ordered(arguments)[-1]),
    Function("sum", 1, _MANY, _total),
    Function("mean", 1, _MANY, _mean),
    Function("average", 1, _MANY, _mean),
    Function("median", 1, _MANY, _median),
    Function("stdev", 2, _MANY, _spread),
    Function("factorial", 1, 1, _plain(factorial)),
    Function("gcd", 1, _MANY, _plain(lambda *all_: Fraction(math.gcd(*map(_whole, all_))))),
    Function("lcm", 1, _MANY, _plain(lambda *all_: Fraction(math.lcm(*map(_whole, all_))))),
    Function("comb", 2, 2, _plain(_chosen(math.comb))),
    Function("perm", 2, 2, _plain(_chosen(math.perm))),
    Function("mod", 2, 2, _plain(_modulo)),
    Function("pow", 2, 2, lambda arguments: arguments[0].to_power(arguments[1])),
    Function("exp", 1, 1, _plain(number.exponential)),
    Function("ln", 1, 1, _plain(lambda x: number.logarithm(x, None))),
    Function("log", 1, 2, _plain(_log)),
    Function("log2", 1, 1, _plain(lambda x: number.logarithm(x, 2))),
    Function("log10", 1, 1, _plain(lambda x: number.logarithm(x, 10))),
    Function("sin", 1, 1, _of_angle(math.sin)),
    Function("cos", 1, 1, _of_angle(math.cos)),
    Function("tan", 1, 1, _of_angle(math.tan)),
    Function("asin", 1, 1, _plain(_floating(math.asin))),
    Function("acos", 1, 1, _plain(_floating(math.acos))),
    Function("atan", 1, 1, _plain(_floating(math.atan))),
    Function("sinh", 1, 1, _plain(_floating(math.sinh))),
    Function("cosh", 1, 1, _plain(_floating(math.cosh))),
    Function("tanh", 1, 1, _plain(_floating(math.tanh))),
    Function("hypot", 2, 2, lambda ab: _root(2)([ab[0].times(ab[0]).plus(ab[1].times(ab[1]))])),
]
FUNCTIONS = {function.name: function for function in _ALL}
