"""Qwen3-Coder's tags: raw text values, their constraints, refusals and the reading of bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.structured_output.matcher import ConstraintRefused
from engine.tool_parsers import CallArguments, CallBegun, CallEnded, ParsedCall, ToolPlan, read_tools
from engine.tool_parsers.tagged_calls import tagged_call
from tests.engine.tool_parsers.samples import accepts, read, tool_parser


def plan(properties: dict[str, Any] | None = None, *, strict: bool = False, **more: Any) -> ToolPlan:
    """Of one tool `f`. Any: JSON."""
    parameters = {"type": "object", **({} if properties is None else {"properties": properties}), **more}
    function = {"name": "f", "parameters": parameters, "strict": strict}
    return tool_parser("qwen3_coder").plan(read_tools([{"type": "function", "function": function}]), "required")


def body(**values: str) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"\n<function=f>\n{tags}</function>\n"


def arguments(plan: ToolPlan, **values: str) -> Any:
    """Returns the arguments of a body with these values; the constraint must take it. Any: JSON."""
    assert accepts(plan.body, body(**values))
    calls, text = read(plan.parser(), [body(**values)])
    assert text == ""
    (call,) = calls
    return json.loads(call.arguments)


STRING, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        (STRING, "5", "5"),
        (STRING, "null", "null"),
        (STRING, ' a "b" \\ \n\n', ' a "b" \\ \n\n'),
        (STRING, "</parameter></function>\n</parameter", "</parameter></function>\n</parameter"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nulls", "nulls"),
        ({"type": ["string", "null"]}, "nul", "nul"),
        ({"type": ["string", "null"]}, "", ""),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/S"}, NULL]}, "x", "x"),
        ({"$ref": "#/$defs/E"}, "a", "a"),
        ({"allOf": [{"$ref": "#/$defs/E"}]}, "b", "b"),
        ({"enum": ["a", None]}, "null", None),
        ({"enum": ["null", "a"]}, "null", "null"),
        ({"const": "a"}, "a", "a"),
        (INTEGER, "5", 5),
        ({"type": "boolean"}, "true", True),
        ({"type": ["string", "integer"]}, '"5"', "5"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({}, '"x"', "x"),
        (True, "[1]", [1]),
        ({"enum": ["a", 5]}, '"a"', "a"),
        ({"type": "array", "items": STRING}, '["a", "b"]', ["a", "b"]),
        ({"type": "array", "items": {"$ref": "#/$defs/E"}}, '["a"]', ["a"]),
        ({"$ref": "#/properties/y"}, "5", 5),
        ({"type": "array", "items": {"$ref": "#"}}, '[{"x": []}]', [{"x": []}]),
    ],
)
def test_strings_are_raw_text_and_the_rest_is_json(schema: Any, raw: str, value: Any) -> None:
    defs: dict[str, Any] = {"$defs": {"S": STRING, "E": {"enum": ["a", "b"]}}}
    made = plan({"x": schema, "y": INTEGER}, **defs)
    assert arguments(made, x=raw) == {"x": value}


@pytest.mark.parametrize(
    ("schema", "raw"),
    [
        ({"enum": ["a", "b"]}, "c"),
        ({"$ref": "#/$defs/E"}, "c"),
        ({"anyOf": [{"const": "a"}, {"type": "null"}]}, "c"),
        ({"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, "a"),
        (INTEGER, '"5"'),
        (INTEGER, "5 "),
        ({"type": "array", "items": {"$ref": "#/$defs/E"}}, '["c"]'),
        ({"type": "array", "items": {"$ref": "#"}}, '[{"z": 1}]'),
    ],
)
def test_values_are_held_to_their_schema(schema: Any, raw: str) -> None:
    defs: dict[str, Any] = {"$defs": {"E": {"enum": ["a", "b"]}}}
    assert not accepts(plan({"x": schema}, **defs).body, body(x=raw))


def test_parameters_come_in_order_and_only_required_ones_must() -> None:
    made = plan({"a": STRING, "b": STRING, "c": INTEGER}, required=["b"])
    assert arguments(made, b="x") == {"b": "x"}
    assert arguments(made, a="", b="x", c="1") == {"a": "", "b": "x", "c": 1}
    for wrong in ({}, {"a": ""}, {"b": "", "a": ""}, {"b": "", "b2": ""}):
        assert not accepts(made.body, body(**wrong))


def test_a_required_parameter_that_is_not_listed_may_be_anything() -> None:
    assert arguments(plan({"a": STRING}, required=["b"]), b="[1]") == {"b": [1]}


def test_a_schema_that_lists_nothing_takes_parameters_of_any_name() -> None:
    assert arguments(plan(), anything="5", more="") == {"anything": "5", "more": ""}
    assert arguments(plan(additionalProperties=INTEGER), n="5") == {"n": 5}
    assert not accepts(plan(additionalProperties=INTEGER).body, body(n="x"))
    assert not accepts(plan({}).body, body(n="x"))


def test_a_schema_by_reference_lists_its_parameters() -> None:
    defs = {"A": {"properties": {"x": INTEGER, "in": {"$ref": "#/$defs/A"}}}}
    by_reference: dict[str, Any] = {"$ref": "#/$defs/A", "$defs": defs}
    made = plan(**by_reference)
    assert arguments(made, x="5", **{"in": '{"x": 1}'}) == {"x": 5, "in": {"x": 1}}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "^a"}, "pattern"),
        ({"type": "string", "minLength": 1}, "minLength"),
        ({"type": ["string", "null"], "maxLength": 9}, "maxLength"),
        ({"type": "string", "format": "date"}, "format"),
        ({"type": "string", "not": {"const": "a"}}, "not"),
        ({"anyOf": [{"type": "string", "pattern": "a"}, {"type": "null"}]}, "pattern"),
        ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "oneOf"),
    ],
)
def test_what_raw_text_cannot_be_held_to_is_refused_by_name_for_strict_tools_alone(schema: Any, keyword: str) -> None:
    with pytest.raises(ConstraintRefused, match=f"tool 'f': parameter 'x': {keyword} cannot be held"):
        plan({"x": schema}, strict=True)
    assert arguments(plan({"x": schema}), x="b") == {"x": "b"}


@pytest.mark.parametrize("keyword", ["anyOf", "allOf", "oneOf"])
def test_what_relates_parameters_is_refused_by_name_for_strict_tools_alone(keyword: str) -> None:
    more: dict[str, Any] = {keyword: [{"required": ["x"]}]}
    with pytest.raises(ConstraintRefused, match=f"tool 'f': {keyword} cannot be held among parameters"):
        plan({"x": STRING}, strict=True, **more)
    assert arguments(plan({"x": STRING}, **more), x="b") == {"x": "b"}


def test_a_strict_tool_whose_schema_can_be_held_is_taken() -> None:
    made = plan({"x": {"enum": ["a"]}, "y": {"type": "array", "minItems": 1}}, strict=True, required=["x", "y"])
    assert arguments(made, x="a", y="[1]") == {"x": "a", "y": [1]}


@pytest.mark.parametrize("key", ["a>b", "a\nb", "<a", ""])
def test_a_name_that_no_tag_can_hold_is_refused(key: str) -> None:
    with pytest.raises(ConstraintRefused, match="cannot stand in a tag"):
        plan({key: STRING})


def test_a_value_that_would_end_its_own_tag_is_no_choice() -> None:
    made = plan({"x": {"enum": ["a", "b\n</parameter>\nc"]}})
    assert arguments(made, x="a") == {"x": "a"}
    with pytest.raises(ConstraintRefused, match="none of its values"):
        plan({"x": {"enum": ["b\n</parameter>\nc"]}})


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        ("\n<function=g>\n<parameter=n>\n5\n</parameter>\n</function>\n", [ParsedCall("g", '{"n": "5"}')], ""),
        ("<function=f></function>", [ParsedCall("f", "{}")], ""),
        ("<function=f>\n<parameter=t>\nab\n</para", [ParsedCall("f", '{"t": "ab')], ""),
        ("<function=f>\n<parameter=n>\n12", [ParsedCall("f", '{"n": 12')], ""),
        ("<function=f>\n<parameter=n>\n12x\n</parameter>\n", [ParsedCall("f", '{"n": 12')], "x\n</parameter>\n"),
        ("<function=f>\n<parameter=n>\nTrue\n", [ParsedCall("f", '{"n": ')], "True\n"),
        ("<function=f>\n<parameter=t>\na\n</parameter>\noops", [ParsedCall("f", '{"t": "a"')], "oops"),
        ("<function=f>\n</function>\nand more", [ParsedCall("f", "{}")], "\nand more"),
        ("<function=f>\n<parameter=t> a", [ParsedCall("f", "{")], "\n<parameter=t> a"),
        ("<function=>\n</function>", [], "<function=>\n</function>"),
        ("<function=f", [], "<function=f"),
        ("\n<func f>", [], "\n<func f>"),
        ('{"name": "f", "arguments": {}}', [], '{"name": "f", "arguments": {}}'),
        (
            "<function=f>\n<parameter=t>\na\n</parameter>\n<parameter=t>\nb\n</parameter>\n</function>",
            [ParsedCall("f", '{"t": "a", "t": "b"}')],
            "",
        ),
    ],
)
def test_what_a_body_becomes(text: str, calls: list[ParsedCall], rest: str) -> None:
    made = plan({"t": STRING, "n": INTEGER})
    assert read(made.parser(), [text]) == (calls, rest)
    assert read(made.parser(), text) == (calls, rest)


def test_a_string_is_streamed_while_it_is_written() -> None:
    parser = plan({"t": STRING}).parser()
    assert parser.push("\n<function=f>\n<parameter=t>\n") == [CallBegun("f"), CallArguments("{")]
    assert parser.push('say "') == [CallArguments('"t": "say \\"')]
    assert parser.push("hi\n</par") == [CallArguments("hi")]
    assert parser.push("is\n") == [CallArguments("\\n</paris")]
    assert parser.push("</parameter>\n</function>\n") == [CallArguments('"}'), CallEnded()]


@given(st.text(st.sampled_from("\n</parmet>x")), st.integers(1, 5))
def test_raw_text_ends_at_the_first_closing_line(text: str, size: int) -> None:
    whole = f"<function=f>\n<parameter=t>\n{text}\n</parameter>\n</function>"
    value = (text + "\n</parameter>\n").partition("\n</parameter>\n")[0]
    calls, _ = read(tagged_call({}), [whole[i : i + size] for i in range(0, len(whole), size)])
    assert calls[0].arguments.startswith(json.dumps({"t": value})[:-1])
