"""Units by name, and quantities that are added, multiplied and converted as physics allows.

Each unit is an exact multiple of base units; kelvin, Celsius and Fahrenheit have zero points. Names that mean different
things to different people (ton, month) are refused with the words that are clear. Definitions are those of the SI
Brochure and of NIST SP 811, where customary units are given by exact factors.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from tools.calculation import number
from tools.calculation.number import APPROXIMATE, CalculationError, Number

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
E = Decimal("2.71828182845904523536028747135266249775724709369995957496697")

Dimension = tuple[int, ...]  # powers of metre, kilogram, second, kelvin, ampere, bit, radian
_BASE = ("length", "mass", "time", "temperature", "current", "data", "angle")
NONE: Dimension = (0,) * len(_BASE)


@dataclass(frozen=True, slots=True)
class Unit:
    symbol: str
    factor: Number  # in base units
    dimension: Dimension
    zero: Fraction = Fraction(0)  # offset of its 0 in base units: only temperatures have one


_KINDS: dict[str, Dimension] = {
    "length": (1, 0, 0, 0, 0, 0, 0),
    "mass": (0, 1, 0, 0, 0, 0, 0),
    "time": (0, 0, 1, 0, 0, 0, 0),
    "temperature": (0, 0, 0, 1, 0, 0, 0),
    "current": (0, 0, 0, 0, 1, 0, 0),
    "data": (0, 0, 0, 0, 0, 1, 0),
    "angle": (0, 0, 0, 0, 0, 0, 1),
    "area": (2, 0, 0, 0, 0, 0, 0),
    "volume": (3, 0, 0, 0, 0, 0, 0),
    "speed": (1, 0, -1, 0, 0, 0, 0),
    "acceleration": (1, 0, -2, 0, 0, 0, 0),
    "frequency": (0, 0, -1, 0, 0, 0, 0),
    "force": (1, 1, -2, 0, 0, 0, 0),
    "pressure": (-1, 1, -2, 0, 0, 0, 0),
    "energy": (2, 1, -2, 0, 0, 0, 0),
    "power": (2, 1, -3, 0, 0, 0, 0),
    "charge": (0, 0, 1, 0, 1, 0, 0),
    "voltage": (2, 1, -3, 0, -1, 0, 0),
    "resistance": (2, 1, -3, 0, -2, 0, 0),
    "data rate": (0, 0, -1, 0, 0, 1, 0),
}
# kind | factor | symbol and other names; ~ before a symbol: it takes metric prefixes
_TABLE = """
length | 1 | ~m meter metre meters metres
length | 0.0254 | in inch inches
length | 0.3048 | ft foot feet
length | 0.9144 | yd yard yards
length | 1609.344 | mi mile miles
length | 1852 | nmi
length | 149597870700 | au
length | 9460730472580800 | ly lightyear lightyears
length | 1/10000000000 | Å angstrom angstroms
length | 1/1000000 | micron microns
mass | 1/1000 | ~g gram grams gramme grammes
mass | 1000 | ~t tonne tonnes
mass | 0.45359237 | lb lbs pound pounds
mass | 0.028349523125 | oz ounce ounces
mass | 6.35029318 | st stone stones
mass | 0.00006479891 | gr grain grains
mass | 0.0002 | ct carat carats
mass | 907.18474 | ston
time | 1 | ~s sec secs second seconds
time | 60 | min mins minute minutes
time | 3600 | h hr hrs hour hours
time | 86400 | d day days
time | 604800 | wk week weeks
time | 31557600 | yr year years
temperature | 1 | ~K kelvin kelvins
temperature | 5/9 | °R rankine
current | 1 | ~A ampere amperes amp amps
data | 1 | ~bit bits b
data | 8 | ~B byte bytes
angle | 1 | rad radian radians
area | 10000 | ha hectare hectares
area | 4046.8564224 | acre acres
volume | 1/1000 | ~l
volume | 1/1000 | ~L l liter litre liters litres
volume | 0.003785411784 | gal gallon gallons
volume | 0.000946352946 | qt quart quarts
volume | 0.000473176473 | pt pint pints
volume | 0.0002365882365 | cup cups
volume | 0.0000295735295625 | floz
volume | 0.00001478676478125 | tbsp tablespoon tablespoons
volume | 0.00000492892159375 | tsp teaspoon teaspoons
volume | 0.00454609 | impgal
volume | 0.00056826125 | imppt
volume | 0.158987294928 | bbl barrel barrels
speed | 0.44704 | mph
speed | 5/18 | kph kmh
speed | 463/900 | kn knot knots
speed | 299792458 | c
acceleration | 9.80665 | gee gees
frequency | 1 | ~Hz hertz
force | 1 | ~N newton newtons
force | 4.4482216152605 | lbf
force | 1/100000 | dyn
pressure | 1 | ~Pa pascal pascals
pressure | 100000 | ~bar bars
pressure | 101325 | atm atmosphere atmospheres
pressure | 44482216152605/6451600000 | psi
pressure | 101325/760 | torr Torr
pressure | 133.322387415 | mmHg
energy | 1 | ~J joule joules
energy | 4.184 | ~cal calorie calories
energy | 3600 | ~Wh watthour watthours
energy | 1.602176634e-19 | ~eV electronvolt electronvolts
energy | 1055.05585262 | BTU
power | 1 | ~W watt watts
power | 745.69987158227022 | hp horsepower
charge | 1 | coulomb coulombs
voltage | 1 | ~V volt volts
resistance | 1 | ~Ω ohm ohms
data rate | 1 | ~bps
"""
_PREFIXES = {
    "Q": 30, "R": 27, "Y": 24, "Z": 21, "E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "d": -1, "c": -2,
    "m": -3, "µ": -6, "μ": -6, "u": -6, "n": -9, "p": -12, "f": -15, "a": -18,
}  # fmt: skip
_WORDS = {
    "tera": 12, "giga": 9, "mega": 6, "kilo": 3, "hecto": 2, "deci": -1, "centi": -2, "milli": -3, "micro": -6,
    "nano": -9, "pico": -12,
}  # fmt: skip
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_UNCLEAR = {
    "ton": "tonne (1,000 kg) or ston (2,000 lb)",
    "tons": "tonnes (1,000 kg) or ston (2,000 lb)",
    "month": "days, or the tool for dates",
    "months": "days, or the tool for dates",
    "degree": "deg for angles, °C or °F for temperatures",
    "degrees": "deg for angles, °C or °F for temperatures",
}


def _made() -> dict[str, Unit]:
    units = dict[str, Unit]()
    for line in _TABLE.strip().splitlines():
        kind, factor, names = (part.strip() for part in line.split("|"))
        first, *others = names.split()
        symbol, dimension, size = first.lstrip("~"), _KINDS[kind], Fraction(factor)
        for name in (symbol, *others):
            units[name] = Unit(symbol, size, dimension)
        if not first.startswith("~"):
            continue
        for prefix, exponent in _PREFIXES.items():
            # A prefixed name that is already a unit (min, cd, ft, …) is skipped: the first meaning stays.
            units.setdefault(prefix + symbol, Unit(prefix + symbol, size * Fraction(10) ** exponent, dimension))
        for word, exponent in _WORDS.items():
            short = next(prefix for prefix, power in _PREFIXES.items() if power == exponent)
            for name in others:
                if len(name) > 2:
                    units[word + name] = Unit(short + symbol, size * Fraction(10) ** exponent, dimension)
        if kind == "data":
            for prefix, exponent in _BINARY.items():
                units[prefix + symbol] = Unit(prefix + symbol, size * 2**exponent, dimension)
    temperature = _KINDS["temperature"]
    for names, symbol, size, zero in (
        ("°C ℃ degC celsius centigrade C", "°C", Fraction(1), Fraction("273.15")),
        ("°F ℉ degF fahrenheit F", "°F", Fraction(5, 9), Fraction("459.67") * Fraction(5, 9)),
    ):
        units |= dict.fromkeys(names.split(), Unit(symbol, size, temperature, zero))
    arc = APPROXIMATE.divide(PI, Decimal(180))
    units |= dict.fromkeys(("deg", "°"), Unit("°", arc, _KINDS["angle"]))
    units["turn"] = units["turns"] = Unit("turn", APPROXIMATE.multiply(PI, Decimal(2)), _KINDS["angle"])
    return units


UNITS = _made()
_LOWER = dict[str, Unit | None]()
for _name, _unit in UNITS.items():
    # Spelled with other capitals, a name is taken where it can only be one unit.
    _LOWER[_name.lower()] = None if _LOWER.get(_name.lower(), _unit) != _unit else _unit


def find(name: str) -> Unit | None:
    """The unit of a name, or None.

    Raises:
        CalculationError: the name means several things.
    """
    if name in UNITS:
        return UNITS[name]
    if clear := _UNCLEAR.get(name.lower()):
        raise CalculationError(f"{name!r} can mean several things; write {clear}.")
    if name.lower() in _LOWER and len(name) > 1:
        found = _LOWER[name.lower()]
        if found is None:
            same = ", ".join(each for each in UNITS if each.lower() == name.lower())
            raise CalculationError(f"{name!r} can mean several units; write one of {same}.")
        return found
    return None


def near(name: str, others: tuple[str, ...] = ()) -> list[str]:
    """Names that look like `name`."""
    return difflib.get_close_matches(name, [*UNITS, *others], 3, 0.6)


def kind(dimension: Dimension) -> str:
    """Returns the name of a dimension: "a length", or its powers of base units."""
    if dimension == NONE:
        return "a plain number"
    for name, known in _KINDS.items():
        if known == dimension:
            return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    return "·".join(
        f"{name}^{power}" if power != 1 else name for name, power in zip(_BASE, dimension, strict=True) if power
    )


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
            raise CalculationError(f"An exponent is a plain number, not {kind(exponent.dimension)}.")
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
            here, there = kind(self.dimension), kind(target.dimension)
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
