"""Hypothesis strategies for the fields of forms and tools, as clients could fill them: sound, half sound and not."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Any_ = st.SearchStrategy[Any]

small: Any_ = st.sampled_from(
    [None, True, False, 0, 1, -1, 0.5, 10**30, "", "a", "a.b", "object", "ü\n", [], {}, [1], ["a"], {"a": 1}]
)  # fmt: skip
anything: Any_ = st.recursive(
    small, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=4), part, max_size=3)
)
_KEYWORDS = (
    "type", "properties", "required", "additionalProperties", "items", "enum", "const", "pattern", "minLength", "$ref",
    "maxLength", "minimum", "maximum", "multipleOf", "minItems", "maxItems", "anyOf", "oneOf", "allOf", "not", "$defs",
    "format", "patternProperties", "propertyNames", "if", "then", "default", "title", "x-guidance", "prefixItems",
)  # fmt: skip
_types = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null"])


def _schema_of(parts: Any_) -> Any_:
    by_name = st.dictionaries(st.sampled_from(["a", "b", "ü", ""]), parts, max_size=3)
    keywords: dict[str, Any_] = {
        "type": _types | st.lists(_types, min_size=1, max_size=2),
        "properties": by_name,
        "$defs": by_name,
        "required": st.lists(st.sampled_from(["a", "b", "c"]), max_size=2),
        "items": parts,
        "additionalProperties": parts | st.booleans(),
        "enum": st.lists(small, max_size=3),
        "const": small,
        "not": parts,
        "anyOf": st.lists(parts, max_size=3),
        "oneOf": st.lists(parts, max_size=3),
        "allOf": st.lists(parts, max_size=2),
        "pattern": st.sampled_from(["a+", "^[ab]{2}$", "(", "(?=a)", "\\d", ""]),
        "format": st.sampled_from(["date", "email", "uuid", "nonsense"]),
        "minLength": st.integers(-1, 9),
        "maxItems": st.integers(0, 9),
        "minimum": st.integers(-9, 9),
        "maximum": st.integers(-9, 9) | st.floats(-9, 9),
        "multipleOf": st.sampled_from([0, 1, 0.1]),
        "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/x", "http://x/y", "a b", ""]),
    }
    sound = st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: keywords[name] for name in names})
    )
    return sound | st.dictionaries(st.sampled_from(_KEYWORDS), parts | small, max_size=3)


schemas: Any_ = st.recursive(st.just({}), _schema_of, max_leaves=8)
_named_schema = st.fixed_dictionaries({}, optional={"schema": schemas | anything, "name": small, "strict": small})
formats: Any_ = st.fixed_dictionaries(
    {"type": st.sampled_from(["json_schema", "json_object", "text"]) | small}, optional={"json_schema": _named_schema}
)
_patterns = st.text(alphabet="ab.*+?()[]{}|\\^$-0,1dDwp", max_size=12) | st.sampled_from(["(a{0,50}){0,50}", "[^a]"])
_grammars = st.text(alphabet='start: "a"|/.\n<>%{}', max_size=25) | st.sampled_from(
    [
        'start: "a" start | "b"',
        'start: start "a"',
        "start: /a+/ /a+/",
        "start: x\nx: start",
        'start: ""',
        "start: <[0]>",
    ]
)
forms: dict[str, Any_] = {
    "response_format": formats | anything,
    "guided_json": schemas | schemas.map(json.dumps) | anything,
    "guided_regex": _patterns | anything,
    "guided_choice": st.lists(st.text(max_size=5), max_size=4) | anything,
    "guided_grammar": _grammars | anything,
}
_function = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", "a-b", "ü", ""]) | small},
    optional={"parameters": schemas | anything, "strict": st.booleans() | small, "description": small},
)
_tool = st.fixed_dictionaries({"type": st.just("function"), "function": _function})
_called = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", ""]), "arguments": anything.map(json.dumps) | st.text(max_size=5)}
)
_call = st.fixed_dictionaries({"id": st.sampled_from(["x", "y"]), "type": st.just("function"), "function": _called})
_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.sampled_from(["hi", None, 5])},
    optional={
        "tool_calls": st.lists(_call | anything, max_size=2),
        "tool_call_id": st.sampled_from(["x", "y"]) | small,
        "reasoning_content": small,
    },
)
_saying: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"role": st.just("assistant"), "tool_calls": st.lists(_call, min_size=1, max_size=1)}
)
_turns = _saying.map(
    lambda said: [
        {"role": "user", "content": "hi"}, said,
        {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "1"},
    ]
)  # fmt: skip
tools: dict[str, Any_] = {
    "tools": st.lists(_tool, max_size=3) | st.lists(_tool | anything, max_size=3) | anything,
    "tool_choice": st.sampled_from(["auto", "none", "required"])
    | st.sampled_from(["f", "g"]).map(lambda name: {"type": "function", "function": {"name": name}})
    | anything,
    "parallel_tool_calls": st.booleans() | small,
    "messages": _turns | st.lists(_message, min_size=1, max_size=4),
}
