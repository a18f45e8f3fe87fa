"""Keywords that are written in others: the mask takes just what `jsonschema` calls valid, and supersets take more."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from engine.structured_output import schema_rewrite, spec
from engine.structured_output.matcher import CompileTimeout, ConstraintRefused
from tests.engine.structured_output import schemas, sources
from tests.engine.structured_output.sources import compact, guidance, vocabulary

AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "k": {"enum": ["x", "y"]}}}
INTEGER = {"type": "integer"}
KIND_X = {"type": "object", "properties": {"a": INTEGER, "b": True, "k": {"const": "x"}}, "required": ["k"]}
KIND_Y = {"type": "object", "properties": {"a": True, "b": INTEGER, "k": {"enum": ["y", "z"]}}}
EXACT: dict[str, dict[str, Any]] = {
    "dependencies on keys": {**AB, "dependencies": {"a": ["b"], "b": ["k"]}},
    "dependencies on a schema": {**AB, "dependencies": {"a": {"properties": {"b": {"minimum": 2}}}, "k": True}},
    "dependentRequired": {**AB, "dependentRequired": {"a": ["b"], "k": []}, "additionalProperties": False},
    "dependentSchemas": {**AB, "dependentSchemas": {"b": {"required": ["a"]}, "k": False}},
    "dependencies without a type": {"properties": {"a": INTEGER}, "dependencies": {"a": ["b"]}},
    "dependencies beside alternatives": {
        **AB, "dependencies": {"a": ["b"]}, "anyOf": [{"required": ["k"]}, {"required": ["a"]}],
    },
    "oneOf by a constant": {"oneOf": [KIND_X, KIND_Y]},
    "oneOf by a reference": {
        "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {"x": KIND_X, "y": KIND_Y},
    },
    "oneOf by type": {"oneOf": [{"type": ["string", "null"]}, {"type": "number"}, {"type": "array", "items": INTEGER}]},
    "oneOf by a closed object": {
        "oneOf": [
            {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False},
            {"type": "object", "properties": {"a": True, "b": INTEGER}, "required": ["b"]},
        ]
    },
    "oneOf by size": {
        "oneOf": [{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2, "maxLength": 3}],
    },
    "oneOf by value": {"oneOf": [{"const": "x"}, {"enum": ["x", "y", 1]}, {"type": "string", "enum": ["z", 1.0]}]},
    "oneOf by keys": {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "oneOf by several keys": {**AB, "oneOf": [{"required": ["a", "b"]}, {"required": ["k"]}, {"required": ["c"]}]},
    "oneOf by keys without a type": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "unique words": {"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True, "minItems": 1},
    "unique words, few of many": {
        "type": "array", "items": {"enum": ["x", "y", "z", 1, 1.0, 2, "w"]}, "uniqueItems": True, "maxItems": 3,
    },
    "unique booleans": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    "unique integers": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}, "uniqueItems": True},
    "unique and one": {"type": "array", "uniqueItems": True, "maxItems": 1},
    "not unique": {"type": "array", "uniqueItems": False, "maxItems": 3},
    "an unknown format": {"type": "string", "format": "byte"},
    "not with a key": {**AB, "not": {"required": ["a"]}},
    "not with a key, without a type": {"properties": {"b": INTEGER}, "not": {"required": ["a"]}},
    "not an object with keys": {"properties": {"b": INTEGER}, "not": {"type": "object", "required": ["a", "b"]}},
    "not with any of some keys": {**AB, "not": {"anyOf": [{"required": ["a", "b"]}, {"required": ["k"]}]}},
    "names of keys": {"propertyNames": {"enum": ["a", "b"]}, "properties": {"a": INTEGER, "k": {"const": "x"}}},
    "names of keys by reference": {
        "type": "object", "propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"enum": ["a", "b"]}},
        "additionalProperties": INTEGER,
    },
    "names of keys by an expression": {
        "type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": INTEGER,
    },
    "a key of one name": {"type": "object", "propertyNames": {"const": "k", "type": "string"}},
    "names that are strings": {**AB, "propertyNames": {"type": "string"}, "additionalProperties": False},
    "a reference with a description": {
        "$ref": "#/$defs/x", "$defs": {"x": {**AB, "properties": {"a": {"$ref": "#/$defs/x", "title": "Of a"}}}},
    },
    "whole counts": {"type": "array", "maxItems": 2.0, "items": {"type": "integer"}},
}  # fmt: skip


def instances() -> list[Any]:
    """Small values in which the keys keep the order of the schemas above."""
    members = {"a": (1, "s"), "b": (1, 3), "k": ("x", "y", "z"), "c": (0,)}
    chosen = itertools.product(*((..., *values) for values in members.values()))
    objects = [{k: v for k, v in zip(members, some, strict=True) if v is not ...} for some in chosen]
    items = ["x", "y", "z", 1, 2, 4, True, False]
    lists = [list(some) for length in range(4) for some in itertools.product(items, repeat=length)]
    return [*objects, *lists, None, True, 1, 2.5, "", "x", "y", "z", "xy", "xyz", "wxyz"]


INSTANCES = instances()


@pytest.mark.parametrize("name", EXACT)
def test_what_is_written_in_other_keywords_means_the_same(name: str) -> None:
    schema = EXACT[name]
    validator = (Draft7Validator if "dependencies" in schema else Draft202012Validator)(schema)
    matcher = guidance("small").compile(spec.JsonSchema.of(schema, compact=True)).matcher()
    taken = 0
    for value in INSTANCES:
        ids = vocabulary("small").tokenize(compact(value).encode())
        n = next((i for i, token in enumerate(ids) if not matcher.accept(token)), len(ids))
        ended = n == len(ids) and matcher.can_end()
        matcher.rollback(n)
        taken += ended
        assert ended == validator.is_valid(value), value
    assert 0 < taken < len(INSTANCES) or name == "unique and one"


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"enum": list(range(9))}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": 2}, "uniqueItems"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"a": {"type": "string"}}}, "propertyNames"),
        ({"propertyNames": {"type": "integer"}}, "propertyNames"),
        ({"not": {"required": []}}, "not"),
        ({"not": {"required": ["a"], "properties": {"a": {"const": 1}}}}, "not"),
        ({"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]}, "oneOf"),
    ],
)
def test_what_would_not_mean_the_same_is_refused_by_name(schema: Any, keyword: str) -> None:
    with pytest.raises(ConstraintRefused, match=keyword):
        guidance("small").compile(spec.JsonSchema.of(schema))


def test_branches_that_refer_in_circles_are_soon_called_overlapping() -> None:
    """Twenty branches of twenty branches, without an end: told apart pair by pair that would take years."""
    around = {name: {"anyOf": [{"$ref": f"#/$defs/{name}"}] * 20} for name in "ab"}
    schema = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": around}
    assert "oneOf" in schema_rewrite.exact(schema)


def test_unknown_formats_are_told_wherever_they_stand() -> None:
    schema = {
        "properties": {"format": {"type": "string", "format": "uri-template"}, "a": {"items": {"format": "byte"}}},
        "default": {"format": "no schema"},
        "$defs": {"x": {"format": "date"}},
    }
    assert schema_rewrite.unknown_formats(schema) == ["byte", "uri-template"]


def test_supersets_take_every_valid_instance_of_the_suite() -> None:
    """A superset that compiles is found for every schema."""
    held = asked = 0
    for group in sources.suite():
        if not isinstance(group.schema, dict):
            continue
        asked += 1
        for wider in schema_rewrite.supersets(group.schema):
            try:
                compiled = guidance("small").compile(spec.JsonSchema.of(wider, compact=True))
            except CompileTimeout:
                raise
            except ConstraintRefused:
                continue
            held += 1
            validator = Draft202012Validator(wider)
            for what, value, valid in group.tests:
                if valid and "$dynamicRef" not in compact(wider) and "http" not in compact(wider):
                    assert validator.is_valid(value), (group.description, what, wider)
            assert compiled.size
            break
    assert held == asked > 370


def test_supersets_of_random_schemas_take_what_the_schemas_take() -> None:
    random, taken = Random(0), 0
    for _ in range(300):
        schema = schemas.schema(random)
        validator = Draft202012Validator(schema)
        for value in random.sample(INSTANCES, 20):
            try:
                valid = validator.is_valid(value)
            except RecursionError:  # a definition that refers to itself alone
                break
            for wider in schema_rewrite.supersets(schema) if valid else ():
                assert Draft202012Validator(wider).is_valid(value), (schema, wider, value)
                taken += 1
    assert taken > 1_000


def words_of(count: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": 10 * (count + 1), "pattern": rf"^(?:\S+\s+){{0,{count}}}\S+$"}


def test_a_long_answer_with_a_costly_string_late_in_it_is_not_cut_off() -> None:
    """As in Github_ultra o21136 of JSONSchemaBench: a hundred members, and a summary of many words after most."""
    value = {
        "type": "object",
        "properties": {"who": {"enum": ["provider", "third party"]}, "value": {"type": "boolean"}},
    }
    properties: dict[str, Any] = {f"member{i}": {**value, "required": ["who", "value"]} for i in range(100)}
    properties |= {"summary": words_of(69), "name": words_of(19), "last": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    answer = {name: {"who": "provider", "value": True} for name in properties if name.startswith("member")}
    text = compact({**answer, "summary": "What it does, in a few words", "name": "it", "last": True})
    matcher = guidance("pebble").compile(spec.JsonSchema.of(schema)).matcher()
    ids = vocabulary("pebble").encode(text)
    row = sources.mask(matcher, vocabulary("pebble").size)
    assert len(ids) > 1_400
    for at, token in enumerate(ids):
        matcher.fill(row)
        assert matcher.accept(token), (at, len(ids))
    assert matcher.can_end()


def test_a_string_that_would_cut_its_answer_off_is_refused_before_it_begins() -> None:
    properties = {f"member{i}": {"type": "boolean"} for i in range(30)} | {"summary": words_of(400)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    with pytest.raises(ConstraintRefused, match="pattern in .*too many expressions"):
        guidance("pebble").compile(spec.JsonSchema.of(schema))
