"""Calls written in tags: `<function=NAME>`, then `<parameter=KEY>`, a line with the value, `</parameter>`, and so on.

The arguments become a JSON object while they are read. A string stands as raw text that ends at the first `STOP`; it is
escaped on the way. Other values are JSON and passed on as written; one that is not JSON after all ends the call there.
A parameter that the tool does not list is a string, unless the tool says otherwise, and so is every parameter of an
unknown tool. A parameter given twice is passed on twice, and JSON's readers take the last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.dialects.body import Body, NotACall, Reading, exactly, nonspace, only_space
from engine.dialects.json_text import SPACE, JsonText, Step

STOP = "\n</parameter>\n"  # of its characters only the first and the last are line breaks


class Notation(Enum):
    """How a parameter's value is written."""

    TEXT = auto()  # raw
    TEXT_OR_NULL = auto()  # raw, but the word null is null
    JSON = auto()


@dataclass(frozen=True, slots=True)
class Notations:
    """How one tool's values are written: those of its parameters, and any others."""

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
    """Which comes: `<parameter=` or `</function>`."""
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
    step = Step.MORE
    while step is Step.MORE:
        character = yield
        if (step := text.feed(character)) in (Step.MORE, Step.END):
            body.give(character)
    if step is Step.BAD or (step is Step.PAST and character not in SPACE):
        raise NotACall
    if (yield from nonspace()) != "<":
        raise NotACall
    yield from exactly("/parameter>")


def _text(body: Body, opening: str, *, nullable: bool) -> Reading[None]:
    """Raw text up to `STOP`, as a JSON string. What may yet be `STOP`, or the word null, waits."""
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
