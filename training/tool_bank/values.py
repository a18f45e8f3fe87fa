"""Values for the places of a request: the user's text and the call's argument.

Sample: kind "list city" → Value("Oslo, Rome and Varu", ["Oslo", "Rome", "Varu"]). A value is held out of training when
the sum of its letters' codes says so, so training and evaluation share no name, word or thing. Knows nothing of tools.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from training.conversation import Phrasing
from training.text import words

_BANK = tomllib.loads(Path(__file__).with_name("values.toml").read_text(encoding="utf-8"))
_SHARED = {"city": words.CITIES, "person": words.NAMES, "country": words.COUNTRIES}
_COMMON = frozenset({"weekday", "month", "near_day", "extension", "currency", "language"})
_INVENTED = {"city": 0.35, "person": 0.25, "company": 0.5, "team": 0.3, "petname": 0.3}
_NUMBER_KINDS = frozenset({"int", "num", "amount"})
TEXTS = frozenset({"text", "todo"})  # free text: it may hold anything, so nothing is written after it
_NAMES = ("city", "person", "country", "company", "product", "dish", "animal", "element", "chemical", "fullname")
JOINABLE = frozenset((*_NAMES, "language", "file", "email", "code", "ticker", "made", "topic", "handle", "word", "int"))
IMPERATIVES = frozenset(_BANK["imperative"]["all"].split())
ATTRIBUTES: dict[str, str] = _BANK["attribute"]


@dataclass(frozen=True, slots=True)
class Value:
    text: str
    json: Any


def held_out(word: str) -> bool:
    """Returns whether this word is only for evaluation: about every fifth is."""
    return sum(map(ord, word.lower())) % 5 == 0


@lru_cache
def bank(kind: str, phrasing: Phrasing) -> tuple[str, ...]:
    """The listed values of a kind; the days, currencies and such that everyone shares are in both parts."""
    if kind == "thing":
        every: tuple[str, ...] = tuple(_BANK["things"]["all"].split())
    elif kind == "attribute":
        every = tuple(ATTRIBUTES)
    else:
        every = _SHARED.get(kind) or tuple(_BANK[kind])
    if kind in _COMMON:
        return every
    kept = {word for word in every if held_out(word)}
    if len(kept) < 2:  # a short list that the letters split badly
        kept = set(every[::5])
    return tuple(word for word in every if (word in kept) == (phrasing == "held_out"))


def made_up(rng: Random, phrasing: Phrasing, syllables: int | None = None) -> str:
    while True:
        word = words.made_up(rng, syllables or rng.randint(2, 3))
        if held_out(word) == (phrasing == "held_out"):
            return word


def _listed(rng: Random, kind: str, phrasing: Phrasing) -> str:
    if rng.random() < _INVENTED.get(kind, 0):
        return made_up(rng, phrasing).capitalize()
    return rng.choice(bank(kind, phrasing))


def _number(rng: Random, low: int, high: int) -> str:
    if high - low <= 1:
        return f"{low + rng.randint(1, 99) / 100:.2f}".rstrip("0")
    if rng.random() < 0.5:
        return str(rng.randint(low, high))
    return f"{rng.uniform(low, high):.{rng.randint(1, 2)}f}".rstrip("0").rstrip(".")


def _amount(rng: Random) -> str:
    whole = rng.choice((rng.randint(1, 99), rng.randint(100, 999), rng.randint(10, 90) * 100))
    return f"{whole}.{rng.randint(1, 99):02d}" if rng.random() < 0.3 else str(whole)


def _date(rng: Random, phrasing: Phrasing) -> str:
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(2023, 2029)
    name = bank("month", phrasing)[month - 1]
    styles = (
        f"{day} {name}",
        f"{name} {day}",
        f"{year}-{month:02d}-{day:02d}",
        f"{day} {name} {year}",
        f"{day}.{month}.",
    )
    return rng.choice(styles[:4])


def _code(rng: Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHKLMNPRSTUVWXZ") for _ in range(rng.randint(1, 3)))
    digits = str(rng.randint(10, 9999))
    return rng.choice(
        (f"{letters}-{digits}", f"{letters}{digits}", f"{digits}-{letters}", f"{letters.lower()}{digits}")
    )


def _text(rng: Random, phrasing: Phrasing) -> str:
    roll = rng.random()
    if roll < 0.5:
        return f"{_listed(rng, 'text_start', phrasing)} {_listed(rng, 'text_end', phrasing)}"
    if roll < 0.7:
        return f"{_listed(rng, 'thing', phrasing)} {made_up(rng, phrasing)} {_listed(rng, 'colour', phrasing)}"
    if roll < 0.85:
        return f"{_listed(rng, 'person', phrasing)} {_listed(rng, 'text_end', phrasing)}"
    return f"{_listed(rng, 'topic', phrasing)} and {_listed(rng, 'thing', phrasing)}s"


def _composed(rng: Random, kind: str, phrasing: Phrasing) -> str:
    person = _listed(rng, "person", phrasing)
    made = made_up(rng, phrasing)
    match kind:
        case "made":
            return made if rng.random() < 0.5 else made.capitalize()
        case "word":
            return rng.choice((made, _listed(rng, "thing", phrasing), _listed(rng, "colour", phrasing)))
        case "fullname":
            return f"{person} {made.capitalize()}"
        case "handle":
            return rng.choice((f"@{made}", f"{made}_{rng.randint(1, 99)}", f"{person.lower()}{rng.randint(1, 99)}"))
        case "email":
            return f"{person.lower()}@{made}.{rng.choice(('com', 'org', 'net', 'de', 'io'))}"
        case "url":
            return f"https://{made}.{rng.choice(('com', 'org', 'net'))}/{_listed(rng, 'thing', phrasing)}"
        case "domain":
            return f"{made}.{rng.choice(('com', 'org', 'net', 'dev'))}"
        case "ip":
            return ".".join(str(rng.randint(1, 254)) for _ in range(4))
        case "repo":
            return f"{made}/{_listed(rng, 'thing', phrasing)}"
        case "file" | "image" | "video":
            endings = {"image": ("png", "jpg"), "video": ("mp4", "mov")}.get(kind) or bank("extension", phrasing)
            stem = rng.choice((_listed(rng, "stem", phrasing), made, f"{made}_{rng.randint(1, 99)}"))
            return f"{stem}.{rng.choice(endings)}"
        case "folder":
            return rng.choice(
                (f"/{made}", f"/home/{person.lower()}/{made}", f"{made}/{_listed(rng, 'stem', phrasing)}")
            )
        case "phone":
            return rng.choice((f"+{rng.randint(10, 99)} {rng.randint(100, 999)} {rng.randint(1000, 9999)}",
                               f"0{rng.randint(10000, 999999)}", f"555-{rng.randint(1000, 9999)}"))  # fmt: skip
        case "plate":
            return f"{made[:2].upper()} {rng.randint(100, 9999)}"
        case "title":
            second = rng.choice((_listed(rng, "title_second", phrasing), made.capitalize()))
            return f"{_listed(rng, 'title_first', phrasing)} {second}"
        case "text":
            return _text(rng, phrasing)
        case "todo":
            return f"{_listed(rng, 'todo_verb', phrasing)} {_listed(rng, 'todo_object', phrasing)}"
        case "address":
            return (
                f"{rng.randint(1, 250)} {rng.choice((_listed(rng, 'street', phrasing), made.capitalize() + ' Street'))}"
            )
        case "time":
            minute = rng.choice((0, 15, 30, 45, rng.randint(0, 59)))
            hour = rng.randint(0, 23)
            return rng.choice(
                (f"{hour}:{minute:02d}", f"{hour % 12 + 1} {rng.choice(('am', 'pm'))}", f"{hour:02d}:{minute:02d}")
            )
        case "date":
            return _date(rng, phrasing)
        case "code":
            return _code(rng)
        case "ticker":
            return made[: rng.randint(3, 4)].upper()
        case "letter":
            return rng.choice("ABCDEFGH")
        case "square":
            return rng.choice("abcdefgh") + str(rng.randint(1, 8))
        case "score":
            return f"{rng.randint(0, 5)}:{rng.randint(0, 5)}"
    return _listed(rng, kind, phrasing)


def draw(rng: Random, kind: str, phrasing: Phrasing) -> Value:
    """A value of a kind: the name of a list, "int 1 9", "num 0 1", "list KIND", "bool", or "one/two/three"."""
    base, *rest = kind.split()
    if base == "list":
        items = [draw(rng, " ".join(rest), phrasing) for _ in range(rng.choice((2, 2, 3, 3, 4)))]
        texts = list(dict.fromkeys(item.text for item in items))
        if len(texts) < len(items):  # a list that repeats itself is read as shorter by people
            return draw(rng, kind, phrasing)
        return Value(join(rng, texts), [item.json for item in items])
    if "/" in kind:
        choice = rng.choice(kind.split("/"))
        return Value(choice.replace("_", " "), choice)
    if base == "bool":
        yes = rng.random() < 0.5
        return Value("yes" if yes else "no", yes)
    if base == "int":
        number = rng.randint(int(rest[0]), int(rest[1]))
        return Value(str(number), number)
    if base in _NUMBER_KINDS:
        text = _amount(rng) if base == "amount" else _number(rng, int(rest[0]), int(rest[1]))
        return Value(text, float(text) if "." in text else int(text))
    if base == "day":
        if rng.random() < 0.4:
            near = rng.choice(bank("near_day", phrasing))
            return Value(near, near)
        day = rng.choice(bank("weekday", phrasing)) if rng.random() < 0.6 else _date(rng, phrasing)
        return Value(f"on {day}", day)
    text = _composed(rng, base, phrasing)
    return Value(text, text)


def join(rng: Random, texts: list[str]) -> str:
    """Returns the ways in which people list things."""
    if len(texts) == 1:
        return texts[0]
    if rng.random() < 0.2:
        return ", ".join(texts)
    return (
        ", ".join(texts[:-1])
        + rng.choice((" and ", " and ", " and ", ", and " if len(texts) > 2 else " and "))
        + texts[-1]
    )
