"""Gemma 4: each call is a section of its own, in a notation like JSON's with bare keys and a token around strings.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,units:[<|"|>C<|"|>]}<tool_call|>

Calls follow each other with nothing between. Keys come sorted, as the model's template writes them. A string is raw
text between two tokens `<|"|>`, and cannot contain that text; a key is raw, too, and cannot contain a colon, a comma, a
bracket, `<` or a line break. Keywords such as `pattern` or `minLength` cannot be enforced on raw text, nor those that
relate parameters: of strict tools they are refused by name, of others ignored. Properties that a schema does not list
can be given only where it lists none. Numbers are JSON's; `None` stands for null where a template wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from engine.structured_output.layout import Layout
from engine.structured_output.matcher import ConstraintRefused
from engine.structured_output.spec import Grammar
from engine.tool_parsers.base import Tokens, ToolPlan, offered
from engine.tool_parsers.json_text import JsonStep, JsonText
from engine.tool_parsers.schemas import ALL_TYPES, Schema, json_types, resolve, type_of
from engine.tool_parsers.streaming import Body, NotACall, Reading, exactly, nonspace, only_space
from engine.tool_parsers.tools import Named, ToolChoice, ToolSpec

BEGIN, END, MARK = "<|tool_call>", "<tool_call|>", '<|"|>'
_KEY = r"[^:,{}\[\]<\n]+"
# Text without MARK: `<`, as often as it comes, begins a part that is not the rest of MARK.
_PART = r'<(?:[^<|][^<]*|\|(?:[^<"][^<]*|"(?:[^<|][^<]*|\|(?:[^<>][^<]*)?)?)?)?'
_RULES = f"""quoted: mark TEXT? mark
TEXT: /[^<]+(?:{_PART})*|(?:{_PART})+/
KEY: /{_KEY}/
INTEGER: /-?(?:0|[1-9][0-9]*)/
NUMBER: /-?(?:0|[1-9][0-9]*)(?:\\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/
boolean: "true" | "false"
null: "null" | "None"
list: "[" (any ("," any)*)? "]"
object: "{{" (KEY ":" any ("," KEY ":" any)*)? "}}"
any: quoted | NUMBER | boolean | null | list | object
"""
_TYPES = {"string": "quoted", "number": "NUMBER", "boolean": "boolean", "null": "null", "array": "list"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_CASES = ("anyOf", "oneOf")
_UNHELD = {  # by the type that they are of
    "string": ("pattern", "minLength", "maxLength", "format"),
    "array": ("uniqueItems", "contains", "prefixItems", "additionalItems", "unevaluatedItems"),
    "object": (
        *("minProperties", "maxProperties", "propertyNames", "patternProperties", "unevaluatedProperties"),
        *("dependentSchemas", "dependentRequired", "dependencies"),
    ),
}
_UNHELD_OF_ALL = ("allOf", "not", "if", "$dynamicRef", "$recursiveRef")
_NO_VALUE = ("description", "title", "default", "examples", "example", "$defs", "definitions", "$schema", "$id")


class Gemma4:
    name = "gemma4"
    tokens = (BEGIN, END, MARK)

    def __init__(self, tokens: Tokens) -> None:
        """Raises ValueError where a tag is not a token."""
        ids = [tokens.token_id(tag) for tag in self.tokens]
        if None in ids:
            raise ValueError(f"{self.tokens[ids.index(None)]} is not a token")
        self._begin, self._end, self._mark = (id for id in ids if id is not None)

    def plan(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, parallel: bool = True, loose: Set[str] = frozenset()
    ) -> ToolPlan:
        """See `ToolParser`."""
        chosen = offered(tools, choice, loose)
        layout = Layout(
            begin=self._begin,
            end=self._end,
            free=choice == "auto",
            several=parallel and not isinstance(choice, Named),
            shows_control=True,
        )
        return ToolPlan(layout, _calls(chosen, loose, self._mark), lambda: Body(_call))


def _calls(tools: Iterable[ToolSpec], loose: Set[str], mark: int) -> Grammar:
    """Returns the constraint of a call of one of these tools. Raises ConstraintRefused."""
    rules: list[str] = []
    bodies = [f'"{tool.name}" {"object" if tool.name in loose else _Rules(tool, rules).arguments()}' for tool in tools]
    start = f'start: "call:" ({" | ".join(bodies)})\nmark: <[{mark}]>\n'
    return Grammar(start + _RULES + "".join(rules), (mark,))


class _Rules:
    """Writes a tool's schema in Lark, as further rules of `rules`."""

    def __init__(self, tool: ToolSpec, rules: list[str]) -> None:
        self._tool = tool
        self._rules = rules
        self._root = tool.arguments
        self._references: dict[str, str] = {}

    def arguments(self) -> str:
        """Returns the rule of the arguments, which are an object."""
        return self._value({**self._root, "type": "object"}, "parameters")

    def _named(self, body: str) -> str:
        self._rules.append(f"r{len(self._rules)}: {body}\n")
        return f"r{len(self._rules) - 1}"

    def _value(self, schema: Any, at: str) -> str:
        """Returns an expression for the values of a schema. Any: a schema is an object or a boolean."""
        if schema is False:
            raise self._refused(f"{at}: no value is valid")
        if schema is True:
            return "any"
        schema = {key: part for key, part in schema.items() if key not in _NO_VALUE}
        if len(schema.get("allOf", ())) == 1:  # as generators of schemas wrap a reference
            (only,) = schema.pop("allOf")
            return self._value(only if not schema else self._both(schema, only, at), at)
        if "$ref" in schema:
            self._check([key for key in schema if key not in ("$ref", "type")], at)
            return self._reference(schema["$ref"], at)
        types = json_types(schema)
        unheld = [*_UNHELD_OF_ALL, *(key for kind in types for key in _UNHELD.get(kind, ()))]
        self._check([key for key in unheld if key in schema], at)
        for key in _CASES:
            if key in schema:
                return self._cases(schema, key, at)
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if listed is not None:
            texts = [self._literal(value, at) for value in listed if type_of(value) in types]
            if not texts:
                raise self._refused(f"{at}: none of its values is valid")
            return f"({' | '.join(dict.fromkeys(texts))})"
        if types == ALL_TYPES and not {"properties", "items"} & schema.keys():
            return "any"
        return f"({' | '.join(self._typed(schema, kind, at) for kind in sorted(types))})"

    def _reference(self, ref: str, at: str) -> str:
        if ref not in self._references:
            target = resolve(self._root, ref)
            if target is None:
                raise self._refused(f"{at}: {ref} leads outside the schema")
            name = self._references[ref] = self._named("")
            body = self._value({**target, "type": "object"} if ref == "#" else target, at)
            self._rules[int(name[1:])] = f"{name}: {body}\n"
        return self._references[ref]

    def _cases(self, schema: Schema, key: str, at: str) -> str:
        """Returns any of the cases, each with what stands beside them."""
        beside = {name: part for name, part in schema.items() if name != key}
        cases = [case for case in schema[key] if case is not False]
        kinds = [kind for case in cases for kind in (ALL_TYPES if case is True else json_types(case))]
        apart = len(kinds) == len(set(kinds)) and not any(case is True or "$ref" in case for case in cases)
        self._check([] if key == "anyOf" or apart else [key], at)
        return f"({' | '.join(self._value(self._both(beside, case, at), at) for case in cases)})"

    def _both(self, one: Schema, other: Any, at: str) -> Any:
        """Returns the schema of values that are valid against both, where that is plain. Any: JSON."""
        if not isinstance(other, Mapping):
            return one if other else False
        if not one:
            return other
        merged = {**one, **other}
        if "properties" in one and "properties" in other and "additionalProperties" in merged:
            self._check(["additionalProperties"], at)  # which counts the properties beside it alone
        for key in one.keys() & other.keys():
            if key == "required":
                merged[key] = list(dict.fromkeys([*one[key], *other[key]]))
            elif key == "properties" and not one[key].keys() & other[key].keys():
                merged[key] = {**one[key], **other[key]}
            elif one[key] != other[key]:
                self._check([key], at)
        return merged

    def _typed(self, schema: Schema, kind: str, at: str) -> str:
        """Returns the values of one type."""
        if kind == "object":
            return self._object(schema, at)
        if kind == "array":
            return self._list(schema, at)
        if kind != "number":
            return _TYPES[kind]
        named = schema.get("type", "number")
        whole = named == "integer" or (isinstance(named, list) and "integer" in named and "number" not in named)
        bounds = {key: schema[key] for key in _BOUNDS if key in schema}
        if not bounds:
            return "INTEGER" if whole else "NUMBER"
        return self._named(f"%json {json.dumps({'type': 'integer' if whole else 'number', **bounds})}")

    def _list(self, schema: Schema, at: str) -> str:
        items = schema.get("items", True)
        if isinstance(items, list):
            self._check(["items"], at)
            items = True
        least, most = (int(schema.get(key, default)) for key, default in (("minItems", 0), ("maxItems", -1)))
        if most == 0:
            return '"[" "]"'
        item = self._named(self._value(items, f"{at}[]"))
        more = f'("," {item}){{{max(0, least - 1)},{"" if most < 0 else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _object(self, schema: Schema, at: str) -> str:
        properties, required = dict(schema.get("properties", {})), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        for key in required:
            properties.setdefault(key, others)
        if not properties:
            if others is True or others == {}:
                return '"{" "}"' if "properties" in schema else "object"
            if others is False:
                return '"{" "}"'
            entry = self._named(f'KEY ":" {self._value(others, f"{at}.*")}')
            return f'"{{" ({entry} ("," {entry})*)? "}}"'
        fields = list[tuple[str, bool]]()
        for key, part in sorted(properties.items(), key=lambda each: each[0].lower()):
            if part is False and key not in required:
                continue
            fields.append((f"{self._key(key, at)} {self._value(part, f'{at}.{key}')}", key in required))
        return f'"{{" {self._fields(fields)} "}}"'

    def _key(self, key: str, at: str) -> str:
        """Returns exactly this key and its colon."""
        if not re.fullmatch(_KEY, key):
            raise self._refused(f"{at}: the key {key!r} cannot stand in a call")
        return json.dumps(f"{key}:", ensure_ascii=False)

    def _fields(self, fields: Sequence[tuple[str, bool]]) -> str:
        """Returns fields in order, those that are not required or not, with commas between."""
        first = following = '""'
        for written, required in reversed(fields):
            field = self._named(written)
            alone = f"{field} {following}"
            first = self._named(alone if required else f"{alone} | {first}")
            following = self._named(f'"," {field} {following}' if required else f'("," {field})? {following}')
        return first

    def _literal(self, value: Any, at: str) -> str:
        """Returns exactly this value. Any: JSON."""
        if isinstance(value, str):
            if MARK in value:
                raise self._refused(f"{at}: the value {value!r} cannot stand in a call")
            return f"mark {json.dumps(value, ensure_ascii=False)} mark" if value else "mark mark"
        if isinstance(value, Mapping):
            keys = sorted(value, key=str.lower)
            fields = ' "," '.join(f"{self._key(key, at)} {self._literal(value[key], at)}" for key in keys)
            return f'"{{" {fields} "}}"'
        if isinstance(value, list):
            items = ' "," '.join(self._literal(item, at) for item in value)
            return f'"[" {items} "]"'
        return "null" if value is None else json.dumps(json.dumps(value))

    def _check(self, keywords: Sequence[str], at: str) -> None:
        """Refuses a strict tool with keywords that would be ignored."""
        if keywords and self._tool.strict:
            raise self._refused(*(f"{at}: {keyword} cannot be held" for keyword in dict.fromkeys(keywords)))

    def _refused(self, *reasons: str) -> ConstraintRefused:
        return ConstraintRefused(
            [f"tool {self._tool.name!r}: {reason} in this model's tool calls" for reason in reasons]
        )


_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}


