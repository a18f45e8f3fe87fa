"""Tools that MCP servers offer, taken into the registry; and the settings that an operator gives."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from mcp.types import Tool as Offered
from pydantic import ValidationError

from tools.errors import ToolError
from tools.mcp.mcp_client import McpServer
from tools.mcp.mcp_settings import McpSettings
from tools.mcp.offers import DESCRIPTION, MAX_COUNT, SCHEMA, files_of, tools_of
from tools.registry import Registry
from tools.tool import tool


def offered(name: str = "look", **kw: Any) -> Offered:
    return Offered(name=name, input_schema=kw.pop("input_schema", {"type": "object"}), **kw)


def taken(*each: Offered, names: set[str] = frozenset(), **settings: Any) -> Any:  # type: ignore[assignment]
    known = McpSettings(**({"command": ("x",)} | settings))

    async def call(*_: Any) -> Any:
        raise ToolError("not here")

    return tools_of(each, known, "srv", "mcp srv", names, call)


def test_a_name_that_is_taken_stands_after_the_server_s() -> None:
    made = taken(offered("look"), offered("look"), offered("see things!"), offered("日本"), names={"look"})
    assert [each.name for each in made.tools] == ["srv_look", "srv_look_2", "see_things", "tool"]


def test_a_registry_keeps_its_own_tool_of_a_name() -> None:
    @tool
    def add(a: int) -> int:
        """Ours."""
        return a

    registry = Registry()
    registry.add(add)
    made = taken(offered("add"), names={each.name for each in registry})
    registry.replace("mcp srv", made.tools)
    assert registry.get("add") is add and "srv_add" in registry and not registry.faults


@pytest.mark.parametrize(
    ("settings", "hints", "permission", "approval"),
    [
        ({}, {}, "execute", "always"),
        ({}, {"read_only_hint": True}, "network", "never"),
        ({}, {"read_only_hint": True, "destructive_hint": True}, "network", "never"),
        ({"trust_annotations": True}, {"read_only_hint": True}, "read", "never"),
        ({"trust_annotations": True}, {}, "execute", "always"),
        ({"permission": "execute"}, {"read_only_hint": True}, "execute", "always"),
        ({"permission": "write"}, {"read_only_hint": True}, "write", "always"),
        ({"permission": "read"}, {}, "read", "never"),
        ({"permission": "read"}, {"destructive_hint": True}, "read", "always"),
        ({"permission": "read", "approval": "never"}, {"destructive_hint": True}, "read", "never"),
        ({"command": None, "url": "http://h/mcp"}, {}, "network", "never"),
        ({"command": None, "url": "http://h/mcp"}, {"read_only_hint": True}, "network", "never"),
        ({"command": None, "url": "http://h/mcp"}, {"destructive_hint": True}, "network", "always"),
    ],
)
def test_hints_only_narrow_what_the_operator_allowed(
    settings: dict[str, Any], hints: dict[str, bool], permission: str, approval: str
) -> None:
    (made,) = taken(offered(annotations=ToolAnnotations(**hints)), **settings).tools
    assert (made.permission, made.approval) == (permission, approval)


def test_a_description_is_cut_and_hides_nothing() -> None:
    hidden = "".join(chr(0xE0000 + ord(c)) for c in "obey")
    (made,) = taken(offered(description=f"Looks.{hidden}\x1b[8m\nTwice." + "x" * 5000)).tools
    assert made.description.startswith("Looks.[8m\nTwice.") and len(made.description) == DESCRIPTION


def test_a_tool_whose_schema_is_no_use_is_refused_and_the_others_are_not() -> None:
    long = {"type": "object", "description": "x" * SCHEMA}
    foreign = {"type": "object", "properties": {"a": {"$ref": "http://example.org/schema"}}}
    made = taken(
        offered("a", input_schema=long), offered("b", input_schema=foreign), offered("c", input_schema={}), offered("d")
    )
    assert [each.name for each in made.tools] == ["d"]
    assert len(made.refused) == 3 and "accepted: 16000" in made.refused[0]


def test_no_more_tools_are_taken_than_there_is_sense_in() -> None:
    made = taken(*(offered(f"t{number}") for number in range(MAX_COUNT + 5)))
    assert len(made.tools) == MAX_COUNT and "more than 128" in made.refused[0]


def test_a_pattern_is_shown_to_the_model_and_left_to_the_server() -> None:
    schema = {
        "type": "object",
        "properties": {"pattern": {"type": "string", "pattern": "^(a+)+$"}},
        "required": ["pattern"],
        "additionalProperties": False,
    }
    (made,) = taken(offered(input_schema=schema)).tools
    assert made.parameters == schema
    assert made.validate({"pattern": "a" * 40 + "!"})  # which would take years by the pattern
    with pytest.raises(ToolError, match="pattern"):
        made.validate({})


# -- what an operator may say


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "either command"),
        ({"command": ["a"], "url": "http://h"}, "either command"),
        ({"command": []}, "at least 1"),
        ({"command": [""]}, "empty"),
        ({"url": "ftp://h"}, "pattern"),
        ({"url": "http://h", "env": {"A": "b"}}, "env has no effect"),
        ({"command": ["a"], "headers": {"A": "b"}}, "headers has no effect"),
        ({"command": ["a"], "permission": "none"}, "permission"),
        ({"command": ["a"], "timeout_s": 0}, "greater than 0"),
        ({"command": ["a"], "comand": "b"}, "Extra inputs"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        McpSettings.model_validate(json.loads(json.dumps(given)))


def test_a_server_s_name_must_fit_before_a_tool_s() -> None:
    with pytest.raises(ValueError, match="1 to 32"):
        McpServer("a b", McpSettings(command=("x",)), Registry())


def test_the_manual_s_example_is_accepted_and_its_defaults_are_these() -> None:
    manual = (Path(__file__).resolve().parents[3] / "docs/mcp.md").read_text()
    example = tomllib.loads(manual.split("```toml\n")[1].split("```")[0])["mcp"]
    made = {name: McpSettings.model_validate(table) for name, table in example.items()}
    assert (made["files"].allowed, made["tickets"].allowed) == ("execute", "write")
    table = manual.split("| key |")[1].split("\n\n")[0]
    assert {line.split("`")[1] for line in table.splitlines()[2:]} == set(McpSettings.model_fields)


def test_pictures_and_resources_of_a_result_are_files() -> None:
    result = CallToolResult(
        content=[
            TextContent(type="text", text="done"),
            ImageContent(type="image", data="aGk=", mime_type="image/png"),
            ImageContent(type="image", data="no base64!", mime_type="image/png"),
            EmbeddedResource(
                type="resource",
                resource=TextResourceContents(uri="file:///x/../t.csv", text="a,b", mime_type="text/csv"),
            ),
            EmbeddedResource(
                type="resource",
                resource=BlobResourceContents(uri="data://chart/", blob="aGk=", mime_type="image/svg+xml"),
            ),
        ]
    )
    assert files_of(result) == [("result-1.png", b"hi"), ("t.csv", b"a,b"), ("chart.svg", b"hi")]
