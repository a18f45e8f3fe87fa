"""The bank of tools: the purpose, parameters and user requests of each, read from the TOML files beside this.

    [travel.distance]                              domain and key
    names = ["distance between"]                   words, written later as distance_between, distanceBetween, …
    params = ["b|to|end: city - Second place",     name|another: kind - description
              "unit?: km/miles = km"]              ? optional, = default
    asks = ["How far is it from {a} to {b}?",      {first name of a parameter}
            "mute the speaker | level=0"]          | implied value

Concepts of held_out.toml are only ever evaluated on; frames.toml holds shapes that `made` fills with a thing and an
attribute. Knows nothing of chats.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from training.conversation import Phrasing
from training.tool_bank import values

_HERE = Path(__file__).parent
_PARAM = re.compile(
    r"(?P<names>[^?:]+)(?P<optional>\??): (?P<kind>.+?)(?: = (?P<default>\S+))?(?: - (?P<description>.+))?"
)
_NUMBERS = frozenset({"int", "num", "amount"})
_SLOT = re.compile(r"\{([^}]+)\}")
_TELLING = frozenset({"get", "measure", "find", "log"})  # shapes that could answer a question of composed.toml
_ARTICLE = re.compile(r"\ba (?=[aeio]|u(?!ni))")


@dataclass(frozen=True, slots=True)
class Param:
    names: tuple[str, ...]
    kind: str
    required: bool
    default: Any
    description: str


@dataclass(frozen=True, slots=True)
class Ask:
    template: str
    implied: tuple[tuple[str, Any], ...]

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(_SLOT.findall(self.template))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(self.slots) | {name for name, _ in self.implied}


@dataclass(frozen=True, slots=True)
class Concept:
    """`about` is the thing a made-up tool speaks of, "" for those of the bank."""

    key: str
    names: tuple[str, ...]
    does: tuple[str, ...]
    params: tuple[Param, ...]
    asks: tuple[Ask, ...]
    gives: tuple[Param, ...]
    about: str = ""

    @property
    def domain(self) -> str:
        return self.key.split(".")[0]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _param(line: str) -> Param:
    match = _PARAM.fullmatch(line)
    if not match:
        raise ValueError(f"no parameter: {line}")
    default = match["default"]
    return Param(
        names=tuple(match["names"].split("|")),
        kind=match["kind"],
        required=not match["optional"],
        default=None if default is None else _value(default),
        description=match["description"] or "",
    )


def _ask(line: str) -> Ask:
    template, _, implied = line.partition(" | ")
    pairs = (pair.split("=") for pair in implied.split())
    return Ask(template, tuple((name, _value(value)) for name, value in pairs))


def _concept(key: str, table: dict[str, list[str]], about: str = "") -> Concept:
    return Concept(
        key=key,
        names=tuple(table["names"]),
        does=tuple(table["does"]),
        params=tuple(map(_param, table["params"])),
        asks=tuple(map(_ask, table["asks"])),
        gives=tuple(map(_param, table.get("gives", []))),
        about=about,
    )


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((_HERE / f"{name}.toml").read_text(encoding="utf-8"))


@lru_cache
def concepts(phrasing: Phrasing) -> tuple[Concept, ...]:
    """The written tools of one part."""
    files = ("everyday", "media_work", "knowledge") if phrasing == "train" else ("held_out",)
    return tuple(
        _concept(f"{domain}.{key}", table)
        for name in files
        for domain, tables in _read(name).items()
        for key, table in tables.items()
    )


@lru_cache
def _frames(phrasing: Phrasing) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = _read("frames")[phrasing]
    return tables


def frames(phrasing: Phrasing) -> tuple[str, ...]:
    return tuple(_frames(phrasing))


def plural(noun: str) -> str:
    if noun.endswith(("s", "x", "z", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def thing(rng: Random, phrasing: Phrasing) -> str:
    """A thing for made-up tools: a word of the list, two in a row, or a made-up word."""
    roll = rng.random()
    nouns = values.bank("thing", phrasing)
    if roll < 0.2:
        return values.made_up(rng, phrasing)
    if roll < 0.3:
        return f"{rng.choice(nouns)}_{rng.choice(nouns)}"
    return rng.choice(nouns)


def made(rng: Random, phrasing: Phrasing, frame: str, noun: str) -> Concept:
    """The made-up tool of one shape about one thing, with an attribute sampled for it."""
    shape = _frames(phrasing)[frame]
    attributes = values.bank("attribute", phrasing)
    if shape.get("measured"):
        attributes = tuple(name for name in attributes if values.ATTRIBUTES[name].split()[0] in _NUMBERS)
    attribute = rng.choice(attributes)
    spoken = noun.replace("_", " ")

    def fill(line: str) -> str:
        # In the names of parameters and places a thing of two words keeps its underscore.
        line = _SLOT.sub(lambda slot: slot[0].replace("<ns>", plural(noun)).replace("<n>", noun), line)
        line = line.replace("<ns>", plural(spoken)).replace("<n>", spoken).replace("<k>", values.ATTRIBUTES[attribute])
        return _ARTICLE.sub("an ", line.replace("<a>", attribute))

    def fill_param(line: str) -> str:
        names, colon, rest = line.partition(": ")
        return names.replace("<ns>", plural(noun)).replace("<n>", noun).replace("<a>", attribute) + colon + fill(rest)

    table = {
        part: [fill_param(line) if part in {"params", "gives"} else fill(line) for line in lines]
        for part, lines in shape.items()
        if part != "measured"
    }
    return _concept(f"{phrasing}.{frame}", table, about=noun)


@lru_cache
def _rivals() -> tuple[frozenset[str], ...]:
    document = _read("rivals")
    pairs = [frozenset((document["found_by"], key)) for key in document["found"]]
    return (*pairs, *map(frozenset, document["groups"]))


def rivals(one: Concept, other: Concept) -> bool:
    """Returns whether either might answer a request for the other, so that the two may not meet."""
    if one.about != other.about:
        return False
    shapes = {one.key.split(".")[1].split("_")[0], other.key.split(".")[1].split("_")[0]} if one.about else set()
    if "question" in shapes and shapes & _TELLING:
        return True
    return one.key == other.key or any({one.key, other.key} <= group for group in _rivals())
