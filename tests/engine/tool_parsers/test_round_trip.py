"""Tests what a template writes of a call, the tool parser's constraint takes and its parser reads back, for any
arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.detokenizer import Detokenizer
from engine.tool_parsers import Bodies, CallEvent, choose_parser, fold, read_tools
from tests.engine.structured_output.sources import guidance, pebble
from tests.engine.tool_parsers.samples import (
    TEMPLATES,
    accepts,
    json_objects,
    json_values,
    read,
    rendered,
    tool_parser,
    written,
)

names = st.from_regex(r"[a-zA-Z0-9_.-]{1,64}", fullmatch=True)
OPEN = {"type": "object"}


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("qwen3_coder", "gemma4")])
@given(function=names, arguments=json_objects)
def test_json_arguments_come_back_as_they_were(name: str, function: str, arguments: dict[str, Any]) -> None:
    plan = tool_parser(name).plan(read_tools([tool(function, OPEN)]), "required")
    (body,) = written(name, [(function, arguments)])
    calls, text = read(plan.parser(), [body])
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [(function, arguments)]
    assert text == ""


# Control characters that JSON and raw text both write plainly; no `</parameter>` on a line of its own.
raw = st.text().filter(lambda text: "\n</parameter>" not in "\n" + text and text != "null")
written_values = {
    "string": raw,
    "nullable": raw,
    "number": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "object": st.dictionaries(st.text(), json_values, max_size=3),
    "array": st.lists(json_values, max_size=3),
}
TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "string": {"type": "string"},
        "nullable": {"type": ["string", "null"]},
        "number": {"type": "number"},
        "object": {"type": "object"},
        "array": {"type": "array"},
    },
}


@given(function=names, arguments=st.fixed_dictionaries({}, optional=written_values))
def test_tagged_arguments_come_back_as_they_were(function: str, arguments: dict[str, Any]) -> None:
    plan = tool_parser("qwen3_coder").plan(read_tools([tool(function, TYPED)]), "required")
    (body,) = rendered("qwen3_coder", [(function, arguments)])
    calls, text = read(plan.parser(), [body])
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [(function, arguments)]
    assert text == ""


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(data=st.data())
def test_the_constraint_takes_what_the_template_writes(name: str, data: st.DataObject) -> None:
    tools = read_tools([tool("first", TYPED), tool("second", TYPED)])
    arguments = st.fixed_dictionaries(
        {},
        optional={
            "string": st.sampled_from(["", "Paris", 'a "b" \\ c\n', "日本語 🙂"]),
            "nullable": st.just("two\n\nlines"),
            "number": st.integers(-(10**9), 10**9) | st.sampled_from([0.5, -2.25]),
            "object": st.dictionaries(st.sampled_from(["a", "b c"]), st.none() | st.booleans(), max_size=2),
            "array": st.lists(st.sampled_from([1, "x", [], {}]), max_size=3),
        },
    )
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["first", "second"]), arguments), min_size=1, max_size=3))
    calls = calls[:1] if name in ("llama3_json", "harmony") else calls
    calls = [(f, {key: a[key] for key in TYPED["properties"] if key in a}) for f, a in calls]  # keys in order
    plan = tool_parser(name).plan(tools, "required")
    for body in rendered(name, calls):
        assert accepts(plan.body, body)


def test_the_bundled_models_template_writes_what_its_constraint_takes() -> None:
    """The model is trained on what the template writes: token by token, that must be what the constraint allows."""
    tokenizer = pebble()
    spoken = choose_parser(tokenizer, tokenizer.chat_template)
    assert spoken is not None
    assert spoken.name == "hermes"
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    plan = spoken.plan(read_tools([tool("get_weather", schema), tool("now", None)]), "auto")
    calls = [("get_weather", {"city": 'Zürich "HB"', "days": 3}), ("now", {}), ("get_weather", {})]
    message = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls],
    }
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "?"}, message], add_generation_prompt=False)
    compiled = guidance("pebble").compile(plan.body)
    answer, detokenizer, section, matcher = Bodies(plan.parser), Detokenizer(tokenizer), 0, None
    events: list[CallEvent] = []
    between: list[int] = []
    for id in ids:
        if id == plan.layout.begin:
            section, matcher = section + 1, compiled.matcher()
        elif id == plan.layout.end:
            assert matcher is not None
            assert matcher.can_end()
            matcher, between = None, []
        elif matcher is not None:
            assert matcher.accept(id), tokenizer.token_text(id)
            events += answer.push(section, detokenizer.push([id]))
        else:
            between.append(id)
            if section in (1, 2):
                assert id in plan.layout.breaks
    events += answer.end()
    assert [(call.name, json.loads(call.arguments)) for call in fold(events)[0]] == calls
    assert tokenizer.decode(between, skip_special=False) == "<|im_end|>\n"


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
