"""Prints the page's types: `python -m app.protocol > web/src/lib/protocol.ts`.

Reads the JSON schema of the events of a run and writes the same thing as TypeScript. A test compares the committed file
with this output, so the page and the server cannot drift apart.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from app.runs.events import TERMINAL, Event

Schema = dict[str, Any]  # Any: a JSON schema is JSON

HEADER = """\
// Generated from app/runs/events.py by `python -m app.protocol`. Change it there.
"""
PRIMITIVES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}


def type_of(schema: Schema) -> str:
    """The TypeScript type of a JSON schema. Raises ValueError for a kind that no event has used so far."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(type_of(option) for option in schema["anyOf"])
    match schema.get("type"):
        case "array":
            item = type_of(schema["items"])
            return f"({item})[]" if " " in item else f"{item}[]"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"Record<string, {type_of(schema['additionalProperties'])}>"
        case "object":
            return "Record<string, unknown>"
        case str(name) if name in PRIMITIVES:
            return PRIMITIVES[name]
    if not schema.keys() - {"title", "description", "default"}:
        return "unknown"
    raise ValueError(f"app/protocol.py cannot write this schema as TypeScript yet: {schema}")


def interface(name: str, schema: Schema) -> str:
    lines = [f"/** {' '.join(schema['description'].split())} */"] if "description" in schema else []
    lines.append(f"export interface {name} {{")
    # No field is optional: the server writes defaults too.
    fields = [f"  {field}: {type_of(kind)};" for field, kind in schema.get("properties", {}).items()]
    return "\n".join([*lines, *fields, "}"])


def typescript() -> str:
    """The whole module: an interface per model, their union, its types, and those that end a run."""
    schema = TypeAdapter[Any](Event).json_schema(mode="serialization")
    models: dict[str, Schema] = schema["$defs"]
    events = [type_of(option) for option in schema["oneOf"]]
    order = [name for name in models if name not in events] + events
    ends = ", ".join(json.dumps(kind) for kind in sorted(TERMINAL))
    return "\n\n".join(
        [
            HEADER.rstrip(),
            *(interface(name, models[name]) for name in order),
            "/** What a run writes to its log. */\nexport type RunEvent =\n"
            + "\n".join(f"  | {name}" for name in events)
            + ";",
            f"/** The last event of every log is one of these. */\nexport const TERMINAL: ReadonlySet<string> = "
            f"new Set([{ends}]);\n",
        ]
    )


if __name__ == "__main__":
    print(typescript(), end="")
