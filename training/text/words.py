"""Words that fill the templates: the lists of words.toml, and made-up words so that copying is not remembering."""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random

_LISTS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))

NAMES: tuple[str, ...] = tuple(_LISTS["names"])
HELD_OUT_NAMES: tuple[str, ...] = tuple(_LISTS["held_out_names"])
THINGS: tuple[str, ...] = tuple(_LISTS["things"])
HELD_OUT_THINGS: tuple[str, ...] = tuple(_LISTS["held_out_things"])
GOODS: tuple[str, ...] = tuple(_LISTS["goods"])
PET_NAMES: tuple[str, ...] = tuple(_LISTS["pet_names"])
PETS: tuple[str, ...] = tuple(_LISTS["pets"])
RELATIVES: tuple[str, ...] = tuple(_LISTS["relatives"])
CITIES: tuple[str, ...] = tuple(_LISTS["cities"])
COUNTRIES: tuple[str, ...] = tuple(_LISTS["countries"])
JOBS: tuple[str, ...] = tuple(_LISTS["jobs"])
TOPICS: tuple[str, ...] = tuple(_LISTS["topics"])
POSSESSIONS: tuple[str, ...] = tuple(_LISTS["possessions"])
HELD_OUT_POSSESSIONS: tuple[str, ...] = tuple(_LISTS["held_out_possessions"])
VEHICLES: tuple[str, ...] = tuple(_LISTS["vehicles"])
HELD_OUT_VEHICLES: tuple[str, ...] = tuple(_LISTS["held_out_vehicles"])
MEALS: tuple[str, ...] = tuple(_LISTS["meals"])
DISHES: tuple[str, ...] = tuple(_LISTS["dishes"])
APPOINTMENTS: tuple[str, ...] = tuple(_LISTS["appointments"])
HELD_OUT_APPOINTMENTS: tuple[str, ...] = tuple(_LISTS["held_out_appointments"])
WEEKDAYS: tuple[str, ...] = tuple(_LISTS["weekdays"])
MONTHS: tuple[str, ...] = tuple(_LISTS["months"])
ALLERGIES: tuple[str, ...] = tuple(_LISTS["allergies"])
LANGUAGES: tuple[str, ...] = tuple(_LISTS["languages"])
MEETING_PLACES: tuple[str, ...] = tuple(_LISTS["meeting_places"])
PLURAL_THINGS: tuple[str, ...] = tuple(_LISTS["plural_things"])
HELD_OUT_PLURAL_THINGS: tuple[str, ...] = tuple(_LISTS["held_out_plural_things"])
PLACES: tuple[str, ...] = tuple(_LISTS["places"])
FAVOURITES: dict[str, tuple[str, ...]] = {thing: tuple(values) for thing, values in _LISTS["favourites"].items()}

_ONSETS = (*"bcdfghjklmnprstvwz", "br", "ch", "cl", "dr", "fl", "gr", "kr", "pl", "sh", "st", "th", "tr")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ee", "io", "oo", "ou")
_CODAS = ("", "", "", "n", "r", "s", "l", "m", "x", "k", "t", "nd", "rt")


def made_up(rng: Random, syllables: int | None = None) -> str:
    """Makes up a pronounceable word, in lower case."""
    count = syllables or rng.randint(1, 3)
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))


def proper_name(rng: Random, known: tuple[str, ...], invented: float = 0.4) -> str:
    """One of `known`, or with probability `invented` a made-up name."""
    return made_up(rng, rng.randint(2, 3)).capitalize() if rng.random() < invented else rng.choice(known)
