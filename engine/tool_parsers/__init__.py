"""Tool parsers: the call formats of families of models, as constraints and as incremental parsers.

parser = choose_parser(tokenizer, tokenizer.chat_template) plan = parser.plan(read_tools(tools_json), "auto") bodies =
Bodies(plan.parser)          # then bodies.push(section, text) for body text, and bodies.end()
"""

from engine.tool_parsers.base import Tokens, ToolParser, ToolPlan
from engine.tool_parsers.detect import TOOL_PARSERS, choose_parser
from engine.tool_parsers.streaming import (
    Bodies,
    BodyParser,
    CallArguments,
    CallBegun,
    CallEnded,
    CallEvent,
    Malformed,
    ParsedCall,
    fold,
)
from engine.tool_parsers.tools import Named, ToolChoice, ToolSpec, read_choice, read_tools

__all__ = [
    "TOOL_PARSERS",
    "Bodies",
    "BodyParser",
    "CallArguments",
    "CallBegun",
    "CallEnded",
    "CallEvent",
    "Malformed",
    "Named",
    "ParsedCall",
    "Tokens",
    "ToolChoice",
    "ToolParser",
    "ToolPlan",
    "ToolSpec",
    "choose_parser",
    "fold",
    "read_choice",
    "read_tools",
]
