"""Makes a tool's JSON schema from its signature and docstring, and checks a model's arguments against it.

Strict: "3" is no 3, and a field that the schema does not name is refused, at every depth. Arguments are read as JSON
is, so a date may be written as a string. Docstrings are in Google's style: everything before the first section is the
description, and of the sections only `Args:` is for the model.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import FrameType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import ErrorDetails

from tools.context import Context, Injected
from tools.errors import ArgumentProblem, BadArguments, ToolDeclarationError

_ARGS = ("Args", "Arguments", "Parameters")
_SECTION = re.compile(rf"^({'|'.join(_ARGS)}|Returns?|Yields?|Raises|Examples?|Notes?|See Also|Warnings?):[ \t]*(.*)$")
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Docstring:
    """A docstring's parts for the model: the text before its first section, and the descriptions under `Args:`."""

    description: str
    arguments: Mapping[str, str]


def parse_docstring(text: str) -> Docstring:
    """Reads Google's style. Sections other than `Args:` are for the people who read the code.

    Raises:
        ValueError: `Args:` shares its line with other text, or an entry is not `name: text`.
    """
    description, arguments = list[str](), dict[str, str]()
    section, indent, name = "", 0, ""
    for line in inspect.cleandoc(text).splitlines():
        if header := _SECTION.match(line):
            section = "Args" if header[1] in _ARGS else header[1]
            if section == "Args" and header[2]:
                raise ValueError(
                    f"the line {line.strip()!r} holds more than `Args:`; write each argument on its own line below"
                )
            indent, name = 0, ""
        elif not section:
            if re.search(r"\bArgs:", line):
                raise ValueError(f"the line {line.strip()!r} has `Args:` within it; write it on a line of its own")
            description.append(line)
        elif line.strip() and not line[0].isspace():
            section = "text"  # unindented prose ends a section
        elif section == "Args" and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            if depth > indent and name:
                arguments[name] += " " + line.strip()
            elif (entry := _ENTRY.match(line.strip())) and entry[1] not in arguments:
                name = entry[1]
                arguments[name] = entry[2]
            else:
                raise ValueError(
                    f"the line {line.strip()!r} below `Args:` is not `name: what it is`, once for each argument"
                )
    return Docstring(" ".join("\n".join(description).split()), arguments)


JSONSchema = dict[str, Any]  # a JSON document in the shape of JSON Schema


class Signature:
    """A function's parameters: `parameters` from the model, `context` and `injected` from the host."""

    def __init__(self, function: Callable[..., Any], *, method: bool, frame: FrameType | None = None) -> None:
        """Reads the function's declaration; `frame` is where it stands, for types that are local there.

        Raises:
            ToolDeclarationError: the function cannot be offered to a model; the message names the remedy.
        """
        self.name = function.__name__
        where = f"Tool {function.__qualname__} (in {function.__module__})"
        written = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
        doc = _documented(function, where)
        self.description = doc.description
        self.context: str | None = None
        self.injected = dict[str, type]()
        self._fields = dict[str, str]()  # the model's field -> the parameter
        fields = dict[str, Any]()  # for create_model: a type and a FieldInfo, or a type and a default
        hints = _hints(function, where, frame)
        for number, parameter in enumerate(written):
            hint = _annotation(parameter, hints, where)
            if hint is Context:
                if self.context is not None:
                    raise ToolDeclarationError(f"{where} takes two contexts; one is enough: remove {parameter.name}.")
                self.context = parameter.name
            elif kind := _injected(hint):
                self.injected[parameter.name] = kind
            else:
                # Fields have names of their own, so that a parameter may be called `schema` or `_x`.
                self._fields[f"p{number}"] = parameter.name
                fields[f"p{number}"] = _field(parameter, hint, doc.arguments.get(parameter.name))
        if strangers := doc.arguments.keys() - set(self._fields.values()):
            raise ToolDeclarationError(
                f"{where}: the docstring describes {_listed(strangers)}, which the model does not give; "
                f"it gives {_listed(self._fields.values())}. Rename or remove the entry."
            )
        self._model, self.parameters = _compiled(self.name, fields, where)

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The function's own keyword arguments, defaults included.

        Raises:
            BadArguments: they do not fit; every field that doesn't is named.
        """
        given = self._model.model_validate_json(_json(self.name, arguments), strict=True, extra="forbid")
        return {parameter: getattr(given, field) for field, parameter in self._fields.items()}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """As `validate`, with pydantic's errors in our words."""
        try:
            return self.validate(arguments)
        except ValidationError as error:
            accepted = list(self._fields.values())
            found = [_problem(each, accepted) for each in error.errors(include_url=False)]
            raise BadArguments(self.name, found) from None


