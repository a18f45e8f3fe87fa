"""The page's types are the server's events."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.protocol import type_of, typescript

PROTOCOL = Path(__file__).parents[2] / "web/src/lib/protocol.ts"


def test_committed_types_are_what_the_generator_prints() -> None:
    assert PROTOCOL.read_text() == typescript(), "run: python -m app.protocol > web/src/lib/protocol.ts"


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, "number"),
        ({"const": "a"}, '"a"'),
        ({"enum": ["a", "b"], "type": "string"}, '"a" | "b"'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string | null"),
        ({"type": "array", "items": {"$ref": "#/$defs/Usage"}}, "Usage[]"),
        ({"type": "array", "items": {"enum": ["a", "b"]}}, '("a" | "b")[]'),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "Record<string, number>"),
        ({"title": "Anything"}, "unknown"),
    ],
)
def test_schemas_become_types(schema: dict[str, object], expected: str) -> None:
    assert type_of(schema) == expected


def test_a_schema_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot write"):
        type_of({"type": "string-ish"})
