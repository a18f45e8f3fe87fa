"""Recursive constraints have no jump-forward: the forced text would never end."""

from __future__ import annotations

from typing import Any

import pytest

from engine.structured_output import Grammar, JsonSchema
from engine.structured_output.schema_gate import forces_soon, leads_back
from engine.structured_output.spec import Constraint
from tests.engine.structured_output.sources import allowed, guidance, small

OPEN: dict[str, Any] = {"type": "object", "additionalProperties": False}
SELF = {**OPEN, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
ROUND = {
    "$ref": "#/$defs/one",
    "$defs": {
        "one": {**OPEN, "properties": {"two": {"$ref": "#/$defs/two"}}, "required": ["two"]},
        "two": {**OPEN, "properties": {"one": {"$ref": "#/$defs/one"}}, "required": ["one"]},
    },
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {**OPEN, "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
}
NESTED = {
    **OPEN,
    "properties": {"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}},
    "required": ["from", "to"],
    "$defs": {
        "place": {**OPEN, "properties": {"at": {"$ref": "#/$defs/spot"}}, "required": ["at"]},
        "spot": {**OPEN, "properties": {"name/of~it": {"type": "string"}}, "required": ["name/of~it"]},
    },
}


@pytest.mark.parametrize(
    "constraint",
    [JsonSchema.of(SELF), JsonSchema.of(ROUND), JsonSchema.of(TREE), Grammar('start: "ab" start')],
    ids=["itself", "round", "a way out", "grammar"],
)
def test_what_leads_back_forces_nothing_and_can_be_asked(constraint: Constraint) -> None:
    matcher = guidance("small").compile(constraint).matcher()
    for _ in range(20):
        assert matcher.forced() == []
        if not (following := allowed(matcher, 433)):
            break
        assert matcher.accept(following[0])


def test_references_that_do_not_lead_back_leave_the_text_forced() -> None:
    matcher = guidance("small").compile(JsonSchema.of(NESTED, compact=True)).matcher()
    tokens = matcher.forced()
    assert small().decode(tokens) == '{"from":{"at":{"name/of~it":"'


@pytest.mark.parametrize(
    ("schema", "back"),
    [
        (SELF, True), (ROUND, True), (TREE, True), (NESTED, False), ({"type": "string"}, False),
        ({"$ref": "#anchor"}, True), ({"$ref": "#/$defs/nowhere"}, True), ({"$dynamicRef": "#a"}, True),
        ({"const": {"$ref": "#"}}, True),  # it is no reference; that costs a few steps and nothing else
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#/allOf/0"}]}}}, True),
        ({"$defs": {"a~b/c": {"type": "null"}}, "$ref": "#/$defs/a~0b~1c"}, False),
    ],
)  # fmt: skip
def test_a_schema_leads_back_if_a_reference_does(schema: dict[str, Any], back: bool) -> None:
    assert leads_back(JsonSchema.of(schema).source) is back


def test_tools_without_references_are_forced() -> None:
    assert forces_soon(JsonSchema.of(NESTED))
    assert not forces_soon(JsonSchema.of({"type": "array", "items": {"const": 1}, "minItems": 100_000}))