def _json(tool: str, arguments: Mapping[str, Any]) -> str:
    if not isinstance(arguments, Mapping):
        raise BadArguments(
            tool, [ArgumentProblem("", f"they must be a JSON object, and are {type(arguments).__name__}")]
        )
    try:
        return json.dumps(dict(arguments), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArguments(tool, [ArgumentProblem("", f"they are not JSON: {error}")]) from None


def _documented(function: Callable[..., Any], where: str) -> Docstring:
    try:
        doc = parse_docstring(function.__doc__ or "")
    except ValueError as error:
        raise ToolDeclarationError(f"{where}: {error}.") from None
    if not doc.description:
        raise ToolDeclarationError(
            f"{where} has no description; begin its docstring with a sentence that tells the model what it does."
        )
    return doc


def _hints(function: Callable[..., Any], where: str, frame: FrameType | None) -> dict[str, Any]:
    # Types defined in the functions around the declaration are in no module: look through their frames.
    local = dict[str, Any]()
    while frame is not None and frame.f_globals is function.__globals__ and frame.f_code.co_name != "<module>":
        local = {**frame.f_locals, **local}
        frame = frame.f_back
    try:
        return get_type_hints(function, localns=local, include_extras=True)
    except NameError as error:
        raise ToolDeclarationError(
            f"{where}: an annotation names {error.name!r}, which is not there when the module is imported; "
            "import it at run time (not below `if TYPE_CHECKING`)."
        ) from None


def _annotation(parameter: inspect.Parameter, hints: Mapping[str, Any], where: str) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise ToolDeclarationError(
            f"{where} takes {parameter}; name every argument, so that the model knows what to give."
        )
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ToolDeclarationError(
            f"{where}: {parameter.name} is positional only; remove the `/`: arguments come by name."
        )
    if parameter.name not in hints:
        raise ToolDeclarationError(
            f"{where}: {parameter.name} has no type; annotate it, as in `{parameter.name}: str`, or `ctx: Context`."
        )
    return hints[parameter.name]


def _injected(hint: Any) -> type | None:
    if get_origin(hint) is Annotated and any(isinstance(each, Injected) for each in get_args(hint)[1:]):
        kind: type = get_args(hint)[0]
        return kind
    return None


def _field(parameter: inspect.Parameter, hint: Any, documented: str | None) -> tuple[Any, Any]:
    """The type and the pydantic field. The docstring's words win over those in `Annotated[...]`: they stand nearer."""
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    described = documented or next((mark for mark in marks if isinstance(mark, str)), None)
    default = ... if parameter.default is parameter.empty else parameter.default
    if described is None:
        return hint, Field(default, alias=parameter.name)
    return hint, Field(default, alias=parameter.name, description=described)


def _compiled(name: str, fields: dict[str, Any], where: str) -> tuple[type[BaseModel], JSONSchema]:
    config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    try:
        with warnings.catch_warnings():
            # A default that JSON cannot write is left out of the schema, which pydantic warns of; it works still.
            warnings.simplefilter("ignore")
            model = create_model(name, __config__=config, **fields)
            schema = model.model_json_schema(by_alias=True)
    except (PydanticUserError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise ToolDeclarationError(
            f"{where}: a parameter's type cannot be written as JSON ({reason}); take str, int, float, bool, list, "
            "dict, Literal, an Enum, a dataclass or a pydantic model, or have the host inject it with Depends[...]."
        ) from None
    return model, tidy(schema)


def tidy(schema: JSONSchema) -> JSONSchema:
    """The schema as the model reads it: no titles, objects closed, `$defs` written out where they are not recursive."""
    definitions = schema.get("$defs", {})
    recursive = {name for name in definitions if _reaches(name, name, definitions, set())}
    kept = {name: _tidied(definitions[name], definitions, recursive) for name in definitions if name in recursive}
    root = _tidied({key: value for key, value in schema.items() if key != "$defs"}, definitions, recursive)
    root.setdefault("properties", {})
    return {**root, "$defs": kept} if kept else root


_NAMED = ("properties", "patternProperties", "$defs", "dependentSchemas")  # keywords that map names to schemas
_DATA = ("default", "const", "enum", "examples", "required")  # keywords with data, where "title" is only a word


def _tidied(node: Any, definitions: Mapping[str, Any], recursive: set[str]) -> Any:
    if isinstance(node, list):
        return [_tidied(each, definitions, recursive) for each in node]
    if not isinstance(node, dict):
        return node
    name = _reference(node)
    if name is not None and name not in recursive:
        node = {**definitions[name], **{key: value for key, value in node.items() if key != "$ref"}}
    tidied = dict[str, Any]()
    for key, value in node.items():
        if key in _DATA:
            tidied[key] = value
        elif key in _NAMED:
            tidied[key] = {each: _tidied(inner, definitions, recursive) for each, inner in value.items()}
        elif key not in ("title", "discriminator"):
            tidied[key] = _tidied(value, definitions, recursive)
    if "properties" in tidied:
        tidied["additionalProperties"] = False
    return tidied


def _reference(node: Mapping[str, Any]) -> str | None:
    target = node.get("$ref")
    return target.removeprefix("#/$defs/") if isinstance(target, str) else None


def _reaches(target: str, name: str, definitions: Mapping[str, Any], seen: set[str]) -> bool:
    for each in _references(definitions[name]):
        if each == target:
            return True
        if each not in seen:
            seen.add(each)
            if _reaches(target, each, definitions, seen):
                return True
    return False


def _references(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_references, node))
    if not isinstance(node, dict):
        return set()
    own = _reference(node)
    return ({own} if own is not None else set()).union(*map(_references, node.values()))


def _problem(error: ErrorDetails, accepted: list[str]) -> ArgumentProblem:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        if len(error["loc"]) > 1:
            return ArgumentProblem(where, "there is no such field")
        near = get_close_matches(where, accepted, 1)
        return ArgumentProblem(
            where,
            f"there is no such argument; {'did you mean ' + near[0] if near else 'accepted: ' + _listed(accepted)}",
        )
    if error["type"] == "missing":
        return ArgumentProblem(where, "it is required, and missing")
    shown = json.dumps(error["input"], ensure_ascii=False, default=str)
    given = shown if len(shown) <= 60 else shown[:57] + "…"
    return ArgumentProblem(where, f"{error['msg'][0].lower()}{error['msg'][1:]}, and is {given}")


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "no arguments"


def caller(depth: int) -> FrameType | None:
    """The frame `depth` calls above the caller."""
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame
