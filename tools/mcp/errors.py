"""How a connection to an MCP server ends; the message says what the server did."""

from __future__ import annotations

from tools.errors import ToolError


class ServerFault(ToolError):
    """The server can't be used as it is: it is not there, died, hangs, floods, or sends what is no MCP."""


def told(error: BaseException) -> str:
    """An error in words, out of the groups in which task groups wrap what went wrong."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "it does not answer"
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, ToolError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
