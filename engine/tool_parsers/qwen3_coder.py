"""Qwen3-Coder: each call is a section with a tag for the function and one for each parameter.

    <tool_call>
    <function=write>
    <parameter=path>
    notes.txt
    </parameter>
    </function>
    </tool_call>

Parameters come in the order of the schema, and those that are not required may be left out. A value that can only be a
string (or null) is raw text up to the first line `</parameter>`, so it cannot contain that line; others are JSON.
Keywords such as `pattern` or `minLength` cannot be enforced on raw text, nor on a sequence of tags those that relate
parameters, such as `anyOf` beside `properties`: of strict tools they are refused by name, of others ignored. Parameters
that a schema does not list can be given only where it lists none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.structured_output.matcher import ConstraintRefused
from engine.structured_output.spec import Constraint, JsonSchema, Literal, Optional, Regex, Repeat, Until, sequence
from engine.structured_output.spec import Sequence as InOrder
from engine.tool_parsers.base import BEGIN, END, Sections, Tokens, ToolPlan, offered, one_of
from engine.tool_parsers.schemas import DEFINITIONS, Schema, references, resolve
from engine.tool_parsers.tagged_calls import STOP, Notation, Notations, RawValue, raw_value, tagged_call
from engine.tool_parsers.tools import ToolChoice, ToolSpec

_RELATING = (
    *("allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies"),
    *("minProperties", "maxProperties", "propertyNames", "patternProperties", "$dynamicRef", "$recursiveRef"),
)
_ANY_KEY = r"[^<>\n]+"


class Qwen3Coder:
    name = "qwen3_coder"
    tokens = (BEGIN, END)

    def __init__(self, tokens: Tokens) -> None:
        self._sections = Sections.of(tokens)

    def plan(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, parallel: bool = True, loose: Set[str] = frozenset()
    ) -> ToolPlan:
        """See `ToolParser`. The values of `loose` tools are of any kind, but their parameters are those of the
        schema."""
        functions = [_Function(tool, tool.name in loose) for tool in offered(tools, choice, loose)]
        notations = {function.tool.name: function.notations() for function in functions}
        body = one_of([function.body() for function in functions])
        return ToolPlan(self._sections.layout(choice, parallel), body, partial(tagged_call, notations))


@dataclass(frozen=True, slots=True)
class _Parameter:
    key: str
    schema: Any  # JSON Schema: an object or a boolean
    value: RawValue
    required: bool

    @property
    def notation(self) -> Notation:
        if not self.value.raw:
            return Notation.JSON
        return Notation.TEXT_OR_NULL if self.value.nullable else Notation.TEXT


class _Function:
    """A tool as tags."""

    def __init__(self, tool: ToolSpec, loose: bool) -> None:
        self.tool = tool
        self._loose = loose
        self._root = tool.arguments
        self._top = self._followed(self._root)
        self._parameters = list(self._listed())
        self._others = self._unlisted()
        if tool.strict:
            self._check()

    def notations(self) -> Notations:
        """Returns the notations of values."""
        others = Notation.TEXT if self._others is None else self._others.notation
        return Notations({parameter.key: parameter.notation for parameter in self._parameters}, others)

    def body(self) -> Constraint:
        parts = [self._tags(parameter) for parameter in self._parameters]
        if self._others is not None:
            parts = [Optional(Repeat(sequence("<parameter=", Regex(_ANY_KEY), ">\n", self._value(self._others)), ""))]
        return InOrder((Literal(f"\n<function={self.tool.name}>\n"), *parts, Literal("</function>\n")))

    def _followed(self, schema: Schema) -> Schema:
        """Returns the schema that lists the parameters, where another only refers to it."""
        seen = set()
        while isinstance(ref := schema.get("$ref"), str) and "properties" not in schema and ref not in seen:
            seen.add(ref)
            target = resolve(self._root, ref)
            if not isinstance(target, Mapping):
                break
            schema = target
        return schema

    def _listed(self) -> Iterator[_Parameter]:
        properties = dict(self._top.get("properties", {}))
        required = self._top.get("required", [])
        others = self._top.get("additionalProperties", True)
        for key in required:
            properties.setdefault(key, others)
        for key, schema in properties.items():
            if schema is False and key not in required:
                continue
            if not key or set(key) & set("<>\n"):
                raise self._refused(f"parameter {key!r}: a name with <, > or a line break cannot stand in a tag")
            yield _Parameter(key, schema, raw_value(schema, self._root), key in required)

    def _unlisted(self) -> _Parameter | None:
        """Returns the notation of parameters where the schema names none and allows any. Of any kind means a string
        then."""
        others = self._top.get("additionalProperties", True)
        if "properties" in self._top or self._parameters or others is False:
            return None
        schema = {"type": "string"} if others is True or others == {} else others
        return _Parameter("*", schema, raw_value(schema, self._root), required=False)

    def _check(self) -> None:
        """Refuses a strict tool with keywords that would be ignored."""
        reasons = [
            f"parameter {parameter.key!r}: {keyword} cannot be held, as strings are raw text"
            for parameter in (*self._parameters, *([] if self._others is None else [self._others]))
            if parameter.notation is not Notation.JSON
            for keyword in parameter.value.unheld
        ]
        reasons += [
            f"{key} cannot be held among parameters" for key in _RELATING if key in self._top or key in self._root
        ]
        if "$ref" in self._top:
            reasons.append("$ref beside properties cannot be held")
        if reasons:
            raise self._refused(*reasons)

    def _refused(self, *reasons: str) -> ConstraintRefused:
        return ConstraintRefused(
            [f"tool {self.tool.name!r}: {reason} in this model's tool calls" for reason in reasons]
        )

    def _tags(self, parameter: _Parameter) -> Constraint:
        tags = sequence(f"<parameter={parameter.key}>\n", self._value(parameter))
        return tags if parameter.required else Optional(tags)

    def _value(self, parameter: _Parameter) -> Constraint:
        """A value and the tag after it."""
        if parameter.notation is Notation.JSON:
            schema = {} if self._loose else self._alone(parameter)
            return sequence(JsonSchema.of(schema), STOP)
        if parameter.value.values is None or self._loose:
            return Until(STOP)
        texts = ["null" if value is None else value for value in parameter.value.values]
        texts = [text for text in dict.fromkeys(texts) if STOP not in text + STOP[:-1]]
        if not texts:
            raise self._refused(f"parameter {parameter.key!r}: none of its values can stand as raw text")
        return one_of([Literal(text + STOP) for text in texts])

    def _alone(self, parameter: _Parameter) -> Any:
        """Returns the parameter's schema on its own, with the schemas that it refers to. Any: JSON Schema."""
        schema = parameter.schema
        if not any(True for _ in references(schema)):
            return schema
        definitions = {key: self._root[key] for key in DEFINITIONS if key in self._root}
        if all(ref.startswith(tuple(f"#/{key}/" for key in definitions)) for ref in references([schema, definitions])):
            return {**schema, **definitions}
        # Something refers to the whole or to another parameter: the whole becomes a definition.
        at = "#/$defs/" + self.tool.name
        return {**_moved(schema, at), "$defs": {self.tool.name: _moved(self._root, at)}}


def _moved(value: Any, at: str) -> Any:
    """The same with its references pointing below `at`. Any: JSON."""
    if isinstance(value, Mapping):
        ref = value.get("$ref")
        moved = {key: _moved(part, at) for key, part in value.items()}
        return {**moved, "$ref": at + ref[1:]} if isinstance(ref, str) and ref.startswith("#") else moved
    return [_moved(part, at) for part in value] if isinstance(value, list) else value
