"""The public face for those who write plugins; importing it loads nothing heavy.

Every name is fetched from its home when it is first used, so `from ponder import tool` does not load an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.context import Context, Depends, Question, Source
    from tools.errors import BadArguments, NotAnswered, NotProvided, Retry, ToolDeclarationError, ToolError
    from tools.testing import FakeContext, ScriptedModel, assert_tool_called, call_tool, calls, run_tool
    from tools.tool import Tool, tool
    from tools.toolset import Toolset

__all__ = [
    "BadArguments",
    "Context",
    "Depends",
    "FakeContext",
    "NotAnswered",
    "NotProvided",
    "Question",
    "Retry",
    "ScriptedModel",
    "Source",
    "Tool",
    "ToolDeclarationError",
    "ToolError",
    "Toolset",
    "assert_tool_called",
    "call_tool",
    "calls",
    "run_tool",
    "tool",
]

_HOME = {
    **dict.fromkeys(["Context", "Depends", "Question", "Source"], "tools.context"),
    **dict.fromkeys(
        ["BadArguments", "NotAnswered", "NotProvided", "Retry", "ToolDeclarationError", "ToolError"], "tools.errors"
    ),
    **dict.fromkeys(
        ["FakeContext", "ScriptedModel", "assert_tool_called", "call_tool", "calls", "run_tool"], "tools.testing"
    ),
    **dict.fromkeys(["Tool", "tool"], "tools.tool"),
    "Toolset": "tools.toolset",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ponder' has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
