"""Arithmetic with exact numbers and units, and with dates: what can be worked out and need not be guessed."""

from tools.calculation.errors import CalculationError
from tools.calculation.expression import calculate
from tools.calculation.quantity import Quantity

__all__ = ["CalculationError", "Quantity", "calculate"]
