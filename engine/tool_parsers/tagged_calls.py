"""Reads calls written in tags: `<function=NAME>`, `<parameter=KEY>`, a line with the value, `</parameter>` and so on.

The arguments become a JSON object while they are read. A value that can only be a string is raw text up to the first
`STOP`, escaped on the way, or the word null where it may be null. Other values are JSON and passed on as written; one
that is not JSON after all ends the call there. A parameter that the tool does not list is a string, unless the tool
says otherwise, and so is every parameter of an unknown tool. A parameter given twice is passed on twice, and JSON's
readers take the last. A list of values can be enforced on raw text, but not `pattern`, `minLength` and the like:
`RawValue.unheld` names the keywords given up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import reduce
from typing import Any

from engine.tool_parsers.json_text import SPACE, JsonStep, JsonText
from engine.tool_parsers.schemas import ALL_TYPES, Schema, json_types, resolve, type_of
from engine.tool_parsers.streaming import Body, NotACall, Reading, exactly, nonspace, only_space

STOP = "\n</parameter>\n"  # of its characters only the first and the last are line breaks


class Notation(Enum):
    """The notation of a parameter's value."""

    TEXT = auto()  # raw
    TEXT_OR_NULL = auto()  # raw, but the word null is null
    JSON = auto()


@dataclass(frozen=True, slots=True)
class Notations:
    """The notations of one tool's values: those of its parameters, and any others."""

    parameters: Mapping[str, Notation] = field(default_factory=dict)
    others: Notation = Notation.TEXT


def tagged_call(notations: Mapping[str, Notations]) -> Body:
    """A parser of bodies that are one call of one of these tools, or of an unknown one."""
    return Body(lambda body: _call(body, notations))


def _call(body: Body, notations: Mapping[str, Notations]) -> Reading[None]:
    if (yield from nonspace()) != "<":
        raise NotACall
    body.candidate()
    yield from exactly("function=")
    name = yield from _name()
    known = notations.get(name, Notations())
    body.begin(name)
    body.give("{")
    separator = ""
    while (yield from _next_tag()) == "parameter":
        key = yield from _name()
        yield from exactly("\n")
        opening = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
        separator = ", "
        notation = known.parameters.get(key, known.others)
        if notation is Notation.JSON:
            body.give(opening)
            yield from _json(body)
        else:
            yield from _text(body, opening, nullable=notation is Notation.TEXT_OR_NULL)
    body.give("}")
    body.finish()
    yield from only_space()


def _next_tag() -> Reading[str]:
    """Tells the next tag: `<parameter=` or `</function>`."""
    if (yield from nonspace()) != "<":
        raise NotACall
    if (character := (yield)) == "/":
        yield from exactly("function>")
        return "/function"
    if character != "p":
        raise NotACall
    yield from exactly("arameter=")
    return "parameter"


def _name() -> Reading[str]:
    """The rest of a tag that names something, its closing bracket included."""
    name = ""
    while (character := (yield)) != ">":
        if character in "<\n":
            raise NotACall
        name += character
    if not name:
        raise NotACall
    return name


def _json(body: Body) -> Reading[None]:
    """A JSON value, and the tag that closes it."""
    text = JsonText()
    step = JsonStep.MORE
    while step is JsonStep.MORE:
        character = yield
        if (step := text.feed(character)) in (JsonStep.MORE, JsonStep.END):
            body.give(character)
    if step is JsonStep.BAD or (step is JsonStep.PAST and character not in SPACE):
        raise NotACall
    if (yield from nonspace()) != "<":
        raise NotACall
    yield from exactly("/parameter>")


def _text(body: Body, opening: str, *, nullable: bool) -> Reading[None]:
    """Raw text up to `STOP`, as a JSON string. Text that may yet be `STOP`, or the word null, waits."""
    waiting = ""  # the text so far while it may be the word null
    begun = False
    matched = 0
    while matched < len(STOP):
        character = yield
        if character == STOP[matched]:
            matched += 1
            continue
        text, matched = STOP[:matched], 0
        if character == STOP[0]:
            matched = 1
        else:
            text += character
        waiting += text
        if not text or (nullable and not begun and "null".startswith(waiting)):
            continue
        body.give(("" if begun else opening + '"') + _escaped(waiting))
        begun, waiting = True, ""
    if begun:
        body.give('"')
    elif nullable and waiting == "null":
        body.give(opening + "null")
    else:
        body.give(f'{opening}"{_escaped(waiting)}"')


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


_OF_STRINGS = ("pattern", "minLength", "maxLength", "format")
_UNREAD = ("not", "if", "$dynamicRef", "$recursiveRef")


@dataclass(frozen=True, slots=True)
class RawValue:
    """A schema's facts of a value: its types, all its values where they are listed, and the keywords that raw text
    gives up."""

    types: frozenset[str] = ALL_TYPES
    values: tuple[Any, ...] | None = None  # Any: JSON
    unheld: tuple[str, ...] = ()

    @property
    def raw(self) -> bool:
        return "string" in self.types and self.types <= {"string", "null"}

    @property
    def nullable(self) -> bool:
        return "null" in self.types

    def also(self, other: RawValue) -> RawValue:
        """Returns the facts that both have."""
        types = self.types & other.types
        if self.values is None or other.values is None:
            values = other.values if self.values is None else self.values
        else:
            values = tuple(value for value in self.values if value in other.values)
        values = None if values is None else tuple(value for value in values if type_of(value) in types)
        if values is not None:
            types = frozenset(map(type_of, values))
        return RawValue(types, values, tuple(dict.fromkeys(self.unheld + other.unheld)))

    def either(self, other: RawValue) -> RawValue:
        """Returns the facts of one or the other."""
        mine, others = self._listed, other._listed
        values = None if mine is None or others is None else (*mine, *(value for value in others if value not in mine))
        return RawValue(self.types | other.types, values, tuple(dict.fromkeys(self.unheld + other.unheld)))

    @property
    def _listed(self) -> tuple[Any, ...] | None:
        """Any: JSON."""
        return (None,) if self.values is None and self.types == {"null"} else self.values


_NOTHING = RawValue(frozenset(), ())


def raw_value(schema: Any, root: Schema, seen: frozenset[str] = frozenset()) -> RawValue:
    """Any: a schema is an object or a boolean. `root` resolves its references."""
    if schema is False:
        return _NOTHING
    if schema is True:
        return RawValue()
    here = RawValue(json_types(schema), unheld=tuple(key for key in (*_OF_STRINGS, *_UNREAD) if key in schema))
    for listed in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if listed is not None:
            here = here.also(RawValue(values=tuple(listed)))
    if isinstance(ref := schema.get("$ref"), str):
        target = None if ref in seen else resolve(root, ref)
        here = here.also(RawValue(unheld=("$ref",)) if target is None else raw_value(target, root, seen | {ref}))
    for part in schema.get("allOf", ()):
        here = here.also(raw_value(part, root, seen))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            here = here.also(_cases(key, [raw_value(part, root, seen) for part in schema[key]]))
    return here


def _cases(key: str, cases: Sequence[RawValue]) -> RawValue:
    together = reduce(RawValue.either, cases, _NOTHING)
    texts = [case for case in cases if "string" in case.types]
    values = [value for case in texts for value in case.values or ()]
    overlap = any(case.values is None for case in texts) or len(values) != len(set(map(str, values)))
    if key == "oneOf" and len(texts) > 1 and overlap:
        return together.also(RawValue(unheld=("oneOf",)))
    return together
