"""Detects a model's tool parser by its chat template, or takes it by name."""

from __future__ import annotations

import re
from collections.abc import Callable

from engine.errors import CheckpointError, InvalidParameter
from engine.tool_parsers.base import Tokens, ToolParser
from engine.tool_parsers.gemma4 import Gemma4
from engine.tool_parsers.json_formats import CALLS, Harmony, Hermes, Llama3Json, Llama4Json, Mistral
from engine.tool_parsers.qwen3_coder import Qwen3Coder

# Marks of each tool parser in the source of a template; quotes may be escaped there. The first that fits counts:
# Qwen3-Coder's tags stand between those of Hermes, and others (GLM's) share the tags but not the JSON.
_KINDS = (
    (Qwen3Coder, ("<tool_call>", "<function=", "<parameter=")),
    (Hermes, ("<tool_call>", r'\\?"arguments\\?":')),
    (Gemma4, (r"<\|tool_call>", r"call:", r'<\|\\?"\|>')),
    (Harmony, (r"<\|channel\|>", "commentary", r"functions\.")),
    (Mistral, (r"\[TOOL_CALLS\]",)),
    (Llama3Json, (r"<\|start_header_id\|>", r'\{\\?"name\\?":', r'\\?"parameters\\?":')),
    (Llama4Json, (r"<\|header_start\|>", r'\{\\?"name\\?":', r'\\?"parameters\\?":')),
)
TOOL_PARSERS = tuple(kind.name for kind, _ in _KINDS)


def choose_parser(tokens: Tokens, chat_template: str | None, name: str = "auto") -> ToolParser | None:
    """Returns the tool parser of that name, or with "auto" the one whose marks are in the source of the chat template.

    None where "auto" finds no tool parser, or one whose tokens the tokenizer lacks: then the model cannot call tools.

    Raises:
        InvalidParameter: there is no tool parser of that name.
        CheckpointError: the tokenizer lacks a token of the named tool parser.
    """
    if name == "auto":
        for kind, marks in _KINDS:
            if chat_template is not None and all(re.search(mark, chat_template) for mark in marks):
                return None if missing(tokens, kind.tokens) else _made(kind, tokens, chat_template)
        return None
    for kind, _ in _KINDS:
        if kind.name == name:
            if lacking := missing(tokens, kind.tokens):
                raise CheckpointError(
                    f"the tool-call parser {name!r} needs the token {lacking[0]}, which this model's tokenizer "
                    f"does not have; accepted: a parser that fits the model, or auto."
                )
            return _made(kind, tokens, chat_template)
    accepted = ", ".join(("auto", *TOOL_PARSERS))
    raise InvalidParameter("tool_call_parser", f"tool_call_parser is {name!r}; accepted: {accepted}.")


def _made(kind: Callable[..., ToolParser], tokens: Tokens, chat_template: str | None) -> ToolParser:
    if kind is not Mistral:
        return kind(tokens)
    return Mistral(tokens, chat_template if chat_template and CALLS in chat_template else None)


def missing(tokens: Tokens, texts: tuple[str, ...]) -> list[str]:
    return [text for text in texts if tokens.token_id(text) is None]
