"""Arithmetic, so that the model need not guess."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ponder import Retry, tool
from tools.calculation import CalculationError, calculate


@tool(permission="none", timeout=5)
def calculator(expression: Annotated[str, Field(min_length=1, max_length=1000)]) -> str:
    """Evaluate an arithmetic expression exactly.

    Args:
        expression: numbers, + - * / ^ %, brackets, functions and units, like 15% of 80 or 2 km + 300 m in miles.
    """
    try:
        return str(calculate(expression))
    except CalculationError as error:
        raise Retry(str(error)) from None
