"""Tools and the choice among them, as OpenAI's clients send them, and refusals by the path of the field."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine.errors import InvalidParameter
from engine.tool_parsers import Named, ToolSpec, read_choice, read_tools

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": CITY, "strict": True},
}


def function(**fields: Any) -> list[dict[str, Any]]:
    """Any: JSON."""
    return [{"type": "function", "function": {"name": "f", **fields}}]


def test_a_tool_is_read_with_all_its_fields() -> None:
    (tool,) = read_tools([WEATHER])
    assert tool == ToolSpec("get_weather", "The weather.", CITY, True)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}])
def test_a_tool_without_parameters_takes_the_empty_object_alone(parameters: Any) -> None:
    (tool,) = read_tools(function(parameters=parameters))
    assert Draft202012Validator(tool.arguments).is_valid({})
    assert not Draft202012Validator(tool.arguments).is_valid({"x": 1})


def test_arguments_are_an_object_whatever_else_the_schema_allows() -> None:
    schemas: tuple[dict[str, Any], ...] = (  # Any: JSON
        {"properties": {"x": {}}}, {"type": ["object", "null"]}, {"anyOf": [{"type": "object"}, {}]},
    )  # fmt: skip
    for parameters in schemas:
        (tool,) = read_tools(function(parameters=parameters))
        assert Draft202012Validator(tool.arguments).is_valid({})
        assert not Draft202012Validator(tool.arguments).is_valid(None)


DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"properties": {"x": DEEP}}


@pytest.mark.parametrize(
    ("tools", "path", "says"),
    [
        ({}, "tools", "a list of tools"),
        ("f", "tools", "a list of tools"),
        ([5], "tools[0]", "an object with type, function"),
        ([{"type": "custom", "custom": {}}], "tools[0].custom", "unknown field 'custom'"),
        ([{"type": "web_search"}], "tools[0].type", '"function"'),
        ([{"type": "function"}], "tools[0].function", "an object with name, description, parameters, strict"),
        ([WEATHER, {"type": "function", "function": {}}], "tools[1].function.name", "1 to 64 letters"),
        (function(name="get weather"), "tools[0].function.name", "'get weather'; accepted: 1 to 64 letters"),
        (function(name="f\n"), "tools[0].function.name", "1 to 64 letters"),
        (function(name="x" * 65), "tools[0].function.name", "1 to 64 letters"),
        ([WEATHER, WEATHER], "tools[1].function.name", "unique names"),
        (function(description=["a"]), "tools[0].function.description", "a string"),
        (function(strict="yes"), "tools[0].function.strict", "true or false"),
        (function(returns={}), "tools[0].function.returns", "unknown field 'returns'"),
        (function(parameters=[]), "tools[0].function.parameters", "a JSON Schema of an object"),
        (function(parameters={"type": "array"}), "tools[0].function.parameters.type", '"object"'),
        (function(parameters={"type": ["string"]}), "tools[0].function.parameters.type", '"object"'),
        (function(parameters={"properties": []}), "tools[0].function.parameters.properties", "schemas by name"),
        (function(parameters={"properties": {"x": 5}}), "tools[0].function.parameters.properties.x", "a JSON Schema"),
        (function(parameters={"required": "x"}), "tools[0].function.parameters.required", "a list of names"),
        (function(parameters={"anyOf": [{"enum": 1}]}), "tools[0].function.parameters.anyOf[0].enum", "list of values"),
        (function(parameters={"anyOf": {}}), "tools[0].function.parameters.anyOf", "a list of schemas"),
        (function(parameters={"$defs": {"a": []}}), "tools[0].function.parameters.$defs.a", "a JSON Schema"),
        (function(parameters={"dependencies": {"a": 1}}), "tools[0].function.parameters.dependencies.a", "JSON Schema"),
        (function(parameters=DEEP), "tools[0].function.parameters", "at most 100 levels"),
    ],
)  # fmt: skip
def test_what_is_not_accepted_is_named_by_its_path(tools: Any, path: str, says: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        read_tools(tools)
    assert refused.value.name == path
    assert says in str(refused.value)
    assert "accepted" in str(refused.value)


def test_a_choice_is_read() -> None:
    tools = read_tools([WEATHER])
    assert read_choice(None, tools) == "auto"
    assert read_choice(None, ()) == "none"
    assert [read_choice(choice, tools) for choice in ("auto", "none", "required")] == ["auto", "none", "required"]
    assert read_choice({"type": "function", "function": {"name": "get_weather"}}, tools) == Named("get_weather")


@pytest.mark.parametrize(
    ("choice", "path", "says"),
    [
        ("any", "tool_choice", '"auto", "none", "required" or'),
        ({"type": "function", "name": "get_weather"}, "tool_choice", '"auto", "none"'),
        ({"type": "allowed_tools", "allowed_tools": {}}, "tool_choice", '"auto", "none"'),
        ({"type": "function", "function": {"name": "f"}}, "tool_choice.function.name", "'f'; accepted: get_weather"),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_met_is_refused(choice: Any, path: str, says: str) -> None:
    with pytest.raises(InvalidParameter, match=".") as refused:
        read_choice(choice, read_tools([WEATHER]))
    assert refused.value.name == path
    assert says in str(refused.value)


def test_a_call_cannot_be_required_where_there_are_no_tools() -> None:
    with pytest.raises(InvalidParameter, match="at least one tool"):
        read_choice("required", ())
