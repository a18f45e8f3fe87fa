"""Arguments held to the question: every candidate is a part of it, and fits the parameter's schema."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from app.answering.copied_arguments import held_to_question, lists, numbers, texts
from engine.tool_parsers import ToolSpec


def properties(question: str, **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": [name for name in parameters if name != "more"]}
    held = held_to_question(ToolSpec("f", None, schema), question)
    assert held.parameters is not None
    found: dict[str, Any] = held.parameters["properties"]
    return found


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("What is the weather in New York City today?", "New York City"),
        ("Weather in London, UK please", "London, UK"),
        ("Play the song 'Cha Cha Cha' by Käärijä", "Cha Cha Cha"),
        ("Remove “todo random” from my list", "todo random"),
        ("Where is the office of ABC Ltd.?", "ABC Ltd."),
        ("The derivative of 3x^2 + 2x - 1.", "3x^2 + 2x - 1"),
        ("Write to andy@gorilla.ai about it.", "andy@gorilla.ai"),
    ],
)
def test_a_text_can_be_copied_whole(question: str, wanted: str) -> None:
    assert wanted in set(texts(question))


def test_texts_are_parts_of_the_question_and_cut_no_name() -> None:
    question = "Find the shortest distance between New York and Los Angeles, by train."
    found = list(texts(question))
    assert all(text in question for text in found) and len(found) == len(set(found))
    assert {"York", "Los", "between New York", "the"}.isdisjoint(found)


def test_numbers_are_read_as_written_and_in_words() -> None:
    assert numbers("1,500 miles at 9.8 for three days, -4 degrees and 1e-9") == [1500, 9.8, -4, 1e-9, 3]
    assert numbers("2x^2") == [2]
    assert lists("of 10, 12 and 14.5, then 3") == [[10, 12, 14.5]]


def test_parameters_are_held_to_valid_candidates() -> None:
    question = "Book 3 nights for 2.5 hours in Oslo, costs 10, 20 and 30, in celsius"
    held = properties(
        question,
        nights={"type": "integer", "maximum": 5},
        hours={"type": "number"},
        city={"type": "string", "maxLength": 4},
        costs={"type": "array", "items": {"type": "number"}},
        unit={"enum": ["celsius", "kelvin"]},
    )
    assert held["nights"]["enum"] == [3]
    assert 2.5 in held["hours"]["enum"] and "Oslo" in held["city"]["enum"]
    assert held["costs"]["enum"] == [[10, 20, 30]] and held["unit"]["enum"] == ["celsius"]
    assert all(Draft202012Validator({"maxLength": 4}).is_valid(each) for each in held["city"]["enum"])


def test_parameters_without_a_candidate_stay_free() -> None:
    day = {"type": "string", "pattern": "^\\d{4}-\\d{2}-\\d{2}$"}
    free = {"day": day, "count": {"type": "integer"}, "kind": {"enum": ["a", "b"]}}
    free |= {"date": {"type": "string", "format": "date"}, "either": {"type": "string", "anyOf": [{"minLength": 1}]}}
    assert properties("on the third of May", **free) == free


def test_schemas_of_other_shapes_stay() -> None:
    for schema in (None, {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string"}}}):
        tool = ToolSpec("f", None, schema)
        assert held_to_question(tool, "Oslo") is tool
