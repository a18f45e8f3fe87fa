"""What the dialects' tests share: calls as models' templates write them, a vocabulary of bytes, and BFCL's tools.

The templates are cut down to the assistant's calls; white space, key order and markers are those of the models' own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from engine.chat_template import ChatTemplate
from engine.constrain.guidance import Guidance
from engine.constrain.spec import Constraint
from engine.constrain.vocabulary import Vocabulary
from engine.dialects import Call, CallArguments, CallEvent, Dialect, Malformed, choose, fold
from tests.known_answers import shared

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
MISTRAL = """{%- for m in messages %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}
    {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
    {{- ', ' if not loop.last else ']' }}{%- endfor %}{%- endfor %}"""
TEMPLATES = {"hermes": HERMES, "qwen3_coder": QWEN3_CODER, "llama3_json": LLAMA3, "mistral": MISTRAL}


class ByteTokens:
    """A tokenizer of 256 bytes, two kinds of line break and some control tokens."""

    TEXTS = (b"\n\n", b'{"', b" {", b"\n{", b"{}")
    CONTROL = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<eos>")

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


TOKENS = ByteTokens()


@lru_cache
def dialect(name: str) -> Dialect:
    found = choose(TOKENS, TEMPLATES[name])
    assert found is not None
    assert found.name == name
    return found


@lru_cache(maxsize=1)
def byte_backend() -> Guidance:
    eos = TOKENS.token_id("<eos>")
    assert eos is not None
    tokens = tuple(TOKENS.texts) + (b"",) * len(TOKENS.control)
    return Guidance(Vocabulary(tokens, (eos,), lambda text: list(text.encode())))


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the text, byte by byte, is one that the constraint holds to."""
    matcher = byte_backend().compile(constraint).matcher()
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.can_end()


@lru_cache
def _template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {})


def rendered(name: str, calls: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """The bodies that the dialect's template writes for these calls."""
    tool_calls = [{"function": {"name": function, "arguments": arguments}} for function, arguments in calls]
    text = _template(name).render(
        [{"role": "assistant", "tool_calls": tool_calls}], tools=None, add_generation_prompt=False, variables={}
    )
    if name == "mistral":
        return [text.removeprefix("[TOOL_CALLS]")]
    if name == "llama3_json":
        return [text.partition("\n\n")[2]]
    assert text.startswith("<tool_call>")
    return [part.partition("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]


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


def read(parser: Any, pieces: Iterable[str]) -> tuple[list[Call], str]:
    """Any: a parser of a body."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return fold([*events, *parser.end()])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=5)

BFCL_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
BFCL_SETS = ("simple_python", "multiple", "parallel", "live_simple", "irrelevance")


def bfcl_schema(schema: Any) -> Any:
    """BFCL's own types as JSON Schema's; what may be anything has no type. Any: JSON."""
    if isinstance(schema, list):
        return [bfcl_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {
        key: {name: bfcl_schema(part) for name, part in value.items()} if key == "properties" else bfcl_schema(value)
        for key, value in schema.items()
        if not (key == "type" and value == "any")
    }
    if isinstance(result.get("type"), str):
        result["type"] = BFCL_TYPES.get(result["type"], result["type"])
    return result


def bfcl_requests() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each question's id and its tools in OpenAI's form. A few names have spaces or the like, which nothing accepts."""
    for name in BFCL_SETS:
        for line in shared(f"bfcl/{name}.jsonl").read_text(encoding="utf-8").splitlines():
            question = json.loads(line)
            functions = [
                {"name": f["name"], "description": f["description"], "parameters": bfcl_schema(f["parameters"])}
                for f in question["function"]
            ]
            yield question["id"], [{"type": "function", "function": function} for function in functions]
