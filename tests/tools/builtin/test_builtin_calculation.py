"""The calculator: exact where it can be, in the units asked for, and quick to refuse what would be endless."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.calculation import CalculationError, calculate
from tools.calculation.units import UNITS


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("12 * 8 - 5", "91"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "1/3 ≈ 0.3333333333"),
        ("12,345 + 678", "13023"),
        ("1,234.5 × 2 ÷ 3", "823"),
        ("-(2 - 5) ** 2", "-9"),
        ("-2^2", "-4"),
        ("2^3^2", "512"),
        ("2^-2", "0.25"),
        ("15% of 80", "12"),
        ("80 + 15%", "92"),
        ("80 - 15%", "68"),
        ("5% + 5%", "0.1"),
        ("10 % 3", "1"),
        ("-7 mod 3", "2"),
        ("0.125 as %", "12.5 %"),
        ("2(3 + 4)", "14"),
        ("5!", "120"),
        ("√16 + sqrt(9/4)", "5.5"),
        ("8^(1/3)", "2"),
        ("cbrt(-27)", "-3"),
        ("sqrt(2)", "≈ 1.414213562"),
        ("log(1000) + log2(8) + ln(1)", "6"),
        ("sin(30°)", "≈ 0.5"),
        ("2 pi", "≈ 6.283185307"),
        ("max(1,234)", "234"),
        ("round(2.675, 2)", "2.68"),
        ("round(-2.5)", "-3"),
        ("mean(1, 2, 3, 4)", "2.5"),
        ("comb(52, 5)", "2598960"),
        ("gcd(12, 18) + lcm(4, 6)", "18"),
        ("0xff + 0b11", "258"),
        ("1.5e3", "1500"),
        ("123456789012345678901 + 1 =", "123456789012345678902"),
        ("2 km + 300 m in miles", "≈ 1.429153742 mi"),
        ("2.3 km in m", "2300 m"),
        ("5 ft 3 in in cm", "160.02 cm"),
        ("5 in in cm", "12.7 cm"),
        ("2 h 30 min in min", "150 min"),
        ("20 °C in °F", "68 °F"),
        ("-40 F to C", "-40 °C"),
        ("60 km/h * 30 min", "30 km"),
        ("100 km / 2 h", "50 km/h"),
        ("90 miles per hour in km/h", "144.84096 km/h"),
        ("3 kg * 9.81 m/s² in N", "29.43 N"),
        ("1.5 kW * 2 h in kWh", "3 kWh"),
        ("5 MB / 10 Mbps in s", "4 s"),
        ("1 GiB in MB", "1073.741824 MB"),
        ("2 m² in cm²", "20000 cm^2"),
        ("1 mi^2 in acres", "640 acre"),
        ("3 cubic meters in L", "3000 L"),
        ("1 atm in kPa", "101.325 kPa"),
        ("10 m / 2 m", "5"),
        ("max(3 km, 2000 m)", "3 km"),
        ("hypot(3 m, 4 m)", "5 m"),
    ],
)
def test_what_people_write_is_worked_out(text: str, result: str) -> None:
    assert str(calculate(text)) == result


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9**9**9", "about 369,693,100 digits; the limit is 4,000"),
        ("9^9^9^9^9", "the limit is 4,000"),
        ("10^4001", "the limit is 4,000"),
        ("(1/3)^100000", "the limit is 4,000"),
        ("5000!", "accepted: 0 to 1,400"),
        ("5!!!!", "accepted: 0 to 1,400"),
        ("1000! * 1000! * 1000!", "more than 4,000 digits"),
        ("perm(10000, 9000)", "more than 4,000 digits"),
        ("comb(100000, 2)", "0 to 10,000"),
        ("exp(10^9)", "more than 4,000 digits"),
        ("2.5^(10^9 + 0.5)", "more than 4,000 digits"),
        ("1e9999", "at most 1,000"),
        ("1" * 1001, "at most 1,000"),
        ("(" * 300 + "1" + ")" * 300, "deeper than 40 levels"),
        ("-" * 500 + "1", "deeper than 40 levels"),
        ("^".join("1" * 400), "deeper than 40 levels"),
        ("1/0", "Division by zero"),
        ("5 mod 0", "Division by zero"),
        ("0^-1", "no result"),
        ("sqrt(-1)", "not real"),
        ("ln(0)", "no real result"),
        ("asin(2)", "no real result"),
        ("tan(90°)", "no result"),
        ("1/2(3)", r"write \(a/b\) c or a/\(b c\)"),
        ("1/2 cup", r"write \(a/b\) c or a/\(b c\)"),
        ("3,5 + 1", "decimals are like 3.5"),
        ("1 + ", "at the end"),
        ("1 2", r"at '2' \(character 3\)"),
        ("", "at the end"),
        ("(1", "at the end"),
        ("1 km + 1 kg", "kg is a mass and km is a length"),
        ("5 km in kg", "km is a length and kg is a mass"),
        ("5 + 1 km", "a plain number"),
        ("20 °C + 5 °C", "write K"),
        ("1 ton in kg", r"tonne \(1,000 kg\) or ston"),
        ("3 months in days", "the tool for dates"),
        ("5 killometers in m", "near to it: kilometers"),
        ("5 km in 3 m", "stands a unit"),
        ("sin(1, 2)", "takes 1 arguments, not 2"),
        ("round(2.5 km, 1 km)", "a whole number of places"),
        ("2^(1 km)", "An exponent is a plain number"),
        ("(2 m)^0.5", "no such power"),
        ("__import__('os')", "cannot be read here"),
        ("a.b", "cannot be read here"),
        ("exec", "neither a unit nor a function"),
        ("[1]", "cannot be read here"),
        ("lambda: 1", "cannot be read here"),
    ],
)
def test_what_cannot_be_worked_out_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(CalculationError, match=said):
        calculate(text)


_NUMBERS = st.fractions(min_value=-1000, max_value=1000, max_denominator=50)


def _trees() -> st.SearchStrategy[tuple[str, Fraction | None]]:
    """Expressions with their values by `fractions`; None where a division by zero is in them."""
    leaf = _NUMBERS.map(lambda n: (f"({n.numerator}/{n.denominator})" if n.denominator > 1 else f"({n})", n))

    def joined(parts: st.SearchStrategy[tuple[str, Fraction | None]]) -> st.SearchStrategy[tuple[str, Fraction | None]]:
        return st.tuples(parts, st.sampled_from("+-*/"), parts).map(lambda abc: _joined(*abc))

    return st.recursive(leaf, joined, max_leaves=12)


def _joined(a: tuple[str, Fraction | None], sign: str, b: tuple[str, Fraction | None]) -> tuple[str, Fraction | None]:
    text = f"({a[0]} {sign} {b[0]})"
    if a[1] is None or b[1] is None or (sign == "/" and b[1] == 0):
        return text, None
    return text, {"+": a[1] + b[1], "-": a[1] - b[1], "*": a[1] * b[1], "/": a[1] / (b[1] or 1)}[sign]


@given(_trees())
def test_arithmetic_is_that_of_fractions(made: tuple[str, Fraction | None]) -> None:
    text, value = made
    if value is None:
        with pytest.raises(CalculationError, match="zero"):
            calculate(text)
    else:
        assert calculate(text).number == value


@given(_NUMBERS, st.integers(-6, 6))
def test_powers_are_those_of_fractions(base: Fraction, exponent: int) -> None:
    if base == 0 and exponent < 0:
        return
    assert (
        calculate(f"({base})^{exponent}" if base.denominator == 1 else f"({base})^({exponent})").number
        == base**exponent
    )


@given(_NUMBERS, st.sampled_from(["km mi", "kg lb", "h s", "L gal", "°C °F", "Pa psi", "J BTU", "GB MiB", "m/s mph"]))
def test_a_conversion_and_its_reverse_give_the_number_back(value: Fraction, pair: str) -> None:
    here, there = pair.split()
    converted = calculate(f"({value}) ({here})" if "/" in here else f"({value}) {here}").to(calculate(there))
    assert converted.to(calculate(here)).number == value


@given(st.text(alphabet="0123456789+-*/^%!(),. kmsinofte√°²", max_size=40))
def test_any_text_has_a_value_or_a_reason(text: str) -> None:
    try:
        str(calculate(text))
    except CalculationError as error:
        assert str(error)


def test_every_unit_converts_to_itself() -> None:
    for name in UNITS:
        if name not in ("as", "of", "in"):
            unit = calculate(f"1 {name}")
            assert unit.to(unit).number == 1
