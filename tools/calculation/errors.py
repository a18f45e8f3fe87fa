"""Why there is no result, in words that a person or a model can act on."""

from __future__ import annotations


class CalculationError(ValueError):
    """The text cannot be read, has no value, or goes beyond a limit."""
