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


def texts(request: Request, *accepted: str) -> dict[str, str]:
    """The parameters that were given, each once. An empty one is an absent one.

    Raises:
        ApiError: 400, naming the parameter.
    """
    made: dict[str, str] = {}
    for name, text in request.query_params.multi_items():
        if name not in accepted:
            known = ", ".join(accepted) or "none"
            raise invalid(name, f"{name!r:.60} is not a parameter here; accepted: {known}.", "unknown_parameter")
        if not text:
            continue
        if name in made:
            raise invalid(name, f"{name} is given twice; accepted: one.")
        made[name] = text
    return made


def parameters(request: Request, *accepted: str) -> dict[str, int]:
    """The parameters that were given, all of them whole numbers of 0 or more. An empty one is an absent one.

    Raises:
        ApiError: 400, naming the parameter.
    """
    made = {}
    for name, text in texts(request, *accepted).items():
        if (number := whole_number(text)) is None:
            raise invalid(name, f"{name} is {text!r:.60}; accepted: one whole number of 0 or more.")
        made[name] = number
    return made


def bounded(name: str, text: str | None, default: int, most: int) -> int:
    """A parameter that is a number from 1 to `most`.

    Raises:
        ApiError: 400.
    """
    number = default if text is None else whole_number(text)
    if number is None or not 1 <= number <= most:
        raise invalid(name, f"{name} is {text!r:.60}; accepted: a whole number from 1 to {most}.")
    return number


def whole_number(text: str) -> int | None:
    """0 or more, as SQLite can hold it; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None
