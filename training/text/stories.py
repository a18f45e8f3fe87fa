"""Word problems put together from parts: who has how many of what, what happens to them, and what is asked.

    The zoo kept 14 crates of 6 pears each. Then 5 went bad and the zoo sent 20 to Ana. How many are left?

More sentences than a list can hold, so that a model learns what verbs do to a number and not which sentence has which
expression. Made in the form of `phrases/word_problems.toml`, with its blanks. Training alone uses them.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from random import Random
from typing import Any

_PARTS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).parents[1].joinpath("phrases", "stories.toml").read_text(encoding="utf-8")
)  # Any: lists of parts
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_MONEY = ("euros", "dollars", "pounds", "coins", "francs", "crowns")


def template(rng: Random) -> str:
    """Returns "question | expression | thought | answer"."""
    return _whole(rng) if rng.random() < 0.5 else _story(rng)


def _whole(rng: Random) -> str:
    made = rng.choice(_PARTS["whole"]["all"])
    while (choice := _CHOICE.search(made)) is not None:
        made = made[: choice.start()] + rng.choice(choice[1].split("|")) + made[choice.end() :]
    for letter, word in zip("ABC", rng.sample(_PARTS["whole"]["described"], 3), strict=True):
        made = re.sub(rf"(?<=[ ]){letter}(?= ones| and|[.;,?]| \|)", word, made)
    big, small, factor = rng.choice(_PARTS["whole"]["units"]).split("/")
    return made.replace("{big}", big).replace("{small}", small).replace("{factor}", factor)


def _story(rng: Random) -> str:
    money = rng.random() < 0.25
    kind, unit = ("money", rng.choice(_MONEY)) if money else ("things", "{x}")
    who = rng.choices(("{N}", "I", "We", rng.choice(_PARTS["subject"]["all"])), (60, 10, 5, 25))[0]
    spoken = {"{N}": "{N}", "I": "I"}.get(who, who[:1].lower() + who[1:])
    later = rng.choice((spoken, "she", "he")) if who == "{N}" else spoken
    form = rng.choice((0, 0, 2)) if who not in ("I", "We") else rng.choice((1, 1, 2))
    numbers = iter("abcd")
    if not money and rng.random() < 0.35:
        group = rng.choice(_PARTS["groups"]["all"])
        held = f"{{a}} {group} {rng.choice(_PARTS['groups']['with'])}"
        expression, thought = "{a} * {b}", f"{{a}} {group} of {{b}}"
        numbers = iter("cd")
    else:
        held, expression, thought = f"{{{next(numbers)}}} {unit}", "{a}", "{a}"
    first = f"{who} {_verb(rng.choice(_PARTS['have'][kind]), form)} {held}"
    if not money and rng.random() < 0.15:
        there = rng.choice(("In the {p} there {v} {h}", "There {v} {h} in the {p}", "On the {p} lie {h}"))
        places = ("cellar", "garden", "van", "hall", "attic", "shed", "yard", "kitchen", "boat")
        filled = {"p": rng.choice(places), "v": "were" if form == 2 else "are", "h": held}
        first = re.sub(r"\{([pvh])\}", lambda blank: filled[blank[1]], there)
    events, sign, acted = list[str](), "+", False
    for _ in range(rng.choice((1, 1, 2))):
        number = f"{{{next(numbers)}}}"
        sign = rng.choice("+-")
        said, passive = _event(rng, sign, kind, form)
        happened = said.replace("{n}", number)
        named = not events or not acted or rng.random() < 0.4
        events.append(f"{later} {happened}" if named and not passive else happened)
        acted = acted or not passive
        expression += f" {sign} {number}"
        thought += f", {'plus' if sign == '+' else 'minus'} {number}"
    joint = rng.choice((" and ", ", then ", " and then ", " and later ", " but "))
    rest = joint.join(events)
    told = rng.choice((f"{first}. {_capital(rest)}.", f"{first}. Then {rest}.", f"{first}. Later {rest}."))
    asked = rng.choice(_PARTS["money" if money else "left" if sign == "-" and rng.random() < 0.7 else "now"]["all"])
    asked = asked.replace("does S", f"do {spoken}" if who in ("I", "We") else f"does {rng.choice((spoken, later))}")
    asked = re.sub(r"\bU\b", unit, asked)
    answer = f"{{r}} {unit} are left." if "left" in asked or "still" in asked else f"That is {{r}} {unit}."
    return f"{told} {asked} | {expression} | {thought}. | {answer}"


def _event(rng: Random, sign: str, kind: str, form: int) -> tuple[str, bool]:
    """Returns what happens to {n} of them, and whether nobody is said to do it."""
    parts = _PARTS["gain" if sign == "+" else "lose"]
    if kind == "things" and rng.random() < 0.35:
        present, past = rng.choice(parts["passive"]).split("/")
        if form != 2:
            return present, True
        return re.sub(r"^(.*\{n\}(?: more| others| new ones| of them)?).*$", r"\1 ", present) + past, True
    return _verb(rng.choice(parts[kind]), form), False


def _verb(forms: str, form: int) -> str:
    """Returns the form of a verb with its number: 0 third person, 1 first person, 2 past. What follows the number
    stands at the last form alone."""
    third, first, past = forms.split("/")
    if form == 2:
        return past
    spoken, number, rest = (third, first)[form], *past.partition("{n}")[1:]
    return spoken if "{n}" in spoken or not number else f"{spoken} {number}{rest}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
