"""The public face for those who write tools and strategies; importing it loads nothing heavy.

Every name is fetched from its home when it is first used, so `from ponder import tool` does not load an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine import GREEDY, Engine, EngineConfig, InvalidParameter, Sampling, Sequence, Span
    from reasoning.strategy import Context as StrategyContext
    from reasoning.strategy import Event, Options, Spent, strategy
    from reasoning.thinking import Piece, think_and_answer
    from reasoning.tree import Asking, Problem, Reply, SearchEnded, Thought, TreeOptions, search
    from tools.context import Context, Depends, Question, Source
    from tools.errors import BadArguments, NotAnswered, NotProvided, Retry, ToolDeclarationError, ToolError
    from tools.testing import FakeContext, ScriptedModel, assert_tool_called, call_tool, calls, run_tool
    from tools.tool import Tool, tool
    from tools.toolset import Toolset

__all__ = [
    "GREEDY",
    "Asking",
    "BadArguments",
    "Context",
    "Depends",
    "Engine",
    "EngineConfig",
    "Event",
    "FakeContext",
    "InvalidParameter",
    "NotAnswered",
    "NotProvided",
    "Options",
    "Piece",
    "Problem",
    "Question",
    "Reply",
    "Retry",
    "Sampling",
    "ScriptedModel",
    "SearchEnded",
    "Sequence",
    "Source",
    "Span",
    "Spent",
    "StrategyContext",
    "Thought",
    "Tool",
    "ToolDeclarationError",
    "ToolError",
    "Toolset",
    "TreeOptions",
    "assert_tool_called",
    "call_tool",
    "calls",
    "run_tool",
    "search",
    "strategy",
    "think_and_answer",
    "tool",
]

_HOME = {
    **dict.fromkeys(["GREEDY", "Engine", "EngineConfig", "InvalidParameter", "Sampling", "Sequence", "Span"], "engine"),
    **dict.fromkeys(["Event", "Options", "Spent", "strategy"], "reasoning.strategy"),
    **dict.fromkeys(["Piece", "think_and_answer"], "reasoning.thinking"),
    **dict.fromkeys(
        ["Asking", "Problem", "Reply", "SearchEnded", "Thought", "TreeOptions", "search"], "reasoning.tree"
    ),
    **dict.fromkeys(["Context", "Depends", "Question", "Source"], "tools.context"),
    **dict.fromkeys(
        ["BadArguments", "NotAnswered", "NotProvided", "Retry", "ToolDeclarationError", "ToolError"], "tools.errors"
    ),
    **dict.fromkeys(
        ["FakeContext", "ScriptedModel", "assert_tool_called", "call_tool", "calls", "run_tool"], "tools.testing"
    ),
    **dict.fromkeys(["Tool", "tool"], "tools.tool"),
    **dict.fromkeys(["Toolset"], "tools.toolset"),
}
_ELSEWHERE = {"StrategyContext": ("reasoning.strategy", "Context")}  # names that two of ours have


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ponder' has no {name!r}; it has {', '.join(__all__)}")
    home, theirs = _ELSEWHERE[name] if name in _ELSEWHERE else (_HOME[name], name)
    return getattr(import_module(home), theirs)


def __dir__() -> list[str]:
    return __all__
