"""Shared by the tool parsers' tests: calls as models' templates write them, and a vocabulary of bytes.

The templates are cut down to the assistant's calls; white space, key order and markers are those of the models' own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from engine.model.chat_template import ChatTemplate
from engine.structured_output.llguidance_backend import Guidance
from engine.structured_output.matcher import Compiled, words
from engine.structured_output.spec import Constraint
from engine.structured_output.vocabulary import Vocabulary
from engine.tool_parsers import CallArguments, CallEvent, Malformed, ParsedCall, ToolParser, choose_parser, fold

HERMES = """{%- for m in messages %}{%- for call in m.tool_calls %}
    {{- '\\n' if not loop.first }}
    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
    {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{%- endfor %}"""
QWEN3_CODER = """{%- for m in messages %}{%- for call in m.tool_calls %}
    {{- '\\n' if not loop.first }}{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
    {%- for key, value in call.function.arguments | items %}
        {{- '<parameter=' + key + '>\\n' }}
        {{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
        {{- '\\n</parameter>\\n' }}
    {%- endfor %}{{- '</function>\\n</tool_call>' }}
{%- endfor %}{%- endfor %}"""
LLAMA3 = """{%- for m in messages %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
    {%- set call = m.tool_calls[0].function %}{{- '{"name": "' + call.name + '", ' }}
    {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}{%- endfor %}"""
LLAMA4 = """{%- for m in messages %}{{- '<|header_start|>assistant<|header_end|>\\n\\n<|python_start|><|python_end|>' }}
    {%- for call in m.tool_calls %}{{- '{"name": "' + call.function.name + '", "parameters": ' }}
    {{- call.function.arguments | tojson + '}' }}{%- endfor %}{%- endfor %}"""
MISTRAL = """{%- for m in messages %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}
    {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
    {{- ', ' if not loop.last else ']' }}{%- endfor %}{%- endfor %}"""
MISTRAL_ARGS = """{%- for m in messages %}{%- for call in m.tool_calls %}
    {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}{%- endfor %}"""
MISTRAL_IDS = MISTRAL_ARGS.replace("'[ARGS]'", "'[CALL_ID]a1B2c3D4e[ARGS]'")
HARMONY = """{%- for m in messages %}{%- set call = m.tool_calls[0].function %}
    {{- '<|channel|>commentary to=functions.' + call.name + ' <|constrain|>json<|message|>' }}
    {{- call.arguments | tojson + '<|call|>' }}{%- endfor %}"""
GEMMA4 = """{%- macro written(value) -%}
    {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is mapping -%}{{ '{' }}{%- for key, each in value | dictsort -%}
        {{ key }}:{{ written(each) }}{{ ',' if not loop.last }}{%- endfor -%}{{ '}' }}
    {%- elif value is sequence -%}{{ '[' }}{%- for each in value -%}
        {{ written(each) }}{{ ',' if not loop.last }}{%- endfor -%}{{ ']' }}
    {%- else -%}{{ value }}{%- endif -%}
{%- endmacro %}{%- for m in messages %}{%- for call in m.tool_calls %}
    {{- '<|tool_call>call:' + call.function.name + written(call.function.arguments) + '<tool_call|>' }}
{%- endfor %}{%- endfor %}"""
TEMPLATES = {
    "hermes": HERMES, "qwen3_coder": QWEN3_CODER, "llama3_json": LLAMA3, "llama4_json": LLAMA4, "mistral": MISTRAL,
    "mistral args": MISTRAL_ARGS, "mistral ids": MISTRAL_IDS, "harmony": HARMONY,
    "gemma4": GEMMA4,
}  # fmt: skip


class ByteTokens:
    """A tokenizer of 256 bytes, two kinds of line break and some control tokens."""

    TEXTS = (b"\n\n", b'{"', b" {", b"\n{", b"{}")
    CONTROL = (
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<eos>",
        "[ARGS]", "[CALL_ID]", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>",
        "<|python_start|>", "<|python_end|>", "<|tool_call>", "<tool_call|>", '<|"|>',
    )  # fmt: skip

    def __init__(self, control: Sequence[str] = CONTROL) -> None:
        self.control = control
        self.texts = [bytes([byte]) for byte in range(256)] + list(self.TEXTS)
        self.vocab_size = len(self.texts) + len(control)

    def token_id(self, token: str) -> int | None:
        return len(self.texts) + self.control.index(token) if token in self.control else None

    def token_bytes(self, id: int) -> bytes:
        return self.texts[id] if id < len(self.texts) else self.control[id - len(self.texts)].encode()

    def is_special(self, id: int) -> bool:
        return id >= len(self.texts)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Returns a token a byte; with `special` control tokens are such."""
        if not special:
            return list(text.encode())
        parts = re.split("(" + "|".join(map(re.escape, self.control)) + ")", text)
        found = [(self.token_id(part), part) for part in parts]
        return [each for id, part in found for each in (part.encode() if id is None else (id,))]

    def without_control(self, text: str) -> str:
        return re.sub("|".join(map(re.escape, self.control)), "", text)


TOKENS = ByteTokens()


@lru_cache
def tool_parser(name: str) -> ToolParser:
    found = choose_parser(TOKENS, TEMPLATES[name])
    assert found is not None
    assert found.name == name.split()[0]
    return found


@lru_cache(maxsize=1)
def byte_backend() -> Guidance:
    eos = TOKENS.token_id("<eos>")
    assert eos is not None
    tokens = tuple(TOKENS.texts) + (b"",) * len(TOKENS.control)
    return Guidance(Vocabulary(tokens, (eos,), lambda text: list(text.encode())))


@lru_cache(maxsize=8)
def _compiled(constraint: Constraint) -> Compiled:
    return byte_backend().compile(constraint)


def accepts(constraint: Constraint, text: str) -> bool:
    """Returns whether the text, byte by byte, is one that the constraint holds to."""
    matcher = _compiled(constraint).matcher()
    row = np.empty(words(TOKENS.vocab_size), dtype=np.int32)
    for token in TOKENS.encode(text, special=True):
        matcher.fill(row)
        shown = bool(row[token >> 5] >> (token & 31) & 1)
        if matcher.accept(token) is not shown:
            raise AssertionError(f"{token} is shown: {shown}, and accepted: {not shown}")
        if not shown:
            return False
    return matcher.can_end()


@lru_cache
def _template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {})


def rendered(name: str, calls: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """The bodies that the tool parser's template writes for these calls."""
    tool_calls = [{"function": {"name": function, "arguments": arguments}} for function, arguments in calls]
    text = _template(name).render(
        [{"role": "assistant", "tool_calls": tool_calls}], tools=None, add_generation_prompt=False, variables={}
    )
    if name == "harmony":
        return [text.removeprefix("<|channel|>commentary").removesuffix("<|call|>")]
    if name in ("mistral args", "mistral ids"):
        return text.split("[TOOL_CALLS]")[1:]
    if name == "mistral":
        return [text.removeprefix("[TOOL_CALLS]")]
    if name == "llama3_json":
        return [text.partition("\n\n")[2]]
    if name == "llama4_json":
        return [text.partition("<|python_end|>")[2]]
    if name == "gemma4":
        return [part.removesuffix("<tool_call|>") for part in text.split("<|tool_call>")[1:]]
    assert text.startswith("<tool_call>")
    return [part.partition("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]


def written(name: str, calls: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """The bodies as a parser reads them: a detokenizer leaves out control tokens, and keeps arguments spelled alike."""
    if name == "gemma4":  # whose layout shows them
        return rendered(name, calls)
    aliases = {control: f"~control~{at}~" for at, control in enumerate(TOKENS.control)}
    aliased = []
    for function, arguments in calls:
        text = _replaced(json.dumps(arguments, ensure_ascii=False), aliases)
        aliased.append((function, json.loads(text)))
    meant = {alias: control for control, alias in aliases.items()}
    return [_replaced(TOKENS.without_control(body), meant) for body in rendered(name, aliased)]


def _replaced(text: str, names: Mapping[str, str]) -> str:
    return re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], text)


def joined(events: Iterable[CallEvent]) -> list[CallEvent]:
    """Neighbouring fragments made one, so that events can be compared however they were cut."""
    result: list[CallEvent] = []
    for event in events:
        match result[-1:], event:
            case [CallArguments(before)], CallArguments(more):
                result[-1] = CallArguments(before + more)
            case [Malformed(before)], Malformed(more):
                result[-1] = Malformed(before + more)
            case _:
                result.append(event)
    return result


def read(parser: Any, pieces: Iterable[str]) -> tuple[list[ParsedCall], str]:
    """Any: a parser of a body."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return fold([*events, *parser.end()])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=5)
