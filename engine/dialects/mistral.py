"""Mistral: the token `[TOOL_CALLS]`, then a JSON array of calls to the end of the answer.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, …]

Later tokenizers have the token `[ARGS]` and write `[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}`: a control token
inside a body, which a layout cannot tell. Such a model's tools are refused rather than held to another format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set

from engine.constrain.layout import Layout
from engine.constrain.spec import Literal, Optional, Repeat, sequence
from engine.dialects.dialect import Tokens, ToolPlan, arguments, offered, one_of
from engine.dialects.json_calls import list_of_calls
from engine.dialects.tools import Named, Tool, ToolChoice
from engine.errors import InvalidParameter

CALLS, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
NEWER_FORM = f"this model writes calls as {CALLS}name{ARGUMENTS}{{…}}, which is not supported"


class Mistral:
    name = "mistral"
    tokens = (CALLS,)

    def __init__(self, tokens: Tokens) -> None:
        begin = tokens.token_id(CALLS)
        if begin is None:
            raise ValueError(f"{CALLS} is not a token")
        self._begin = begin
        self._newer = tokens.token_id(ARGUMENTS) is not None

    def plan(
        self, tools: Sequence[Tool], choice: ToolChoice, parallel: bool = True, loose: Set[str] = frozenset()
    ) -> ToolPlan:
        """See `Dialect`."""
        chosen = offered(tools, choice, loose)
        if self._newer:
            raise InvalidParameter(
                "tools",
                f"{NEWER_FORM}; accepted: a request without tools, or a model whose tokenizer has no {ARGUMENTS}.",
            )
        call = one_of(
            [
                sequence(f'{{"name": {json.dumps(tool.name)}, "arguments": ', arguments(tool, loose), "}")
                for tool in chosen
            ]
        )
        calls = Repeat(call, ", ") if parallel and not isinstance(choice, Named) else call
        # SentencePiece tokenizers write a space after the token, the others none.
        body = sequence(Optional(Literal(" ")), "[", calls, "]")
        return ToolPlan(Layout(begin=self._begin, free=choice == "auto"), body, list_of_calls)
