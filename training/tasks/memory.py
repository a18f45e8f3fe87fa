"""Facts the user tells, and questions about them later in the same chat.

    user: my dog is called Rex          user: what is my dog called?
    answer: Good to know: your dog      answer: Your dog is called Rex.
            is called Rex.

Values are often made-up words or numbers, so that the answer can only come from the chat. A fact may be told in
passing, and corrected: then the latest value counts. A question about an unknown fact gets an honest no. All
wording is in `phrases/memory_tell.toml`, `phrases/memory_ask.toml` and `phrases/memory_frames.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from training import phrases
from training.exchange import Exchange, Phrasing
from training.text import words
from training.text.noise import casual

UNKNOWN = "You have not told me that yet."


@dataclass(frozen=True, slots=True)
class Fact:
    """`key` reads "your dog is called"; the value completes the sentence; `name` is a relative's, told with it."""

    kind: str
    thing: str
    key: str
    value: str
    name: str = ""

    def also(self) -> Fact | None:
        """Returns the name that was told with it."""
        return Fact("relative", self.thing, f"your {self.thing} is called", self.name) if self.name else None


def _kind_of_question(known: Fact) -> str:
    return "pet" if known.kind == "relative" else known.kind


def _any_value(rng: Random) -> str:
    """A number, a word or a mixture of both."""
    kind = rng.random()
    if kind < 0.45:
        return str(rng.randrange(10 ** rng.randint(1, 5)))
    if kind < 0.75:
        return words.made_up(rng, rng.randint(1, 3))
    if kind < 0.9:
        return f"{words.made_up(rng, 1).upper()[:2]}{rng.randrange(1000)}"
    return rng.choice((*words.TOPICS, *words.CITIES, *words.NAMES))


def _date(rng: Random) -> str:
    month, day = rng.choice(words.MONTHS), rng.randint(1, 28)
    return rng.choice((f"{month} {day}", f"{day} {month}"))


def _time(rng: Random) -> str:
    hour = rng.choice((f"{rng.randint(1, 12)}", f"{rng.randint(8, 20)}:{rng.choice(('00', '15', '30', '45'))}"))
    day = rng.choice((f"on {rng.choice(words.WEEKDAYS)}", "tomorrow", "today", "tonight", f"on {_date(rng)}"))
    return rng.choice((f"{day} at {hour}", f"{day} at {hour}", day, f"at {hour}"))


def _team(rng: Random) -> str:
    return f"{rng.choice(('FC', 'the', 'Real', 'United'))} {words.made_up(rng, 2).capitalize()}"


def _bought(rng: Random) -> str:
    return f"a {rng.choice(words.FAVOURITES['color'][:4])} {rng.choice(words.GOODS)}"


# Facts of which a chat knows one at most: the wording of the key, and the maker of the value.
_SINGLE: dict[str, tuple[str, Callable[[Random], str]]] = {
    "home": ("you live in", lambda rng: words.proper_name(rng, words.CITIES)),
    "hometown": ("you grew up in", lambda rng: words.proper_name(rng, words.CITIES)),
    "job": ("you work as a", lambda rng: rng.choice(words.JOBS)),
    "age": ("your age is", lambda rng: str(rng.randint(5, 99))),
    "birthday": ("your birthday is", _date),
    "allergy": ("you are allergic to", lambda rng: rng.choice(words.ALLERGIES)),
    "speaks": ("you speak", lambda rng: rng.choice(words.LANGUAGES)),
    "learning": ("you are learning", lambda rng: rng.choice(words.LANGUAGES)),
    "bought": ("you bought", _bought),
    "trip": ("you are going to", lambda rng: words.proper_name(rng, words.CITIES)),
    "plays": ("you play the", lambda rng: rng.choice(words.FAVOURITES["instrument"])),
    "children": ("the number of your children is", lambda rng: str(rng.randint(2, 9))),
    "team": ("your team is", _team),
    "meet": ("you meet at the", lambda rng: rng.choice(words.MEETING_PLACES)),
}


def fact(rng: Random, kind: str | None = None, phrasing: Phrasing = "train") -> Fact:
    kind = kind or phrases.draw(rng, "memory_tell")
    held_out = phrasing == "held_out"
    names = words.HELD_OUT_NAMES if held_out else words.NAMES
    if kind == "name":
        return Fact(kind, "name", "your name is", words.proper_name(rng, names))
    if kind == "pet":
        pet = rng.choice(words.PETS)
        return Fact(kind, pet, f"your {pet} is called", words.proper_name(rng, words.PET_NAMES))
    if kind == "relative":
        relative = rng.choice(words.RELATIVES)
        return Fact(kind, relative, f"your {relative} is called", words.proper_name(rng, names))
    if kind == "favourite":
        thing = rng.choice(tuple(words.FAVOURITES))
        value = words.made_up(rng, 2) if rng.random() < 0.25 else rng.choice(words.FAVOURITES[thing])
        return Fact(kind, thing, f"your favorite {thing} is", value)
    if kind in _SINGLE:
        key, value_of = _SINGLE[kind]
        return Fact(kind, kind, key, value_of(rng))
    if kind == "pet_age":
        pet = rng.choice(words.PETS)
        return Fact(kind, pet, f"the age of your {pet} is", str(rng.randint(2, 20)))
    if kind == "thing":
        thing = rng.choice(words.HELD_OUT_POSSESSIONS if held_out else words.POSSESSIONS)
        return Fact(kind, thing, f"your {thing} is", _any_value(rng))
    if kind == "color":
        thing = rng.choice(words.HELD_OUT_VEHICLES if held_out else words.VEHICLES)
        return Fact(kind, thing, f"your {thing} is", rng.choice(words.FAVOURITES["color"]))
    if kind == "meal":
        meal = rng.choice(words.MEALS)
        return Fact(kind, meal, f"for {meal} you had", rng.choice(words.DISHES))
    if kind == "appointment":
        thing = rng.choice(words.HELD_OUT_APPOINTMENTS if held_out else words.APPOINTMENTS)
        return Fact(kind, thing, f"your {thing} is", _time(rng))
    if kind == "place":
        thing = rng.choice(words.HELD_OUT_PLURAL_THINGS if held_out else words.PLURAL_THINGS)
        return Fact(kind, thing, f"your {thing} are in the", rng.choice(words.PLACES))
    if kind == "person":
        person = words.proper_name(rng, names)
        return Fact(kind, person, f"{person} lives in", words.proper_name(rng, words.CITIES))
    relative = rng.choice(words.RELATIVES)
    if kind == "works":
        return Fact(kind, relative, f"your {relative} works as a", rng.choice(words.JOBS), rng.choice(names))
    home = words.proper_name(rng, words.CITIES)
    return Fact(kind, relative, f"your {relative} lives in", home, rng.choice(names))


