"""Tool parsers of the formats whose calls are JSON: Hermes, Llama 3 and 4, and Mistral.

- Hermes (also Qwen 2.5 and 3, SmolLM3, our own models): between `<tool_call>` and `</tool_call>`, on a line of its own,
  `{"name": "get_weather", "arguments": {"city": "Paris"}}`.
- Llama 3: an answer that is a call is nothing but one such object, with `parameters` for the arguments; the token
  `<|python_tag|>` may stand before it. There is never more than one call. As the object has no marker, an answer in
  free text may not begin with a brace, with or without white space in the same token.
- Llama 4: the same, but several objects may follow each other with nothing between, and the tokens `<|python_start|>`
  and `<|python_end|>` may stand before them.
- Mistral: the token `[TOOL_CALLS]`, then a JSON array of calls to the end of the answer. Later models write each call
  as `[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}`, and some of them an id after the name,
  `[CALL_ID]` and nine letters or digits. Their chat template says which.
- Harmony (gpt-oss): a message of the channel `commentary`,
  `<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}`. There is never more
  than one, and its end is the answer's. The answer in its place is one of the channel `final`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set

from engine.structured_output.layout import Layout
from engine.structured_output.spec import Constraint, ControlToken, Literal, Optional, Regex, Repeat, sequence
from engine.tool_parsers.base import BEGIN, END, Sections, Tokens, ToolPlan, arguments, offered, one_of
from engine.tool_parsers.json_calls import calls_in_a_row, list_of_calls, named_call, one_call
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
    before: tuple[str, ...] = (PYTHON_TAG,)  # tokens that may stand before a call

    def __init__(self, tokens: Tokens) -> None:
        self._breaks = frozenset(id for tag in self.before if (id := tokens.token_id(tag)) is not None)
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


PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


class Llama4Json(Llama3Json):
    name = "llama4_json"
    before = (PYTHON_START, PYTHON_END)

    def plan(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, parallel: bool = True, loose: Set[str] = frozenset()
    ) -> ToolPlan:
        """See `ToolParser`."""
        plan = super().plan(tools, choice, parallel, loose)
        if not parallel or isinstance(choice, Named):
            return plan
        return ToolPlan(plan.layout, Repeat(plan.body, ""), calls_in_a_row)


CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_LENGTH = 9


class Mistral:
    name = "mistral"
    tokens = (CALLS,)

    def __init__(self, tokens: Tokens, template: str | None = None) -> None:
        """The source of the chat `template` says which form the calls have; without one the tokens do."""
        self._begin = _id(tokens, CALLS)
        self._arguments = tokens.token_id(ARGUMENTS) if template is None or ARGUMENTS in template else None
        self._call_id = tokens.token_id(CALL_ID) if template is not None and CALL_ID in template else None

    def plan(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, parallel: bool = True, loose: Set[str] = frozenset()
    ) -> ToolPlan:
        """See `ToolParser`."""
        chosen = offered(tools, choice, loose)
        free, several = choice == "auto", parallel and not isinstance(choice, Named)
        if self._arguments is not None:
            call = one_of([sequence(tool.name, *self._before_arguments(), arguments(tool, loose)) for tool in chosen])
            length = 0 if self._call_id is None else _ID_LENGTH
            layout = Layout(begin=self._begin, free=free, several=several)
            return ToolPlan(layout, call, lambda: named_call("", "{", id_length=length))
        call = one_of(
            [
                sequence(f'{{"name": {json.dumps(tool.name)}, "arguments": ', arguments(tool, loose), "}")
                for tool in chosen
            ]
        )
        calls = Repeat(call, ", ") if several else call
        # SentencePiece tokenizers write a space after the token, the others none.
        body = sequence(Optional(Literal(" ")), "[", calls, "]")
        return ToolPlan(Layout(begin=self._begin, free=free), body, list_of_calls)

    def _before_arguments(self) -> list[Constraint]:
        """Returns what stands between a tool's name and its arguments."""
        assert self._arguments is not None
        if self._call_id is None:
            return [ControlToken(self._arguments)]
        made = Regex(f"[a-zA-Z0-9]{{{_ID_LENGTH}}}")
        return [ControlToken(self._call_id), made, ControlToken(self._arguments)]


CONSTRAIN, MESSAGE, CALL = "<|constrain|>", "<|message|>", "<|call|>"


class Harmony:
    name = "harmony"
    tokens = (CONSTRAIN, MESSAGE, CALL)

    def __init__(self, tokens: Tokens) -> None:
        self._constrain, self._message = _id(tokens, CONSTRAIN), _id(tokens, MESSAGE)
        self._commentary, self._final = tokens.encode("commentary"), tokens.encode("final")

    def plan(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, parallel: bool = True, loose: Set[str] = frozenset()
    ) -> ToolPlan:
        """See `ToolParser`. `parallel` changes nothing. The answer's channel is open before the layout begins."""
        begin, *header = self._commentary
        before = ControlToken(self._constrain), Literal("json"), ControlToken(self._message)
        bodies = [
            sequence(f" to=functions.{tool.name} ", *before, arguments(tool, loose))
            for tool in offered(tools, choice, loose)
        ]
        layout = Layout(
            begin=begin, header=tuple(header), text_header=(*self._final, self._message), free=choice == "auto"
        )
        return ToolPlan(layout, one_of(bodies), lambda: named_call(" to=functions.", " json{"))


def _id(tokens: Tokens, token: str) -> int:
    """Raises ValueError where there is no such token."""
    if (id := tokens.token_id(token)) is None:
        raise ValueError(f"{token} is not a token")
    return id
