"""Hermes, Qwen 2.5 and 3, SmolLM3 and our own models: each call is a section with a JSON object on a line of its own.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set

from engine.constrain.spec import sequence
from engine.dialects.dialect import Tokens, ToolPlan, arguments, offered, one_of
from engine.dialects.json_calls import one_call
from engine.dialects.sections import BEGIN, END, Sections
from engine.dialects.tools import Tool, ToolChoice


class Hermes:
    name = "hermes"
    tokens = (BEGIN, END)

    def __init__(self, tokens: Tokens) -> None:
        self._sections = Sections.of(tokens)

    def plan(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool = True, loose: Set[str] = frozenset()
    ) -> ToolPlan:
        """See `Dialect`."""
        bodies = [
            sequence(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ', arguments(tool, loose), "}\n")
            for tool in offered(tools, choice, loose)
        ]
        return ToolPlan(self._sections.layout(choice, parallel), one_of(bodies), one_call)
