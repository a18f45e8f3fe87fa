"""Checks arguments against a JSON schema that came from elsewhere, as those of an MCP server's tools do.

Nothing is fetched: a schema that refers to another document is refused. Nothing is filled in or converted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tools.errors import ArgumentProblem, BadArguments, ToolDeclarationError
from tools.schema import JSONSchema

_MAX_LENGTH = 300  # characters of one message, which may quote the argument


def checker(where: str, name: str, schema: JSONSchema) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A function that returns the arguments as they are, or raises `BadArguments`.

    Raises:
        ToolDeclarationError: it is no JSON Schema of an object, or refers to another document.
    """
    import jsonschema  # slow to import, and only tools declared by a schema need it
    from jsonschema.exceptions import SchemaError

    if schema.get("type") != "object":
        raise ToolDeclarationError(f'{where}: the schema of its parameters must have "type": "object".')
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        reason = error.message[:_MAX_LENGTH]
        raise ToolDeclarationError(f"{where}: the schema of its parameters is not JSON Schema: {reason}.") from None
    for target in external_references(schema):
        raise ToolDeclarationError(f"{where}: its schema refers to {target!r}; only references within it are read.")
    validator = kind(copy.deepcopy(schema))

    def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
        given = copy.deepcopy(dict(arguments))
        errors = sorted(validator.iter_errors(given), key=lambda error: error.json_path)
        if errors:
            found = [
                ArgumentProblem(e.json_path.removeprefix("$").lstrip("."), e.message[:_MAX_LENGTH]) for e in errors
            ]
            raise BadArguments(name, found)
        return given

    return check


def external_references(node: Any) -> Iterator[str]:
    """References of a schema, any JSON, to other documents."""
    if isinstance(node, list):
        for each in node:
            yield from external_references(each)
    elif isinstance(node, dict):
        for key, value in node.items():
            refers = key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str)
            if refers and not value.startswith("#"):
                yield value
            yield from external_references(value)
