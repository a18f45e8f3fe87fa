"""Unheard-of things: made-up towns, people, laws and gadgets, and values for the facts about them.

A name is of the training or of the evaluation by a checksum of its letters, so the two never share one. The parts are
in `fact_values.toml`. Knows nothing of sentences.
"""

from __future__ import annotations

import tomllib
import zlib
from pathlib import Path
from random import Random

from training.conversation import Phrasing
from training.text import words

_DATA = tomllib.loads(Path(__file__).with_name("fact_values.toml").read_text(encoding="utf-8"))
_PARTS: dict[str, list[str]] = _DATA["parts"]
VALUES: dict[str, list[str]] = _DATA["values"]
_BEASTS = ("toad", "lizard", "owl", "beetle", "mouse", "gull", "newt", "moth", "deer", "frog", "finch", "shark", "bat")

# Patterns of the names, and other ways to call the thing. P a place, L a surname, F a first name, T a title, p a word.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "town": (("{P}",), ("the town", "the place", "the city")),
    "river": (("the {P}", "the River {P}", "the {P} River"), ("the river", "the stream")),
    "mountain": (("Mount {P}", "{P} Peak", "the {P}horn"), ("the mountain", "the peak")),
    "lake": (("Lake {P}", "{P} Lake"), ("the lake",)),
    "island": (("{P} Island", "the island of {P}", "{P}"), ("the island",)),
    "person": (("{F} {L}", "{F} {L}", "{F} {L}", "{F} {P}"), ()),
    "company": (("{L} & Sons", "{P} Industries", "the {L} Group", "{P} Ltd", "{P}"), ("the company", "the firm")),
    "species": (("the {P} {B}", "the {L} {B}", "the {A} {B}"), ("the species", "the animal")),
    "battle": (("the Battle of {P}", "the Siege of {P}"), ("the battle", "the fighting")),
    "law": (("the {P} Act", "the {L} Law", "the {P} Charter"), ("the law",)),
    "book": (("{T}",), ("the book", "the novel")),
    "film": (("{T}",), ("the film",)),
    "band": (("The {N}s", "{P}", "{T}"), ("the band", "the group")),
    "team": (("{P} United", "{P} Rovers", "FC {P}", "the {P} {N}s"), ("the team", "the club")),
    "school": (("{P} College", "the {L} School", "the University of {P}"), ("the school",)),
    "museum": (("the {P} Museum", "the {L} Gallery"), ("the museum",)),
    "festival": (("the {P} Festival", "{L} Day", "the {P} Fair"), ("the festival",)),
    "device": (("the {P} {D}", "the {P} X{D}", "the {L} {D}"), ("the device", "the machine")),
    "building": (("{P} Hall", "the {L} Tower", "{P} Castle", "the Church of {P}"), ("the building",)),
    "bridge": (("the {P} Bridge", "the {L} Viaduct"), ("the bridge",)),
    "ship": (("the {P}", "the {C}"), ("the ship", "the vessel")),
    "software": (("{P}", "{P}DB", "Open{P}", "{p}d"), ("the program", "the software")),
    "disease": (("{P} fever", "{L} syndrome", "{p} pox"), ("the disease", "the illness")),
    "mineral": (("{p}ite", "{p}ium"), ("the mineral",)),
    "dish": (("{p}", "{P} stew", "{P} pie"), ("the dish",)),
    "planet": (("{P}", "{P} {D}"), ("the planet",)),
    "project": (("Project {P}", "the {P} report", "the {A} {N} project"), ("the project",)),
    "room": (("the {P} room", "Room {D}", "the {L} hall"), ("the room",)),
    "venue": (("{P} Park", "the {L} Arena", "{P} Road"), ()),
    "place": (("{P}",), ()),
}


def is_held_out(name: str) -> bool:
    """Returns whether a name belongs to the evaluation."""
    return zlib.crc32(name.lower().encode()) % 4 == 0


def _place(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(_PARTS["starts"]) + rng.choice(_PARTS["ends"])
    if kind < 0.6:
        return rng.choice((*words.CITIES, *words.COUNTRIES))
    return words.made_up(rng, rng.randint(2, 3)).capitalize()


def _surname(rng: Random) -> str:
    return rng.choice(_PARTS["surnames"]) if rng.random() < 0.8 else words.made_up(rng, 2).capitalize()


def _fill(rng: Random, pattern: str) -> str:
    adjective, noun = rng.choice(_PARTS["adjectives"]), rng.choice(_PARTS["nouns"])
    title = f"{rng.choice(('The ', 'The ', ''))}{adjective.capitalize()} {noun.capitalize()}"
    if rng.random() < 0.3:
        title = f"The {noun.capitalize()} of {_place(rng)}"
    return (
        pattern.replace("{P}", _place(rng))
        .replace("{L}", _surname(rng))
        .replace("{F}", rng.choice(words.NAMES))
        .replace("{T}", title)
        .replace("{C}", f"{adjective.capitalize()} {noun.capitalize()}")
        .replace("{A}", adjective)
        .replace("{N}", noun.capitalize())
        .replace("{B}", rng.choice(_BEASTS))
        .replace("{D}", str(rng.randint(2, 999)))
        .replace("{p}", words.made_up(rng, rng.randint(2, 3)))
    )


def name(rng: Random, kind: str, phrasing: Phrasing) -> str:
    while True:
        made = _fill(rng, rng.choice(KINDS[kind][0]))
        if is_held_out(made) == (phrasing == "held_out"):
            return made


def _count(rng: Random) -> str:
    number = rng.randrange(10 ** rng.randint(1, 5), 10 ** rng.randint(2, 6) + 10**5)
    number = number if rng.random() < 0.4 else rng.randrange(100, 9999)
    return f"{number:,}" if number > 9999 or rng.random() < 0.5 else str(number)


def _date(rng: Random) -> str:
    day, month, year = rng.randint(1, 28), rng.choice(VALUES["month"]), rng.randint(1400, 2030)
    return rng.choice((f"{day} {month} {year}", f"{month} {day}, {year}", f"{day} {month}"))


def _money(rng: Random) -> str:
    amount = rng.choice((f"{rng.randint(2, 990)}", f"{rng.randint(2, 99)}.{rng.randint(1, 9)} million", _count(rng)))
    return rng.choice((f"${amount}", f"€{amount}", f"{amount} euros", f"{amount} crowns", f"{amount} dollars"))


def value(rng: Random, maker: str, phrasing: Phrasing) -> str:
    """One value of the sort `maker`: a name, a number, or an entry of the list of that name."""
    if maker in KINDS:
        return name(rng, maker, phrasing).removeprefix("the ") if maker == "river" else name(rng, maker, phrasing)
    if maker == "year":
        return str(rng.randint(1100, 2025))
    if maker == "small":
        return str(rng.randint(3, 480))
    if maker == "few":
        return rng.choice(("two", "three", "four", "five", "six", "seven", "eight", "nine", str(rng.randint(2, 40))))
    if maker == "count":
        return _count(rng)
    if maker == "date":
        return _date(rng)
    if maker == "money":
        return _money(rng)
    if maker == "price":
        return rng.choice(("{} euros", "${}", "{} dollars", "€{}", "{} pounds")).format(rng.randint(3, 900))
    if maker == "period":
        return f"{rng.randint(2, 36)} {rng.choice(('months', 'years', 'weeks'))}"
    return _fill(rng, rng.choice(VALUES[maker]))
