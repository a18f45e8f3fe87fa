"""Gemma 4's calls: what is written comes back, and only what the schema allows can be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import Engine, EngineConfig, Sampling, Span
from engine.core import messages as m
from engine.ipc import wire
from engine.structured_output.matcher import ConstraintRefused
from engine.tool_parsers import Bodies, Named, ParsedCall, choose_parser, fold, read_tools
from engine.tool_parsers.gemma4 import BEGIN, END, MARK
from tests.engine.model import tiny
from tests.engine.tool_parsers.samples import TEMPLATES, TOKENS, accepts, byte_backend, read, rendered, tool_parser
from tests.tiny import byte_tokenizer

keys = st.text(min_size=1).filter(lambda key: not set(key) & set(":,{}[]<\n \t\r"))
texts = st.text().filter(lambda text: MARK not in text + MARK[:-1])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def plan(parameters: Any, *, strict: bool = False, **more: Any) -> Any:
    """A plan of one tool, `f`. Any: JSON, and a plan's arguments."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
    return tool_parser("gemma4").plan(read_tools([tool]), "required", **more)


def written(arguments: dict[str, Any]) -> str:
    (body,) = rendered("gemma4", [("f", arguments)])
    return body


@given(arguments=st.dictionaries(keys, values, max_size=5))
@example({"a": '<|"|', "b": "<" * 9 + '|"|', "c": 'x<|"y<|', "d": '\\"\n\t\x00 🙂', "e": "", "f": "}<tool_call"})
@example({"n": [1e30, -0.5, 1e-07, -0, 10**40], "deep": [[[[{}]]], [], {"a": {"b": [None]}}]})
def test_any_arguments_come_back_and_can_be_written(arguments: dict[str, Any]) -> None:
    body = written(arguments)
    calls, text = read(plan({}).parser(), [body])
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", arguments)]
    assert text == ""
    anything = plan({"type": "object", "additionalProperties": True})
    assert accepts(anything.body, body)
    pieces, _ = read(anything.parser(), body)
    assert pieces == calls


NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "enum": {"enum": ["red", "red2", 1, None, True, ["a", {"b": "c"}]]},
    "const": {"const": "on/off"},
    "types": {"type": ["string", "null", "integer"]},
    "bounds": {"type": "integer", "minimum": -3, "maximum": 12},
    "fraction": {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "at most two": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    "empty list": {"type": "array", "maxItems": 0},
    "fields": {
        "type": "object",
        "properties": {"b": {"type": "integer"}, "a": {"type": "string"}, "C": {"type": "null"}, "d": {}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
    "either": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "one": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    "beside": {"type": ["integer", "string"], "anyOf": [{"minimum": 2}, {"enum": ["a"]}]},
    "chain": {"$ref": "#/$defs/node"},
    "wrapped": {"allOf": [{"$ref": "#/$defs/node"}]},
}
small = st.recursive(
    st.sampled_from([None, True, False, "", "red", "red2", "on/off", "a", 1, 2, -4, 12, 13, 0.5, 2.5]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b", "C", "d", "n", "next", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ODD: list[Any] = [  # values near the schemas' edges, which are seldom drawn
    ["a", {"b": "c"}], {"b": 1}, {"a": "x", "b": 1, "C": None, "d": [{}]}, {"a": 1}, {"a": 1, "b": 2},
    {"b": 1, "x": 1}, {"n": 1, "next": {"n": 2, "next": {"n": 3}}}, {"n": 1, "next": {}},
    [True], [True] * 3, [True] * 4, [1, 2], [1, 2, 2],
    {"x": 1, "a": 2}, {"x": "1"}, ["a", "a"], ["a", 1], 0, -3, 2, 1.5, "on/off", "red2", None, True, [], {},
]  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_can_be_written_is_what_is_valid(name: str) -> None:
    """Against `jsonschema`, for values of all kinds."""
    schema = {
        "type": "object",
        "properties": {"v": SCHEMAS[name]},
        "required": ["v"],
        "additionalProperties": False,
        "$defs": {"node": NODE},
    }
    body, seen = plan(schema, strict=True).body, set()

    @settings(max_examples=60)
    @given(small)
    def agrees(value: Any) -> None:  # Any: JSON
        found = jsonschema.Draft202012Validator(schema).is_valid({"v": value})
        if isinstance(value, float) and value.is_integer():
            return  # 2.0 is an integer, and has another spelling
        assert accepts(body, written({"v": value})) == found, value
        seen.add(found)

    agrees()
    for value in ODD:
        found = jsonschema.Draft202012Validator(schema).is_valid({"v": value})
        assert accepts(body, written({"v": value})) == found, value
        seen.add(found)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ('call:f{a:<|"|>x<|"|>,b:1}', True),
        ('call:f{b:1,a:<|"|>x<|"|>}', False),  # the template sorts
        ('call:f{a:<|"|>x<|"|>, b:1}', False),
        ('call:f{a:"x",b:1}', False),
        ("call:f{a:x,b:1}", False),
        ("call:f{a:null,b:1}", True),
        ("call:f{a:None,b:1}", True),
        ("call:f{b:01}", False),
        ("call:f{b:1.0}", False),
        ("call:f{b:1,}", False),
        ("call:f{}", False),
        ("call:g{b:1}", False),
        ("f{b:1}", False),
        ("call:f{b:1}call:f{b:1}", False),
    ],
)
def test_a_call_is_spelt_as_the_template_spells_it(body: str, fits: bool) -> None:
    properties = {"b": {"type": "integer"}, "a": {"type": ["string", "null"]}}
    assert accepts(plan({"type": "object", "properties": properties, "required": ["b"]}).body, body) == fits


def test_the_text_of_a_mark_is_no_mark() -> None:
    """Spelt by other tokens it would end the string for its reader."""
    body, quote = plan({"type": "object", "properties": {"a": {"type": "string"}}}).body, MARK.encode()
    assert accepts(body, 'call:f{a:<|"|>x<|"|>}')
    for text, fits in ((b"x", True), (b'<|"|', True), (b"<<|", True), (quote, False), (b"<" + quote, False)):
        matcher = byte_backend().compile(body).matcher()
        tokens = [*b"call:f{a:", TOKENS.token_id(MARK), *text, TOKENS.token_id(MARK), *b"}"]
        assert all(token is not None and matcher.accept(token) for token in tokens) == fits, text


@pytest.mark.parametrize("word", ["MARK", "mark", "KEY", "<[276]>", 'a"b', "a\\\\b", "//x", "#", "ä\x1f", "%json {}"])
def test_words_of_the_grammar_are_text_where_a_schema_has_them(word: str) -> None:
    properties = {"v": {"enum": [word, {"k": word}]}, "r0": {"type": "integer"}}
    if not set(word) & set("<{}"):
        properties[word] = {"const": [word]}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    arguments: dict[str, Any] = {"v": word, "r0": 1, **({word: [word]} if word in properties else {})}
    body = plan(schema, strict=True).body
    assert accepts(body, written(arguments))
    assert accepts(body, written({**arguments, "v": {"k": word}}))
    assert not accepts(body, written({**arguments, "v": word + "x"}))


def test_what_raw_text_cannot_hold_is_refused_of_strict_tools_and_else_ignored() -> None:
    properties = {"a": {"type": "string", "pattern": "^x"}, "b": {"type": "array", "uniqueItems": True}}
    schema = {"type": "object", "properties": properties, "minProperties": 1}
    with pytest.raises(ConstraintRefused) as refused:
        plan(schema, strict=True)
    assert "minProperties cannot be held in this model's tool calls" in str(refused.value)
    for key in properties:
        with pytest.raises(ConstraintRefused, match=rf"parameters\.{key}: (pattern|uniqueItems) cannot be held"):
            plan({"type": "object", "properties": {key: properties[key]}}, strict=True)
    assert accepts(plan(schema).body, 'call:f{a:<|"|>y<|"|>,b:[1,1]}')


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"a:b": {}}}, "the key 'a:b' cannot stand"),
        ({"properties": {"a": {"const": {"": 1}}}}, "the key '' cannot stand"),
        ({"properties": {"a": {"const": f"x{MARK}"}}}, "cannot stand in a call"),
        ({"properties": {"a": False}, "required": ["a"]}, "no value is valid"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "none of its values"),
    ],
)
def test_what_cannot_be_written_is_refused(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(ConstraintRefused, match=why):
        plan({"type": "object", **schema})


@pytest.mark.parametrize(
    ("body", "calls", "text"),
    [
        ('call:f{ a : <|"|>x<|"|> , b : [ 1 , { } ] }', [ParsedCall("f", '{"a ": "x", "b ": [1, {}]}')], ""),
        ('call:f{<|"|>a<|"|>:1}', [ParsedCall("f", '{"a": 1}')], ""),
        ('call:f{a:<|"|>x', [ParsedCall("f", '{"a": "x')], ""),
        ("call:f{a:12", [ParsedCall("f", '{"a": ')], ""),
        ("call:f{a:Paris}", [ParsedCall("f", '{"a": ')], "Paris}"),
        ("call:f{a:1,}", [ParsedCall("f", '{"a": 1, ')], "}"),
        ("call:f{a:[1}", [ParsedCall("f", '{"a": [')], "1}"),
        ("call:f{a:[{}}", [ParsedCall("f", '{"a": [{}')], "}"),
        ("call:{a:1}", [], "call:{a:1}"),
        ("I cannot call that.", [], "I cannot call that."),
        ("call:f{}call:g{}", [ParsedCall("f", "{}")], "call:g{}"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_damaged_bodies_are_read_as_far_as_they_are_calls(
    body: str, calls: list[ParsedCall], text: str, whole: bool
) -> None:
    assert read(plan({}).parser(), [body] if whole else body) == (calls, text)


def test_nesting_is_bounded_by_the_text_alone() -> None:
    calls, text = read(plan({}).parser(), ["call:f{a:" + "[" * 5000 + "]" * 5000 + "}"])
    assert len(calls) == 1
    assert calls[0].arguments.count("[") == 5000
    assert text == ""


def test_sections_stand_in_free_text_or_alone_with_nothing_between() -> None:
    tools = read_tools([{"type": "function", "function": {"name": "f"}}])
    for choice, parallel, free, several in (
        ("auto", True, True, True),
        ("required", False, False, False),
        (Named("f"), True, False, False),
    ):
        layout = tool_parser("gemma4").plan(tools, choice, parallel).layout  # type: ignore[arg-type]  # a ToolChoice
        assert (layout.begin, layout.end) == (TOKENS.token_id(BEGIN), TOKENS.token_id(END))
        assert (layout.free, layout.several, layout.shows_control) == (free, several, True)
        assert not layout.breaks


def test_the_arguments_of_a_loose_tool_are_any_object() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = plan(schema, loose={"f"}).body
    assert accepts(body, written({"town": [1]}))
    assert not accepts(plan(schema).body, written({"town": [1]}))


async def test_an_engine_writes_calls_of_the_schema_and_shows_the_marks(tmp_path: Path) -> None:
    """A random model: only its masks make these calls."""
    tiny.build("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}).save_pretrained(tmp_path)
    byte_tokenizer(("<eos>", BEGIN, END, MARK)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    properties = {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}, "units": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    tools = read_tools([{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}])
    async with await Engine.start(EngineConfig(str(tmp_path), dtype="float32")) as engine:
        parser = choose_parser(engine.tokenizer, TEMPLATES["gemma4"])
        assert parser is not None
        found = parser.plan(tools, "required")
        for seed in range(6):
            span = Span(Sampling(temperature=1.0, seed=seed), max_tokens=200, constraint=found.constrained)
            answer, events = Bodies(found.parser), []
            async with await engine.open([9, 10, seed]) as seq:
                with seq.generate(span) as outputs:
                    async for out in outputs:
                        if out.kind == "body":
                            events += answer.push(out.section, out.text)
            calls, text = fold([*events, *answer.end()])
            assert calls
            assert text == ""
            for call in calls[:-1]:  # the last one may be cut off
                assert call.name == "weather"
                jsonschema.validate(json.loads(call.arguments), {**schema, "additionalProperties": False})
    command = m.Generate(1, 2, Span(constraint=found.constrained), 0, 10)
    assert wire.decode_commands(wire.encode_command(command)) == [command]
