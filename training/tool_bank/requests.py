"""Requests for an offered tool: a wording filled with values, and the calls that it wants.

Sample: "Could you check the weather in Oslo and Rome?" → getWeather {"town": "Oslo"}, getWeather {"town": "Rome"}.
Strings are copied as the user wrote them. Knows nothing of turns and results.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from training.conversation import Phrasing, SpokenCall
from training.phrases import read
from training.text.noise import casual
from training.tool_bank import Ask, values
from training.tool_bank.offered import Offered

_SLOT = re.compile(r"\{([^}]+)\}")
_BEFORE_DAY = re.compile(r"(^|[:,(\"']|\b(on|for|due|from|until|after|is|be|of)) $")
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_SMALL = {str(number): word for number, word in enumerate(_WORDS, 1)}
_COUNTED = frozenset({"int", "num", "amount", "time"})  # values that change together with another parameter's


@dataclass(frozen=True, slots=True)
class Request:
    """`spread` names the parameter whose values several calls of one request differ in."""

    text: str
    calls: tuple[SpokenCall, ...]
    spread: str = ""


def _framed(rng: Random, template: str, phrasing: Phrasing) -> str:
    """The wording made polite, or after a remark of the user's."""
    roll = rng.random()
    first = template.split()[0]
    if roll < 0.15 and first.lower() in values.IMPERATIVES:
        polite = read("tool_choice")["polite"].ask(rng, phrasing)
        return polite.replace("{r}", first.lower() + template[len(first) :].rstrip(".?!"))
    if roll > 0.94:
        return read("tool_choice")["aside"].ask(rng, phrasing).replace("{r}", template)
    return template


def _worded(rng: Random, ask: Ask, kinds: dict[str, str], phrasing: Phrasing) -> str:
    """The wording with a slip or two, but nothing added behind a free text, where it would belong to the text."""
    framed = _framed(rng, ask.template, phrasing)
    last = re.search(r"\{([^}]+)\}\W*$", ask.template)
    if last and kinds[last[1]] in values.TEXTS and ask.template.rstrip(".?!").endswith("}"):
        return framed[: framed.rindex("}") + 1] if framed.endswith(ask.template) else ask.template.rstrip(".?!")
    template = casual(rng, framed, typos=0.04)
    if last and not re.search(r"\{[^}]+\}[\"')%°]*[.?!]?$", template):
        return ask.template
    return template


def _filled(rng: Random, template: str, spoken: dict[str, str]) -> str:
    def word(match: re.Match[str]) -> str:
        text = spoken[match[1]]
        before, after = template[: match.start()], template[match.end() :]
        if text.startswith("on ") and _BEFORE_DAY.search(before):
            return text[3:]
        alone = before.endswith(" ") and after[:1] == " " and after[1:2].islower()
        if alone and text in _SMALL and rng.random() < 0.12:
            return _SMALL[text]
        return text

    return _SLOT.sub(word, template)


def request(rng: Random, offered: Offered, phrasing: Phrasing, several: int = 1) -> Request | None:
    """A request for the tool; with `several`, one that wants as many calls; None where no wording can be made."""
    asks = offered.answerable()
    kinds = {param.names[0]: param.kind for param in offered.params}
    if several > 1:
        asks = tuple(ask for ask in asks if any(_joinable(kinds[slot]) for slot in ask.slots))
    if not asks:
        return None
    ask = rng.choice(asks)
    drawn = {slot: values.draw(rng, kinds[slot], phrasing) for slot in dict.fromkeys(ask.slots)}
    texts = {slot: value.text for slot, value in drawn.items()}
    if len(set(texts.values())) < len(texts):  # the same value twice: from Oslo to Oslo
        return request(rng, offered, phrasing, several)
    if rng.random() < 0.06:
        for slot in drawn:
            if kinds[slot] in {"city", "person", "country", "product", "company"}:
                drawn[slot] = values.Value(texts[slot].lower(), texts[slot].lower())
                texts[slot] = drawn[slot].text
    given = dict(ask.implied) | {slot: value.json for slot, value in drawn.items()}
    template = _worded(rng, ask, kinds, phrasing)
    if several == 1:
        return Request(_filled(rng, template, texts), (offered.call(given),))
    return _spread(rng, offered, phrasing, several, template, given, texts)


def _joinable(kind: str) -> bool:
    return kind.split()[0] in values.JOINABLE


def _options(rng: Random, kind: str, phrasing: Phrasing, count: int, taken: dict[str, Any]) -> dict[str, Any]:
    """Up to `count` different values of a kind by their texts, `taken` first; a short list may not have so many."""
    options = dict(taken)
    for _ in range(30):
        value = values.draw(rng, kind, phrasing)
        options.setdefault(value.text, value.json)
        if len(options) == count:
            break
    return options


def _spread(
    rng: Random,
    offered: Offered,
    phrasing: Phrasing,
    several: int,
    template: str,
    given: dict[str, Any],
    texts: dict[str, str],
) -> Request:
    """Several values in one place, and at times as many in another: "for 20 and 15 minutes, respectively"."""
    kinds = {param.names[0]: param.kind for param in offered.params}
    spread = rng.choice([slot for slot in texts if _joinable(kinds[slot])])
    options = _options(rng, kinds[spread], phrasing, several, {texts[spread]: given[spread]})
    changes: list[dict[str, Any]] = [{spread: json} for json in options.values()]
    texts = texts | {spread: values.join(rng, list(options))}
    in_step = [slot for slot in texts if slot != spread and kinds[slot].split()[0] in _COUNTED]
    free = any(kinds[slot] in values.TEXTS for slot in texts)
    if in_step and not free and rng.random() < 0.4:
        other = rng.choice(in_step)
        second = _options(rng, kinds[other], phrasing, len(options), {texts[other]: given[other]})
        if len(second) == len(options):
            changes = [change | {other: json} for change, json in zip(changes, second.values(), strict=True)]
            texts[other] = values.join(rng, list(second))
            template = f"{template.rstrip('.?!')}, respectively"
    calls = tuple(offered.call(given | change) for change in changes)
    return Request(_filled(rng, template, texts), calls, spread=next(iter(offered.call({spread: 0}).arguments)))
