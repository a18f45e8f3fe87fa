"""Closed objects: nothing invalid is let in, ever; and parameters that no one listed are kept out where they can be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from engine.tool_parsers.schemas import closed, references, resolve
from tests.known_answers import shared


def valid(schema: Any, instance: Any) -> bool:
    """Any: JSON."""
    return Draft202012Validator(schema).is_valid(instance)


CITY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
TWICE_REMOVED = {"A": {"anyOf": [{"$ref": "#/$defs/B"}]}, "B": CITY}
PARIS, MORE = {"name": "Paris"}, {"name": "Paris", "more": 1}


@pytest.mark.parametrize(
    ("schema", "kept", "forbidden"),
    [
        (CITY, PARIS, MORE),
        ({"properties": {"to": CITY}}, {"to": PARIS}, {"to": MORE}),
        ({"properties": {"to": {"items": CITY}}}, {"to": [PARIS]}, {"to": [MORE]}),
        ({"properties": {"to": {"prefixItems": [CITY]}}}, {"to": [PARIS]}, {"to": [MORE]}),
        ({"properties": {"to": {"anyOf": [CITY, {"type": "null"}]}}}, {"to": None}, {"to": MORE}),
        ({"properties": {"to": {"allOf": [CITY]}}}, {"to": PARIS}, {"to": MORE}),
        ({"additionalProperties": CITY}, {"x": PARIS}, {"x": MORE}),
        ({"properties": {"to": {"$ref": "#/$defs/City"}}, "$defs": {"City": CITY}}, {"to": PARIS}, {"to": MORE}),
        ({"$ref": "#/definitions/a~1b", "definitions": {"a/b": CITY}}, PARIS, MORE),
        ({"properties": {"in": {"$ref": "#"}}}, {"in": {"in": {}}}, {"in": {"in": {"x": 1}}}),
        ({"oneOf": [CAT, DOG]}, {"kind": "wolf"}, {"kind": "wolf", "lives": 9}),
        ({"oneOf": [{"$ref": "#/$defs/Cat"}, {"type": "null"}], "$defs": {"Cat": CAT}}, None, {"kind": "cat", "x": 1}),
        ({"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["b"]}]}, {"b": 1}, {"b": 1, "c": 1}),
        ({"properties": {"a": {}}, "patternProperties": {"^x-": {}}}, {"a": 1, "x-b": 2}, {"b": 1}),
        ({"$id": "https://example.org/tool", **CITY}, PARIS, MORE),
    ],
)  # fmt: skip
def test_what_a_schema_does_not_list_is_forbidden(schema: Any, kept: Any, forbidden: Any) -> None:
    assert valid(schema, kept)
    assert valid(schema, forbidden)  # it is JSON Schema's default that is changed here
    assert valid(closed(schema), kept)
    assert not valid(closed(schema), forbidden)


@pytest.mark.parametrize(
    ("schema", "instance"),
    [
        ({"type": "object"}, {"x": 1}),
        ({**CITY, "additionalProperties": True}, MORE),
        ({**CITY, "additionalProperties": {"type": "integer"}}, MORE),
        ({**CITY, "unevaluatedProperties": True}, MORE),
        ({"properties": {"a": {}}, "required": ["b"]}, {"b": 1}),
        ({"properties": {"a": {}}, "minProperties": 2}, {"a": 1, "b": 1}),
        ({"allOf": [CITY, {"properties": {"more": {}}}]}, MORE),
        ({"$ref": "#/$defs/City", "properties": {"more": {}}, "$defs": {"City": CITY}}, MORE),
        ({"$ref": "#/$defs/City", "required": ["more"], "$defs": {"City": CITY}}, MORE),
        ({"properties": {"name": {}}, "then": {"properties": {"more": {}}}, "if": {}}, MORE),
        ({"properties": {"name": {}}, "dependentSchemas": {"name": {"properties": {"more": {}}}}}, MORE),
        ({"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"more": {}}}], "$defs": TWICE_REMOVED}, MORE),
        ({"properties": {"const": {"const": {"properties": {}}}}}, {"const": {"properties": {}}}),
    ],
)  # fmt: skip
def test_what_a_schema_asks_for_or_allows_stays_possible(schema: Any, instance: Any) -> None:
    assert valid(schema, instance)
    assert valid(closed(schema), instance)


@pytest.mark.parametrize(
    ("schema", "instance"),
    [
        ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, {"a": 1}),
        ({"not": {"properties": {"a": {"type": "string"}}}}, {"a": "", "b": 1}),
        ({"not": {"$ref": "#/$defs/A"}, "$defs": {"A": CITY}}, MORE),
        ({"not": {"$ref": "#/$defs/A"}, "$defs": {"A": {"items": {"$ref": "#/$defs/B"}}, "B": CITY}}, [MORE]),
        ({"if": {"properties": {"a": {}}}, "then": {"required": ["c"]}}, {"a": 1, "b": 1}),
        ({"properties": {"x": {"contains": CITY, "maxContains": 1}}}, {"x": [PARIS, MORE]}),
    ],
)  # fmt: skip
def test_closing_never_lets_in_what_was_invalid(schema: Any, instance: Any) -> None:
    assert not valid(schema, instance)
    assert not valid(closed(schema), instance)


names = st.sampled_from(["a", "b", "c"])
leaves = st.sampled_from([{}, {"type": "integer"}, {"const": "x"}, {"enum": ["y", 1]}, {"type": "object"}])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": st.dictionaries(names, inner, max_size=2),
            "required": st.lists(names, max_size=2, unique=True),
            "minProperties": st.integers(0, 2),
            "anyOf": some, "oneOf": some, "allOf": some, "not": inner, "if": inner, "then": inner, "else": inner,
            "dependentSchemas": st.dictionaries(names, inner, max_size=1),
            "patternProperties": st.dictionaries(names, inner, max_size=1),
            "additionalProperties": inner | st.booleans(),
            "unevaluatedProperties": inner | st.booleans(),
            "items": inner, "contains": inner,
            "$ref": st.sampled_from(["#/$defs/A", "#/$defs/B", "#/$defs/B/properties/a"]),
        },
    ).map(lambda d: dict(list(d.items())[:4]))  # fmt: skip


def refers_to_itself(schema: Any, root: Any, seen: tuple[str, ...] = ()) -> bool:
    """Returns whether some reference leads back to itself without a property between: then it describes nothing. Any:
    JSON."""
    if not isinstance(schema, dict):
        return False
    ref = schema.get("$ref")
    if ref in seen or (ref and refers_to_itself(resolve(root, ref), root, (*seen, ref))):
        return True
    return any(
        refers_to_itself(part, root, seen)
        for key, value in schema.items()
        if key not in ("$ref", "$defs")
        for part in (
            value if isinstance(value, list) else [value, *(value.values() if isinstance(value, dict) else ())]
        )
    )


schemas = st.recursive(leaves, objects, max_leaves=6)
instances = st.recursive(
    st.sampled_from([1, "x", "y", None]),
    lambda inner: st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    objects(schemas), st.fixed_dictionaries({"A": schemas, "B": schemas}), st.lists(instances, min_size=8, max_size=8)
)
def test_what_is_valid_closed_is_valid_as_it_was(schema: Any, definitions: Any, values: list[Any]) -> None:
    schema = {**schema, "$defs": definitions}
    if resolve(schema, "#/$defs/B/properties/a") is None:
        definitions["B"] = {**definitions["B"], "properties": {"a": {}}}
    if refers_to_itself(schema, schema) or any(refers_to_itself(d, schema) for d in definitions.values()):
        return
    narrowed = closed(schema)
    for value in values:
        assert not valid(narrowed, value) or valid(schema, value), (narrowed, value)


def test_the_official_suites_instances_are_not_let_in_by_closing() -> None:
    compared = 0
    for file in sorted(shared("schemas/json_schema_test_suite").glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema = group["schema"]
            # External references need documents that are not here, and some expressions are not Python's.
            if not isinstance(schema, dict) or "\\" in json.dumps(schema, ensure_ascii=False):
                continue
            if not all(ref.startswith("#") for ref in references(schema)):
                continue
            narrowed = closed(schema)
            for case in group["tests"]:
                if valid(narrowed, case["data"]):
                    assert valid(schema, case["data"]), (group["description"], case["description"])
                    compared += 1
    assert compared > 300
