"""llguidance, with its gaps closed: wrongly admitted texts, refusals and bounds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from decimal import Decimal
from itertools import product
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from engine.structured_output import spec
from engine.structured_output.llguidance_backend import Guidance, lark
from engine.structured_output.matcher import ConstraintFailed, ConstraintRefused, words
from engine.structured_output.schema_gate import exact_pattern
from engine.structured_output.spec import Constraint
from engine.structured_output.vocabulary import Vocabulary
from tests.engine.structured_output.sources import accepts, guidance, vocabulary

pytestmark = pytest.mark.slow


def takes(constraint: Constraint, text: str) -> bool:
    return accepts(guidance("small").compile(constraint).matcher(), vocabulary("small").encode(text))


def schema_takes(schema: Any, text: str) -> bool:
    return takes(spec.JsonSchema.of(schema, compact=True), text)


def refusal(constraint: Constraint) -> str:
    with pytest.raises(ConstraintRefused) as refused:
        guidance("small").compile(constraint)
    return str(refused.value)


# -- never more than the schema means


@pytest.mark.parametrize(
    "text", ['{"\\u0061":1}', '{"\\u00e9":1}', '{"q\\u0022":1}', '{"c\\u000a":1}', '{"b\\u005c":1}']
)
@pytest.mark.parametrize("kind", ["properties", "patternProperties"])
def test_a_key_spelt_with_escapes_is_no_other_key(text: str, kind: str) -> None:
    names = ["a", "é", 'q"', "c\n", "b\\"]
    if kind == "patternProperties":
        names = [f"^{re.escape(name)}$" for name in names]
    schema = {"type": "object", kind: {name: {"type": "string"} for name in names}}
    assert not Draft202012Validator(schema).is_valid(json.loads(text))
    assert not schema_takes(schema, text)
    assert schema_takes(schema, '{"other":1}')


def test_where_keys_are_not_told_apart_any_character_may_be_escaped() -> None:
    closed = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    assert schema_takes(closed, '{"a":"\\u00e9\\ud83d\\ude42"}') and schema_takes({"type": "object"}, '{"\\u0061":1}')
    assert not schema_takes({"type": "string"}, '"\\ud800"')


def test_a_key_written_twice_does_not_count_twice() -> None:
    assert "minProperties" in refusal(spec.JsonSchema.of({"type": "object", "minProperties": 2}))
    assert schema_takes({"type": "object", "minProperties": 1}, '{"a":1}')
    closed = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"], "additionalProperties": False}
    assert schema_takes({**closed, "minProperties": 2}, '{"a":1,"b":1}')


BOUNDS = [0, 1, -1, 99, 0.5, -0.5, 1.5, -1.25, 99.5]


@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high", ["maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("kind", ["number", "integer"])
def test_no_number_beyond_a_bound_is_let_through(kind: str, low: str, high: str) -> None:
    numbers = {Decimal(str(bound)) + Decimal(step) for bound in BOUNDS for step in ("0", "0.01", "-0.01", "1")}
    texts = ["-0", "-0.0", "0.0", "1e0", *(format(each, form) for each in numbers for form in ("f", ".3f"))]
    ids = {text: vocabulary("small").encode(text) for text in texts}
    held = 0
    for least, most in product(BOUNDS, BOUNDS):
        schema = {"type": kind, low: least, high: most}
        try:
            made = guidance("small").compile(spec.JsonSchema.of(schema))
        except ConstraintRefused:
            continue
        held += 1
        validator = Draft202012Validator(schema)
        for text, tokens in ids.items():
            assert not accepts(made.matcher(), tokens) or validator.is_valid(json.loads(text)), (schema, text)
    assert held > 20


def test_a_bound_that_would_not_be_held_is_refused_and_only_that() -> None:
    near = {"exclusiveMinimum": 0, "maximum": 0.5}
    assert "exclusiveMinimum" in refusal(spec.JsonSchema.of({"type": "number", **near}))
    apart = {"allOf": [{"type": "number", "exclusiveMaximum": 1}, {"minimum": 0.5}]}
    assert "exclusiveMaximum" in refusal(spec.JsonSchema.of(apart))
    parts = {"rate": {"exclusiveMinimum": 0, "type": "number"}, "drop": {"maximum": 0.5}}
    assert schema_takes({"type": "object", "properties": parts}, '{"rate":0.1,"drop":0.5}')


CHARACTERS = ['"', "\\", "\n", "\t", "\r", "\x1f", "/", "a", "Z", "5", "é", "日", "🙂", "]", "-", "^", ".", " "]
PATTERNS = [
    '^[^"]$', r"^[^\\]$", '^[^"\\n]$', '^[^,;"]$', "^[^!-~]$", r"^[\n]$", r"^[\x01-\x1f]$", r"^[\x00-!]$", r"^\W$",
    r"^[^\W]$", r"^\S$", r"^[^\s]$", r"^\D$", r"^(?:[^\"]|a)$", r"^[\]]$", r"^\.$", r"^[.]$", r"^[a-z]$", '^(\n|")$',
    r"^[^\d\\]$", r"^[^/]$", "^.$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_lets_no_other_character_through(pattern: str) -> None:
    missed = []
    for character in CHARACTERS:
        written = {json.dumps(character), json.dumps(character, ensure_ascii=False), f'"\\u{ord(character):04x}"'}
        for text in written:
            try:
                valid = json.loads(text) == character and re.search(pattern, character, re.ASCII) is not None
            except json.JSONDecodeError:
                valid = False
            assert valid or not schema_takes({"type": "string", "pattern": pattern}, text), (character, text)
        plain = json.dumps(character, ensure_ascii=False)
        if re.search(pattern, character, re.ASCII) and not schema_takes({"type": "string", "pattern": pattern}, plain):
            missed.append(character)
    # JavaScript's dot leaves out \r, and some control characters have no plain spelling.
    assert set(missed) <= {"\r", "\x1f"} or set(missed) <= {"\x1f"}


@pytest.mark.parametrize(
    "pattern", ["[a&&b]", "[a[b]]", "[[:alpha:]]", "[]a]", "[^]a]", r"[^a]|\x00", "a\0", r"\u0000"]
)
def test_a_pattern_that_means_something_else_in_rust_is_refused(pattern: str) -> None:
    assert refusal(spec.JsonSchema.of({"type": "string", "pattern": pattern})).startswith("pattern")


def test_a_value_that_looks_like_a_schema_is_left_alone() -> None:
    value = {"pattern": "[^a].", "minProperties": 5}
    assert schema_takes({"const": value}, json.dumps(value, separators=(",", ":")))
    named = {"type": "object", "properties": {"pattern": {"const": "[^a]."}}, "additionalProperties": False}
    assert schema_takes(named, '{"pattern":"[^a]."}')


def test_an_exact_pattern_changes_nothing_but_classes_and_dots() -> None:
    assert exact_pattern(r"^\[a\]\.\\b{2}(?:x|y)$") == r"^\[a\]\.\\b{2}(?:x|y)$"
    assert exact_pattern(r"[a]\p{L}") == r"[[a]&&[^\x00]][\p{L}&&[^\x00]]"
    assert exact_pattern("a\\") == "a\\"


# -- refused by name


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (spec.JsonSchema.of(False), "false"),
        (spec.JsonSchema.of({"type": "integer", "not": {"const": 1}}), "not"),
        (spec.JsonSchema.of({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (spec.JsonSchema.of({"oneOf": [{"type": "number"}, {"type": "integer"}]}), "oneOf"),
        (spec.JsonSchema.of({"$ref": "https://example.org/s.json"}), "\\$ref"),
        (spec.JsonSchema.of({"type": "string", "pattern": "(?=a)"}), "look-around"),
        (spec.JsonSchema.of({"type": "dict"}), "type"),
        (spec.JsonSchema.of({"type": "integer", "minimum": 3, "maximum": 1}), "minimum"),
        (spec.JsonSchema.of({"x-guidance": {"lenient": True}, "not": {}}), "not"),
        (spec.JsonSchema("nonsense"), "not JSON"),
        (spec.JsonSchema("[1]"), "object or a boolean"),
        (spec.JsonSchema("[" * 100_000), "deeply"),
        (spec.Regex("a)(b"), "unopened"),
        (spec.Regex(r"a\b"), "lookaround"),
        (spec.Regex(r"(a)\1"), "backreference"),
        (spec.Grammar("start: <[5]>"), "token"),
        (spec.Grammar("start: <|im_end|>"), "token"),
        (spec.Grammar("start: other"), "other"),
        (spec.Grammar("this is no grammar"), "Expected"),
        (spec.OneOf(()), "nothing"),
    ],
)
def test_what_cannot_be_held_is_refused_and_says_why(constraint: Constraint, why: str) -> None:
    assert re.search(why, refusal(constraint))
    assert re.search(why, refusal(spec.sequence("x", constraint, "y")))


def test_angle_brackets_in_text_are_no_tokens() -> None:
    assert takes(spec.Grammar('start: "<a>" /<[bc]>/ // <comment>\n'), "<a><c>")


def test_braces_in_a_grammar_do_not_end_it() -> None:
    assert takes(spec.sequence("x", spec.Grammar('start: "}" /[{}]/ a\na: "{"?\n'), "y"), "x}{{y")


def test_an_expression_cannot_reach_out_of_its_place() -> None:
    constraint = spec.sequence("x", spec.Regex("a|b"), "y")
    assert takes(constraint, "xby") and not takes(constraint, "xa")
    assert "unopened" in refusal(spec.sequence("x", spec.Regex("a)|(?:b"), "y"))


@pytest.mark.parametrize("text", ["a/b", 'q"\\n#\n\t', "é🙂", "%{}()[]|*+?.^$-&~ //", "\x7f"])
def test_a_literal_is_exactly_its_text(text: str) -> None:
    for constraint in (spec.Literal(text), spec.sequence("[", spec.Literal(text), spec.JSON_OBJECT)):
        whole = text if isinstance(constraint, spec.Literal) else f"[{text}{{}}"
        assert takes(constraint, whole) and not takes(constraint, whole + "x")


def test_neighbours_that_are_regular_are_one_terminal() -> None:
    # Longest match would give every letter to the first of two terminals.
    parts = (spec.Regex("[a-z]+"), spec.sequence("x", spec.Regex("[a-z]*")), spec.JSON_OBJECT)
    assert takes(spec.Sequence(parts), "abxc{}")
    assert lark(spec.Sequence(parts)).count("T0") == 2


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(ConstraintRefused, match="end-of-sequence"):
        Guidance(Vocabulary((b"a", b"b"), (), lambda text: []))


# -- bounds


def nested(depth: int, width: int, keyword: str) -> Any:
    if depth == 0:
        return {"type": "integer"}
    part = nested(depth - 1, width, keyword)
    return {keyword: [{"type": "object", "properties": {f"k{i}": part}, "required": [f"k{i}"]} for i in range(width)]}


def deep(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def chained(rule: str, count: int = 4_000) -> str:
    """A grammar of rules that each lead to the next."""
    rules = [rule.format(i=i, j=i + 1) for i in range(count)]
    name = rules[0].partition(":")[0]
    return "\n".join([f"start: {name}", *rules, f'{name[0]}{count}: "z"'])


BOMBS: dict[str, Constraint] = {
    "nested oneOf": spec.JsonSchema.of(nested(5, 4, "oneOf")),
    "nested anyOf": spec.JsonSchema.of(nested(5, 3, "anyOf")),
    "allOf of anyOf": spec.JsonSchema.of(
        {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}], "type": "string"} for i in range(14)]}
    ),
    "multipleOf": spec.JsonSchema.of({"type": "integer", "multipleOf": 9_999_991}),
    "multipleOf by allOf": spec.JsonSchema.of({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}),
    "properties of allOf": spec.JsonSchema.of(
        {"allOf": [{"properties": {"a": {"anyOf": [{"minLength": i}, {"maxLength": i}]}}} for i in range(20)]}
    ),
    "references of allOf": spec.JsonSchema.of(
        {
            "$defs": {
                f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"oneOf": [{"minLength": i}, {"maxLength": i}]}]}
                for i in range(30)
            },
            "$ref": "#/$defs/d0",
        }
    ),
    "maxLength 5000": spec.JsonSchema.of({"type": "string", "maxLength": 5000}),
    "minItems 100000": spec.JsonSchema.of({"type": "array", "items": {"type": "string"}, "minItems": 100_000}),
    "deep": spec.JsonSchema.of(deep(200)),
    "recursive": spec.JsonSchema.of({"type": "array", "items": {"$ref": "#"}}),
    "huge enum": spec.JsonSchema.of({"enum": [f"value number {i}" for i in range(100_000)]}),
    "least integer": spec.JsonSchema.of({"type": "integer", "const": -(2**63)}),
    "least integers": spec.JsonSchema.of({"type": ["integer", "null"], "enum": [None, 1, -(10**30)]}),
    "catastrophic": spec.Regex(r"((a+)+)+b"),
    "counts": spec.Regex(r"((a{1,100}){1,100}){1,100}"),
    "long count": spec.Regex(r"[a-z]{0,10000}"),
    "overlapping": spec.Regex(r"(.*a){20}.{30}"),
    "rules": spec.Grammar("start: a{1000}\na: b{1000}\nb: c{1000}\nc: /[a-z]+/"),
    "rules in a row": spec.Grammar(chained('r{i}: "a{i}" r{j}')),
    "rules that are others": spec.Grammar(chained("r{i}: r{j}")),
    "terminals in a row": spec.Grammar(chained('R{i}: "a" R{j}')),
    "nested rules in a row": spec.Grammar(chained("r{i}: " + '("b" | ' * 20 + "r{j}" + ")" * 20, 300)),
    "parentheses": spec.Grammar("start: " + "(" * 5_000 + '"a"' + ")" * 5_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_compile_bomb_is_held_or_refused_and_other_threads_go_on(name: str) -> None:
    beats, stop = [0], threading.Event()

    def beat() -> None:
        while not stop.is_set():
            beats[0] += 1

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        made = guidance("small").compile(BOMBS[name])
    except ConstraintRefused as refused:
        assert refused.reasons[0] and len(str(refused)) < 300
    else:
        row = np.zeros(words(vocabulary("small").size), dtype=np.int32)
        made.matcher().fill(row)
        assert row.any()
    finally:
        stop.set()
        thread.join()
    assert beats[0] > 0


def test_what_is_multiplied_out_is_counted_where_it_is() -> None:
    """Many alternatives are fine as long as they stand in different places, and references may go round."""
    two = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    many = {"type": "object", "properties": {f"p{i}": two for i in range(40)}, "required": ["p0"]}
    assert schema_takes({"anyOf": [many, {"type": "array", "items": many}]}, '{"p0":null}')
    tree = {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}, "v": two}}
    assert schema_takes(tree, '{"l":{"r":{"v":"x"}}}')
    for name in ("allOf of anyOf", "properties of allOf", "references of allOf"):
        assert "combinations" in refusal(BOMBS[name])
    for name in ("multipleOf", "multipleOf by allOf"):
        assert refusal(BOMBS[name]).startswith("multipleOf")
    assert schema_takes({"type": "number", "multipleOf": 0.25}, "2.75")


@pytest.mark.parametrize("dead", [spec.Grammar("start: T\nT: /[a-z]+/ & /[0-9]+/"), spec.JsonSchema.of({"$ref": "#"})])
def test_a_dead_end_is_refused_at_the_start_and_told_when_it_is_reached(dead: Constraint) -> None:
    assert "no token fits" in refusal(dead)
    matcher = guidance("small").compile(spec.sequence("a", dead)).matcher()
    assert all(map(matcher.accept, vocabulary("small").encode("a")))
    with pytest.raises(ConstraintFailed, match="no token fits"):
        matcher.fill(np.zeros(words(vocabulary("small").size), dtype=np.int32))


def test_the_engine_is_imported_without_the_backends_libraries() -> None:
    heavy = {"llguidance", "jsonschema"}
    code = f"import sys, engine, engine.structured_output.compiler\nprint({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