def another_value(rng: Random, known: Fact) -> Fact:
    """The same fact with another value."""
    for _ in range(100):
        other = fact(rng, known.kind)
        alike = known.kind != "favourite" or other.thing == known.thing
        if alike and other.value.lower() != known.value.lower():
            return replace(known, value=other.value)
    return known


def _sentence(known: Fact) -> str:
    return f"{known.key[0].upper()}{known.key[1:]} {known.value}."


def _noted(*facts: Fact) -> str:
    return "Good to know: " + ", and ".join(f"{known.key} {known.value}" for known in facts) + "."


def _pattern(known: Fact) -> str:
    return rf"\b{re.escape(known.value)}\b"


def _fill(rng: Random, phrase: str, known: Fact) -> tuple[str, Fact]:
    """The phrase as typed; without capitals the name has none either."""
    text = casual(rng, phrase)
    if text == text.lower() and phrase[0].isupper() and known.kind != "person":
        known = replace(known, value=known.value.lower())
        known = replace(known, name=known.name.lower())
    if "{n}" not in text:
        known = replace(known, name="")
    return text.replace("{t}", known.thing).replace("{v}", known.value).replace("{n}", known.name), known


def tell(rng: Random, phrasing: Phrasing, known: Fact, passing: float = 0.0) -> tuple[Exchange, Fact]:
    user, known = _fill(rng, phrases.read("memory_tell")[known.kind].ask(rng, phrasing), known)
    if rng.random() < passing:
        frame = phrases.read("memory_frames")["passing"].ask(rng, phrasing)
        user = frame.replace("{x}", user.rstrip(".!? ") if "{x}," in frame or "{x}." in frame else user)
    answer = f"Nice to meet you, {known.value}!" if known.kind == "name" else _noted(known)
    return Exchange("memory tell", user, "", answer, _pattern(known)), known


def correct(rng: Random, phrasing: Phrasing, known: Fact) -> tuple[Exchange, Fact]:
    """Right after a fact: it was wrong, and this is the right value."""
    latest = replace(another_value(rng, known), name="")
    user, latest = _fill(rng, phrases.read("memory_frames")["correct"].ask(rng, phrasing), latest)
    return Exchange("memory tell", user, "", _noted(latest), _pattern(latest)), latest


def tell_again(rng: Random, phrasing: Phrasing, known: Fact) -> tuple[Exchange, Fact]:
    """Later, in a whole sentence: it has changed."""
    told, latest = tell(rng, phrasing, another_value(rng, known))
    frame = phrases.read("memory_frames")["again"].ask(rng, phrasing)
    return replace(told, user=frame.replace("{x}", told.user), answer=_noted(latest)), latest


def tell_two(rng: Random, phrasing: Phrasing, one: Fact, two: Fact) -> tuple[Exchange, list[Fact]]:
    """Two facts in one message."""
    first, one = tell(rng, phrasing, one)
    second, two = tell(rng, phrasing, two)
    joiner = rng.choice((" and ", ". ", ", and ", ", "))
    user = f"{first.user.rstrip('.!? ')}{joiner}{second.user}"
    return Exchange("memory tell", user, "", _noted(one, two), f"{_pattern(one)}.*{_pattern(two)}"), [one, two]


def ask(rng: Random, phrasing: Phrasing, known: Fact, told: bool = True) -> Exchange:
    """Asks for `known`; with `told` false the answer is that it was never said."""
    user, _ = _fill(rng, phrases.read("memory_ask")[_kind_of_question(known)].ask(rng, phrasing), known)
    if told:
        return Exchange("memory", user, "", _sentence(known), _pattern(known))
    return Exchange("memory unknown", user, "", UNKNOWN, "not told me")


def at_once(rng: Random, phrasing: Phrasing) -> Exchange:
    """A fact and the question about it in one message."""
    told, known = tell(rng, phrasing, fact(rng, phrasing=phrasing))
    asked = ask(rng, phrasing, known)
    joiner = rng.choice((". ", " ", ", ", ". So "))
    return Exchange("memory", told.user.rstrip(".!? ") + joiner + asked.user, "", asked.answer, asked.right)
