"""Layouts and bodies that the choice of tools asks for, in every tool parser."""

from __future__ import annotations

import pytest

from engine.errors import InvalidParameter
from engine.tool_parsers import Named, ToolChoice, read_tools
from tests.engine.tool_parsers.samples import TEMPLATES, TOKENS, accepts, read, rendered, tool_parser

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": "weather", "parameters": CITY}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
WEATHER = ("weather", {"city": "Paris"})
NOW: tuple[str, dict[str, str]] = ("now", {})
BEGIN, END, CALLS, TAG = map(TOKENS.token_id, ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"))
SECTIONED = ("hermes", "qwen3_coder")


@pytest.mark.parametrize("name", SECTIONED)
@pytest.mark.parametrize(
    ("choice", "parallel", "free", "several"),
    [
        ("auto", True, True, True),
        ("auto", False, True, False),
        ("required", True, False, True),
        ("required", False, False, False),
        (Named("now"), True, False, False),
    ],
)
def test_sections_stand_in_free_text_or_alone(
    name: str, choice: ToolChoice, parallel: bool, free: bool, several: bool
) -> None:
    layout = tool_parser(name).plan(TOOLS, choice, parallel).layout
    assert (layout.begin, layout.end, layout.free, layout.several) == (BEGIN, END, free, several)
    assert {TOKENS.token_bytes(id) for id in layout.breaks} == {b"\n", b"\n\n"}


def test_llamas_call_is_the_whole_answer() -> None:
    auto = tool_parser("llama3_json").plan(TOOLS, "auto").layout
    assert (auto.begin, auto.end, auto.free, auto.several, auto.breaks) == (None, None, True, False, frozenset({TAG}))
    assert {TOKENS.token_bytes(id) for id in auto.openers} == {b"{", b'{"', b" {", b"\n{", b"{}"}
    required = tool_parser("llama3_json").plan(TOOLS, "required").layout
    assert (required.begin, required.free, required.openers, required.breaks) == (
        None,
        False,
        frozenset(),
        frozenset({TAG}),
    )


def test_llama_4_calls_several_tools_in_one_answer_where_that_is_allowed() -> None:
    (both,) = rendered("llama4_json", [WEATHER, NOW])
    (alone,) = rendered("llama4_json", [NOW])
    cases: tuple[tuple[ToolChoice, bool, bool], ...] = (
        ("auto", True, True), ("required", True, True), ("auto", False, False), (Named("now"), True, False),
    )  # fmt: skip
    for choice, parallel, several in cases:
        plan = tool_parser("llama4_json").plan(TOOLS, choice, parallel)
        assert accepts(plan.body, both) is several
        assert accepts(plan.body, alone)
        assert plan.layout.breaks == {TOKENS.token_id("<|python_start|>"), TOKENS.token_id("<|python_end|>")}
        calls, text = read(plan.parser(), both if several else alone)
        assert [call.name for call in calls] == (["weather", "now"] if several else ["now"])
        assert text == ""


def test_mistrals_calls_go_on_to_the_end() -> None:
    auto = tool_parser("mistral").plan(TOOLS, "auto").layout
    assert (auto.begin, auto.end, auto.free, auto.several) == (CALLS, None, True, False)
    assert not tool_parser("mistral").plan(TOOLS, "required").layout.free


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_body_is_a_call_of_one_of_the_tools(name: str) -> None:
    body = tool_parser(name).plan(TOOLS, "auto").body
    for call in (WEATHER, NOW):
        assert accepts(body, rendered(name, [call])[0])
    for call in (("weather", {}), ("weather", {"city": "Paris", "unit": "C"}), ("now", {"x": "y"}), ("when", {})):
        assert not accepts(body, rendered(name, [call])[0]), call


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_tool_is_the_only_one(name: str) -> None:
    body = tool_parser(name).plan(TOOLS, Named("now")).body
    assert accepts(body, rendered(name, [NOW])[0])
    assert not accepts(body, rendered(name, [WEATHER])[0])


def test_mistrals_list_has_several_calls_only_where_they_are_allowed() -> None:
    both, alone = rendered("mistral", [WEATHER, NOW])[0], rendered("mistral", [NOW])[0]
    cases: tuple[tuple[ToolChoice, bool, bool], ...] = (
        ("auto", True, True), ("auto", False, False), (Named("now"), True, False),
    )  # fmt: skip
    for choice, parallel, several in cases:
        body = tool_parser("mistral").plan(TOOLS, choice, parallel).body
        assert accepts(body, both) is several
        assert accepts(body, alone)
        assert accepts(body, alone.strip())  # tokenizers without SentencePiece's space
        assert not accepts(body, "[]")


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_the_arguments_of_a_loose_tool_are_any_object(name: str) -> None:
    body = tool_parser(name).plan(TOOLS, "auto", loose={"weather"}).body
    assert accepts(body, rendered(name, [("weather", {"town": [1]})])[0])
    assert not accepts(body, rendered(name, [("now", {"town": [1]})])[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_cannot_be_planned_is_said(name: str) -> None:
    with pytest.raises(InvalidParameter, match="there is no tool 'when'; accepted: weather, now"):
        tool_parser(name).plan(TOOLS, Named("when"))
    with pytest.raises(InvalidParameter, match="there are no tools"):
        tool_parser(name).plan((), "required")
    with pytest.raises(ValueError, match="needs no plan"):
        tool_parser(name).plan(TOOLS, "none")
    strict = read_tools([{"type": "function", "function": {"name": "f", "strict": True}}])
    with pytest.raises(ValueError, match="strict tools cannot be loose: f"):
        tool_parser(name).plan(strict, "auto", loose={"f"})
