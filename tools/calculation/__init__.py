"""Arithmetic with exact numbers and units, and with dates."""

from tools.calculation.expression import calculate
from tools.calculation.number import CalculationError
from tools.calculation.units import Quantity

__all__ = ["CalculationError", "Quantity", "calculate"]
