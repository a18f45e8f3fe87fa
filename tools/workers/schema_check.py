"""Checks of a text by what a stranger wrote, an expression or a JSON schema: the work of a worker's process.

Either can take for ever on a text made for it, so neither runs in the server's own process. Knows nothing of who asks.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tools.json_schema import external_references


def answer(request: dict[str, Any]) -> bool | str | None:
    """Returns whether `text` has a match of the expression `regex`, or is JSON that fits `schema`.

    With `explain`, returns the reason why it does not fit the schema; None where it does.
    """
    text: str = request["text"]
    if "regex" in request:
        return re.search(request["regex"], text) is not None
    explain = request.get("explain", False)
    try:
        value = json.loads(text)
    except ValueError as broken:
        return f"it is not JSON: {broken}" if explain else False
    validator = _validator(request["schema"])
    if not explain:
        return bool(validator.is_valid(value))
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(value))
    return None if error is None else f"{error.json_path}: {error.message}"[:300]


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
    from referencing import Registry

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, registry=Registry())  # an empty registry fetches nothing
