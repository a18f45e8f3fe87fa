"""The public face for those who write tools and strategies; importing it loads nothing heavy.

Every name is fetched from its home when it is first used, so `from ponder import tool` does not load an engine. The
built-in strategies import from here alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine import (
        GREEDY,
        MAX_LOGPROBS,
        ContextLengthExceeded,
        DeadlineExceeded,
        Engine,
        EngineConfig,
        FinishReason,
        InvalidParameter,
        Sampling,
        Sequence,
        Span,
        SpanResult,
        SpanStream,
        Tokenizer,
        TokenLogprob,
    )
    from engine.beam_search import beam_search
    from engine.structured_output.layout import Constrained
    from engine.structured_output.spec import JsonSchema
    from reasoning.candidate import Candidate, CandidateChosen, CandidateDone, Candidates, accept, prefill
    from reasoning.dialogue import ChatFormat, after_answer
    from reasoning.self_consistency import vote_of
    from reasoning.strategy import Context as StrategyContext
    from reasoning.strategy import (
        ContextDocument,
        Event,
        FoundPassage,
        Options,
        SearchSource,
        Spent,
        Yields,
        refuse_fields,
        strategy,
    )
    from reasoning.thinking import Answering, Markers, Piece, empty_thinking, think_and_answer
    from reasoning.tree import Asking, Problem, Reply, SearchEnded, Thought, TreeOptions
    from reasoning.tree.nodes import NodeAdded, NodeChosen, NodePruned, NodeScored
    from reasoning.tree.search import search  # by its own module: the package has one of that name
    from reasoning.verify import read_labels, run_check, verifier
    from reasoning.written import pieces_of
    from tools.context import Context, Depends, Question, Source, SubAgentAnswer, SubAgentTask
    from tools.errors import BadArguments, NotAnswered, NotProvided, Retry, ToolDeclarationError, ToolError
    from tools.testing import FakeContext, ScriptedModel, assert_tool_called, call_tool, calls, run_tool
    from tools.tool import Tool, Toolset, tool

__all__ = [
    "GREEDY",
    "MAX_LOGPROBS",
    "Answering",
    "Asking",
    "BadArguments",
    "Candidate",
    "CandidateChosen",
    "CandidateDone",
    "Candidates",
    "ChatFormat",
    "Constrained",
    "Context",
    "ContextDocument",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "Depends",
    "Engine",
    "EngineConfig",
    "Event",
    "FakeContext",
    "FinishReason",
    "FoundPassage",
    "InvalidParameter",
    "JsonSchema",
    "Markers",
    "NodeAdded",
    "NodeChosen",
    "NodePruned",
    "NodeScored",
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
    "SearchSource",
    "Sequence",
    "Source",
    "Span",
    "SpanResult",
    "SpanStream",
    "Spent",
    "StrategyContext",
    "SubAgentAnswer",
    "SubAgentTask",
    "Thought",
    "TokenLogprob",
    "Tokenizer",
    "Tool",
    "ToolDeclarationError",
    "ToolError",
    "Toolset",
    "TreeOptions",
    "Yields",
    "accept",
    "after_answer",
    "assert_tool_called",
    "beam_search",
    "call_tool",
    "calls",
    "empty_thinking",
    "pieces_of",
    "prefill",
    "read_labels",
    "refuse_fields",
    "run_check",
    "run_tool",
    "search",
    "strategy",
    "think_and_answer",
    "tool",
    "verifier",
    "vote_of",
]

_NAMES_BY_MODULE = {
    "engine": [
        "GREEDY",
        "MAX_LOGPROBS",
        "ContextLengthExceeded",
        "DeadlineExceeded",
        "Engine",
        "EngineConfig",
        "FinishReason",
        "InvalidParameter",
        "Sampling",
        "Sequence",
        "Span",
        "SpanResult",
        "SpanStream",
        "TokenLogprob",
        "Tokenizer",
    ],
    "engine.beam_search": ["beam_search"],
    "engine.structured_output.layout": ["Constrained"],
    "engine.structured_output.spec": ["JsonSchema"],
    "reasoning.candidate": ["Candidate", "CandidateChosen", "CandidateDone", "Candidates", "accept", "prefill"],
    "reasoning.dialogue": ["ChatFormat", "after_answer"],
    "reasoning.self_consistency": ["vote_of"],
    "reasoning.strategy": [
        "ContextDocument",
        "Event",
        "FoundPassage",
        "Options",
        "SearchSource",
        "Spent",
        "Yields",
        "refuse_fields",
        "strategy",
    ],
    "reasoning.thinking": ["Answering", "Markers", "Piece", "empty_thinking", "think_and_answer"],
    "reasoning.tree": ["Asking", "Problem", "Reply", "SearchEnded", "Thought", "TreeOptions", "search"],
    "reasoning.tree.nodes": ["NodeAdded", "NodeChosen", "NodePruned", "NodeScored"],
    "reasoning.verify": ["read_labels", "run_check", "verifier"],
    "reasoning.written": ["pieces_of"],
    "tools.context": ["Context", "Depends", "Question", "Source", "SubAgentAnswer", "SubAgentTask"],
    "tools.errors": ["BadArguments", "NotAnswered", "NotProvided", "Retry", "ToolDeclarationError", "ToolError"],
    "tools.testing": ["FakeContext", "ScriptedModel", "assert_tool_called", "call_tool", "calls", "run_tool"],
    "tools.tool": ["Tool", "Toolset", "tool"],
}
_HOME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
_ELSEWHERE = {"StrategyContext": ("reasoning.strategy", "Context")}  # names that two of ours have


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ponder' has no {name!r}; it has {', '.join(__all__)}")
    home, theirs = _ELSEWHERE[name] if name in _ELSEWHERE else (_HOME[name], name)
    return getattr(import_module(home), theirs)


def __dir__() -> list[str]:
    return __all__