def _call(body: Body) -> Reading[None]:
    """Reads one call; its arguments become JSON while they are read."""
    if (yield from nonspace()) != "c":
        raise NotACall
    body.candidate()
    yield from exactly("all:")
    name = ""
    while (character := (yield)) != "{":
        if character in "<}\n":
            raise NotACall
        name += character
    if not name:
        raise NotACall
    body.begin(name)
    yield from _arguments(body)
    body.finish()
    yield from only_space()


def _arguments(body: Body) -> Reading[None]:
    """Reads the rest of an object whose brace has been read. Nesting is a list and not the call stack."""
    closers = ["}"]
    body.give("{")
    character = yield from nonspace()
    while True:
        if character != closers[-1]:  # else it is empty
            if closers[-1] == "}":
                key = yield from _key(character)
                body.give(f"{json.dumps(key, ensure_ascii=False)}: ")
                character = yield from nonspace()
            if character in "{[":
                body.give(character)
                closers.append("}" if character == "{" else "]")
                character = yield from nonspace()
                continue
            character = yield from _scalar(body, character, closers[-1])
        while character == closers[-1]:
            body.give(character)
            closers.pop()
            if not closers:
                return
            character = yield from nonspace()
        if character != ",":
            raise NotACall
        body.give(", ")
        if (character := (yield from nonspace())) == closers[-1]:
            raise NotACall


