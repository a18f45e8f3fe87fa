"""The tools of a request and the choice among them, from OpenAI's JSON. Unused fields are refused by name.

A tool's arguments are always one JSON object. Without `parameters` it is an empty one. Objects that list their
properties are taken as listing all of them (see schemas.py). Knows nothing of models or formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import InvalidParameter
from engine.tool_parsers.schemas import Schema, check_schema, closed, invalid

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NAMES = "1 to 64 letters, digits, dots, underscores and hyphens"
_NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call. `strict` asks that the arguments fit the schema or the request is refused.

    Raises:
        InvalidParameter: the name has other characters, or `parameters` does not describe an object.
    """

    name: str
    description: str | None = None
    parameters: Schema | None = None  # JSON Schema, as it was given
    strict: bool = False

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidParameter("name", f"name is {self.name!r}; accepted: {_NAMES}.")
        _check_parameters(self.parameters, "parameters")

    @property
    def arguments(self) -> Schema:
        """Returns the schema of the arguments, which every call must be valid against: no wider than `parameters`."""
        if not self.parameters:
            return _NO_PARAMETERS
        return closed({**self.parameters, "type": "object"})

    def spec(self) -> dict[str, Any]:  # Any: JSON
        """Returns the tool as a request's `tools` has it, for `read_tools`."""
        given = {"description": self.description, "parameters": self.parameters}
        function = {"name": self.name, **{key: value for key, value in given.items() if value is not None}}
        return {"type": "function", "function": {**function, "strict": self.strict}}


@dataclass(frozen=True, slots=True)
class Named:
    """Exactly this tool must be called, once."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | Named


def read_tools(value: object, field: str = "tools") -> tuple[ToolSpec, ...]:
    """The tools of a request's JSON.

    Raises:
        InvalidParameter: something is not as accepted; `name` is the path of the field.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise invalid(field, value, "a list of tools")
    tools: list[ToolSpec] = []
    for i, item in enumerate(value):
        tool = _read_tool(item, f"{field}[{i}]")
        if any(tool.name == other.name for other in tools):
            path = f"{field}[{i}].function.name"
            raise InvalidParameter(path, f"{path}: there is a tool {tool.name!r} before; accepted: unique names.")
        tools.append(tool)
    return tuple(tools)


def read_choice(value: object, tools: Sequence[ToolSpec], field: str = "tool_choice") -> ToolChoice:
    """Reads the tools that must be called from a request's JSON; None is "auto" where there are tools.

    Raises:
        InvalidParameter: something is not as accepted, or asks for a tool that is not there.
    """
    if value is None:
        return "auto" if tools else "none"
    choice = _read_choice(value, field)
    if isinstance(choice, Named) and not any(tool.name == choice.name for tool in tools):
        names = ", ".join(tool.name for tool in tools) or "none, as there are no tools"
        path = f"{field}.function.name"
        raise InvalidParameter(path, f"{path}: there is no tool {choice.name!r}; accepted: {names}.")
    if choice == "required" and not tools:
        raise InvalidParameter(field, f"{field} is 'required', but there are no tools; accepted: at least one tool.")
    return choice


def _read_choice(value: object, field: str) -> ToolChoice:
    match value:
        case "auto" | "none" | "required":
            return value
        case {"type": "function", "function": {"name": str(name), **more_inside}, **more} if (
            not more and not more_inside
        ):
            return Named(name)
    accepted = '"auto", "none", "required" or {"type": "function", "function": {"name": "…"}}'
    raise invalid(field, value, accepted)


def _read_tool(item: object, path: str) -> ToolSpec:
    _object(item, path, ("type", "function"))
    assert isinstance(item, Mapping)
    if item.get("type") != "function":
        raise invalid(f"{path}.type", item.get("type"), '"function"')
    path, function = f"{path}.function", item.get("function")
    _object(function, path, ("name", "description", "parameters", "strict"))
    assert isinstance(function, Mapping)
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(f"{path}.name", name, _NAMES)
    if description is not None and not isinstance(description, str):
        raise invalid(f"{path}.description", description, "a string")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{path}.strict", strict, "true or false")
    _check_parameters(parameters, f"{path}.parameters")
    return ToolSpec(name, description, parameters, bool(strict))


def _check_parameters(value: object, path: str) -> None:
    """Checks that it is a JSON Schema of objects, or not given."""
    if value is None:
        return
    accepted = 'a JSON Schema of an object, such as {"type": "object", "properties": {…}}'
    if not isinstance(value, Mapping):
        raise invalid(path, value, accepted)
    types = value.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise invalid(f"{path}.type", types, '"object"')
    check_schema(value, path)


def _object(value: object, path: str, keys: Sequence[str]) -> None:
    accepted = "an object with " + ", ".join(keys)
    if not isinstance(value, Mapping):
        raise invalid(path, value, accepted)
    if unknown := [key for key in value if key not in keys]:
        raise InvalidParameter(
            f"{path}.{unknown[0]}", f"{path} has the unknown field {unknown[0]!r}; accepted: {accepted}."
        )
