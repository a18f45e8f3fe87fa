"""The tool schemas of the Berkeley Function-Calling Leaderboard, as JSON Schema. Its types are Python's in part."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("PONDER_SHARED", Path(__file__).parents[4] / "shared"))
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
_NAMED = {"properties", "$defs", "definitions"}


def json_schema(schema: Any) -> Any:
    """`any` means no type, and an array's list of strings to choose from is meant for its items (one tool has that).

    Any: a schema is JSON.
    """
    if isinstance(schema, list):
        return [json_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "type":
            if value != "any":
                made[keyword] = _TYPES.get(value, value)
        elif keyword in _NAMED:
            made[keyword] = {name: json_schema(part) for name, part in value.items()}
        elif keyword in ("items", "additionalProperties", "anyOf", "oneOf", "allOf"):
            made[keyword] = json_schema(value)
        else:
            made[keyword] = value
    if made.get("type") == "array" and not any(isinstance(value, list) for value in made.get("enum", [[]])):
        made["items"] = {**made.get("items", {}), "enum": made.pop("enum")}
    return made


@lru_cache(maxsize=1)
def tool_sets() -> tuple[tuple[dict[str, Any], ...], ...]:
    """The tools of every question: name, description, and parameters as JSON Schema. Skips where the set is absent."""
    folder = SHARED / "data/bfcl"
    if not folder.is_dir():
        pytest.skip(f"no tool schemas at {folder}; set PONDER_SHARED")
    sets = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            tools = json.loads(line)["function"]
            sets.append(tuple({**tool, "parameters": json_schema(tool["parameters"])} for tool in tools))
    return tuple(sets)


@lru_cache(maxsize=1)
def parameters() -> tuple[dict[str, Any], ...]:
    """Every different parameters schema."""
    found = {json.dumps(tool["parameters"]): tool["parameters"] for tools in tool_sets() for tool in tools}
    return tuple(found.values())
