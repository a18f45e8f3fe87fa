"""Errors of tools, worded so that their reader can act: the author, the model, or the host.

`ToolDeclarationError` is for the author and comes at import. `Retry` is raised by a tool to be called again, better.
The rest become outcomes that the model reads; none of them ends a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class ToolError(Exception):
    """The error that tools raise by design; its message is meant to be read."""


class ToolDeclarationError(ToolError, TypeError):
    """A function that cannot be offered as a tool, and its remedy."""


class Retry(ToolError):
    """Raised by a tool: this call was no use, and the hint says how to call again."""

    def __init__(self, hint: str) -> None:
        super().__init__(hint)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ArgumentProblem:
    """A fault of one argument. `where` is its path, as in `stops[2].city`, or "" for the whole."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message


class BadArguments(ToolError):
    """The arguments do not fit the tool's schema; each problem names its field."""

    def __init__(self, tool: str, problems: Sequence[ArgumentProblem]) -> None:
        super().__init__(f"The arguments do not fit {tool}: " + "; ".join(map(str, problems)) + ".")
        self.problems = tuple(problems)


class NotAnswered(ToolError):
    """A tool asked the person, and no answer came: nobody is there, or they declined."""


class NotProvided(ToolError, LookupError):
    """A tool asked for a dependency that the host did not provide."""


class JournalConflict(ToolError):
    """A call id that was already used, for a call of another tool or with other arguments."""
