"""Checks of a text by a stranger's expression or JSON schema: the work of a worker's process.

Either can take for ever on a text made for it, so neither runs in the server's own process. Knows nothing of its
callers.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tools.json_schema import external_references


def answer(request: dict[str, Any]) -> bool:
    """Returns whether `text` has a match of the expression `regex`, or is JSON that fits `schema`."""
    text: str = request["text"]
    if "regex" in request:
        return re.search(request["regex"], text) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return bool(_validator(request["schema"]).is_valid(value))


def check_schema(schema: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: it is no JSON Schema, or refers to another document; the message says so.
    """
    from jsonschema.exceptions import SchemaError

    try:
        _validator(schema).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"it is no JSON Schema: {error.message[:300]}") from None
    for reference in external_references(schema):
        raise ValueError(f"it refers to {reference!r:.100}, and only references within it are read")


def _validator(schema: dict[str, Any]) -> Any:  # Any: jsonschema makes its classes while it runs
    import jsonschema  # slow to import, and the server itself rarely needs it

    return jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
