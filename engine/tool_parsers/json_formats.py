"""Tool parsers of the formats whose calls are JSON: Hermes, Llama 3 and Mistral.

- Hermes (also Qwen 2.5 and 3, SmolLM3, our own models): between `<tool_call>` and `</tool_call>`, on a line of its own,
  `{"name": "get_weather", "arguments": {"city": "Paris"}}`.
- Llama 3: an answer that is a call is nothing but one such object, with `parameters` for the arguments; the token
  `<|python_tag|>` may stand before it. There is never more than one call. As the object has no marker, an answer in
  free text may not begin with a brace, with or without white space in the same token.
- Mistral: the token `[TOOL_CALLS]`, then a JSON array of calls to the end of the answer. Later tokenizers write
  `[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}`: a control token inside a body, which a layout cannot express. Such
  a model's tools are refused rather than forced into another format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set

from engine.errors import InvalidParameter
from engine.structured_output.layout import Layout
from engine.structured_output.spec import Literal, Optional, Repeat, sequence
from engine.tool_parsers.base import BEGIN, END, Sections, Tokens, ToolPlan, arguments, offered, one_of
from engine.tool_parsers.json_calls import list_of_calls, one_call
from engine.tool_parsers.tools import Named, ToolChoice, ToolSpec


class Hermes:
    name = "hermes"
    tokens = (BEGIN, END)

    def __init__(self, tokens: Tokens) -> None:
        self._sections = Sections.of(tokens)

    def plan(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, parallel: bool = True, loose: Set[str] = frozenset()
    ) -> ToolPlan:
        """See `ToolParser`."""
        bodies = [
            sequence(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ', arguments(tool, loose), "}\n")
            for tool in offered(tools, choice, loose)
        ]
        return ToolPlan(self._sections.layout(choice, parallel), one_of(bodies), one_call)


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
        self, tools: Sequence[ToolSpec], choice: ToolChoice, parallel: bool = True, loose: Set[str] = frozenset()
    ) -> ToolPlan:
        """See `ToolParser`. `parallel` changes nothing."""
        bodies = [
            sequence(f'{{"name": {json.dumps(tool.name)}, "parameters": ', arguments(tool, loose), "}")
            for tool in offered(tools, choice, loose)
        ]
        free = choice == "auto"
        layout = Layout(free=free, openers=self._openers if free else frozenset(), breaks=self._breaks)
        return ToolPlan(layout, one_of(bodies), one_call)


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
        self, tools: Sequence[ToolSpec], choice: ToolChoice, parallel: bool = True, loose: Set[str] = frozenset()
    ) -> ToolPlan:
        """See `ToolParser`."""
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
