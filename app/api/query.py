"""The parts of an address that routes read: numbers in a path, and parameters after the question mark.

As strict as bodies are: a parameter that a route does not know is refused by name, rather than left out of its answer.
"""

from __future__ import annotations

from fastapi import Request

from app.errors import ApiError, invalid

_DIGITS = 18  # fewer than SQLite's largest integer has


def number_in_path(text: str, what: str) -> int:
    """
    Raises:
        ApiError: 404, as of a number that nothing has.
    """
    if (number := whole_number(text)) is None:
        raise ApiError(404, f"There is no {what} {text!r:.60}.", code="not_found")
    return number


def parameters(request: Request, *accepted: str) -> dict[str, int]:
    """The parameters that were given, all of them whole numbers of 0 or more. An empty one is an absent one.

    Raises:
        ApiError: 400, naming the parameter.
    """
    made = {}
    for name, text in request.query_params.multi_items():
        if name not in accepted:
            known = ", ".join(accepted) or "none"
            raise invalid(name, f"{name!r:.60} is not a parameter here; accepted: {known}.", "unknown_parameter")
        if not text:
            continue
        if (number := whole_number(text)) is None or name in made:
            twice = "given twice" if name in made else f"{text!r:.60}"
            raise invalid(name, f"{name} is {twice}; accepted: one whole number of 0 or more.")
        made[name] = number
    return made


def whole_number(text: str) -> int | None:
    """0 or more, as SQLite can hold it; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None
