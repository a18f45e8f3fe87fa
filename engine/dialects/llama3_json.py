"""Llama 3: an answer that is a call is nothing but one JSON object, with `parameters` for the arguments.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

The token `<|python_tag|>` may stand before it. There is never more than one call. As the object has no marker, an
answer in free text may not begin with a brace, with or without white space in the same token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set

from engine.constrain.layout import Layout
from engine.constrain.spec import sequence
from engine.dialects.dialect import Tokens, ToolPlan, arguments, offered, one_of
from engine.dialects.json_calls import one_call
from engine.dialects.tools import Tool, ToolChoice

PYTHON_TAG = "<|python_tag|>"


class Llama3Json:
    name = "llama3_json"
    tokens = ()

    def __init__(self, tokens: Tokens) -> None:
        tag = tokens.token_id(PYTHON_TAG)
        self._breaks = frozenset() if tag is None else frozenset({tag})
        self._openers = frozenset(
            id
            for id in range(tokens.vocab_size)
            if tokens.token_bytes(id).lstrip().startswith(b"{") and not tokens.is_special(id)
        )

    def plan(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool = True, loose: Set[str] = frozenset()
    ) -> ToolPlan:
        """See `Dialect`. `parallel` changes nothing."""
        bodies = [
            sequence(f'{{"name": {json.dumps(tool.name)}, "parameters": ', arguments(tool, loose), "}")
            for tool in offered(tools, choice, loose)
        ]
        free = choice == "auto"
        layout = Layout(free=free, openers=self._openers if free else frozenset(), breaks=self._breaks)
        return ToolPlan(layout, one_of(bodies), one_call)
