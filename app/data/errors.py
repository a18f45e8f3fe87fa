"""Errors of the data layer: something is not there, or cannot be so."""

from __future__ import annotations


class NotThere(LookupError):
    """The user has no such thing; another may. `what`: chat, folder, message or run."""

    def __init__(self, what: str, id: str) -> None:
        super().__init__(f"There is no {what} {id!r:.60}.")
        self.what = what


class NameTaken(ValueError):
    """The user has a folder of this name."""


class WrongPlace(ValueError):
    """A message cannot stand there. `field`: what was given, as the request names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class KeyReused(ValueError):
    """The key was given with another request."""
