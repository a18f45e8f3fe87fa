"""A number with units, added, multiplied and converted as physics allows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tools.calculation import number, units
from tools.calculation.errors import CalculationError
from tools.calculation.number import Number
from tools.calculation.units import NONE, Dimension, Unit

Powers = tuple[tuple[Unit, int], ...]
_ONE = Fraction(1)


@dataclass(frozen=True, slots=True)
class Quantity:
    """`number` of the product of `powers`. `percent`: it was written with %, so that adding it adds to the other."""

    number: Number
    powers: Powers = ()
    percent: bool = False

    @property
    def dimension(self) -> Dimension:
        total = list(NONE)
        for unit, power in self.powers:
            total = [a + power * b for a, b in zip(total, unit.dimension, strict=True)]
        return tuple(total)

    @property
    def plain(self) -> bool:
        return not self.powers

    @property
    def symbol(self) -> str:
        over = "·".join(_powered(unit, power) for unit, power in self.powers if power > 0)
        under = "·".join(_powered(unit, -power) for unit, power in self.powers if power < 0)
        if not under:
            return over
        return f"{over or '1'}/{under}" if "·" not in under else f"{over or '1'}/({under})"

    def __str__(self) -> str:
        if self.plain:
            return number.written(self.number)
        written = number.written(self.number)
        if "/" in written:  # a fraction of a unit says little
            written = f"≈ {number.rounded(self.number)}"
        return written + ("" if self.symbol == "°" else " ") + self.symbol

    def negative(self) -> Quantity:
        return Quantity(number.negative(self.number), self.powers, self.percent)

    def plus(self, other: Quantity) -> Quantity:
        if other.percent and not self.percent:
            return self.times(Quantity(number.add(_ONE, other.number)))
        if self.plain and other.plain:
            return Quantity(number.add(self.number, other.number), (), self.percent and other.percent)
        for each in (self, other):
            each._no_zero_point()
        return Quantity(number.add(self.number, other.to(self).number), self.powers)

    def times(self, other: Quantity) -> Quantity:
        for each, beside in ((self, other), (other, self)):
            if not beside.plain or each.percent:
                each._no_zero_point()
        value, powers = number.multiply(self.number, other.number), dict(self.powers)
        for unit, power in other.powers:
            like = next((each for each in powers if each.dimension == unit.dimension), unit)
            if like != unit:
                ratio = number.multiply(unit.factor, number.inverse(like.factor))
                value = number.multiply(value, number.power(ratio, Fraction(power)))
            powers[like] = powers.get(like, 0) + power
        made = Quantity(value, tuple((unit, power) for unit, power in powers.items() if power))
        return Quantity(made._in_base()) if made.dimension == NONE and made.powers else made

    def inverse(self) -> Quantity:
        self._no_zero_point()
        return Quantity(number.inverse(self.number), tuple((unit, -power) for unit, power in self.powers))

    def to_power(self, exponent: Quantity) -> Quantity:
        if not exponent.plain:
            raise CalculationError(f"An exponent is a plain number, not {units.kind(exponent.dimension)}.")
        if self.plain:
            return Quantity(number.power(self.number, exponent.number))
        self._no_zero_point()
        raised = [
            (unit, power * exponent.number) for unit, power in self.powers if isinstance(exponent.number, Fraction)
        ]
        if not raised or any(power.denominator != 1 or abs(power) > 30 for _, power in raised):
            raise CalculationError(f"The unit {self.symbol} has no such power; accepted: whole powers up to 30.")
        powers = tuple((unit, int(power)) for unit, power in raised if power)
        return Quantity(number.power(self.number, exponent.number), powers)

    def to(self, target: Quantity) -> Quantity:
        """In the units of `target`.

        Raises:
            CalculationError: they measure something else.
        """
        if self.dimension != target.dimension:
            here, there = units.kind(self.dimension), units.kind(target.dimension)
            raise CalculationError(f"{self._named()} is {here} and {target._named()} is {there}; they don't convert.")
        value = self._in_base()
        for unit, power in target.powers:
            value = number.add(value, -unit.zero)
            value = number.multiply(value, number.power(unit.factor, Fraction(-power)))
        return Quantity(value, target.powers)

    def _in_base(self) -> Number:
        value = self.number
        for unit, power in self.powers:
            value = number.add(number.multiply(value, number.power(unit.factor, Fraction(power))), unit.zero)
        return value

    def _named(self) -> str:
        return self.symbol or "the number"

    def _no_zero_point(self) -> None:
        for unit, _ in self.powers:
            if unit.zero:
                raise CalculationError(f"Temperatures in {unit.symbol} convert, but don't add or multiply; write K.")


def _powered(unit: Unit, power: int) -> str:
    return unit.symbol if power == 1 else f"{unit.symbol}^{power}"