def _key(character: str) -> Reading[str]:
    """Reads a key and its colon; it may be quoted as a string is."""
    key = ""
    if character == MARK[0]:
        yield from exactly(MARK[1:])
        while not key.endswith(MARK):
            key += yield
        yield from exactly(":")
        return key.removesuffix(MARK)
    while character != ":":
        if character in ",{}[]<\n":
            raise NotACall
        key += character
        character = yield
    return key


def _scalar(body: Body, character: str, closer: str) -> Reading[str]:
    """Reads a value that is no list and no object; returns the next character after it that is no white space."""
    if character == MARK[0]:
        yield from exactly(MARK[1:])
        body.give('"')
        yield from _text(body)
        body.give('"')
        return (yield from nonspace())
    word = ""
    while character not in ",]}":
        word += character
        character = yield
    word = word.rstrip()
    if character not in ("," + closer) or (word not in _WORDS and not _is_number(word)):
        raise NotACall
    body.give(_WORDS.get(word, word))
    return character


def _text(body: Body) -> Reading[None]:
    """Reads raw text up to `MARK`, and passes it on escaped. Text that may yet be `MARK` waits."""
    matched = 0
    while matched < len(MARK):
        character = yield
        if character == MARK[matched]:
            matched += 1
            continue
        text, matched = MARK[:matched], int(character == MARK[0])
        text += "" if matched else character
        if text:
            body.give(json.dumps(text, ensure_ascii=False)[1:-1])


def _is_number(word: str) -> bool:
    text = JsonText()
    steps = [text.feed(character) for character in f"{word} "] if word[:1] in "-0123456789" else []
    return bool(word) and steps[-1:] == [JsonStep.PAST] and set(steps[:-1]) == {JsonStep.MORE}
