"""Paragraphs as people have them, each sentence with questions in a person's own words, filled with made-up names.

    "Farmers near Dorville pay beekeepers because …"  "why are beekeepers paid by farmers?"

A page has some of a paragraph's sentences in their order; a question on one that was left out has no answer. Many
paragraphs have some words replaced throughout, text and questions alike. All wording is in `essays.toml`. Knows
nothing of chats or labels.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from random import Random

from training.conversation import Phrasing
from training.text import entities
from training.text.passages import Asked, Page, QuotedPassage

_DATA: dict[str, list[dict[str, str | list[list[str]]]]] = tomllib.loads(
    Path(__file__).with_name("essays.toml").read_text(encoding="utf-8")
)
_SLOT = re.compile(r"\{([PXCyn])(\d)\}")
_KINDS = {"P": "place", "X": "person", "C": "company"}
_WORD = re.compile(r"\b[a-z]{5,}\b")
_WORDS = tuple(dict.fromkeys(_WORD.findall(json.dumps(_DATA["train"]))))  # to put in the place of others


def _filled(rng: Random, phrasing: Phrasing, told: list[list[str]]) -> list[list[str]]:
    """Sentence and questions, with one value for each slot throughout."""
    values: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        slot, letter = match.group(), match.group(1)
        if slot not in values:
            if letter in _KINDS:
                values[slot] = entities.name(rng, _KINDS[letter], phrasing)
            else:
                values[slot] = str(rng.randint(1200, 2020)) if letter == "y" else str(rng.randint(3, 900))
        return values[slot]

    return [[_SLOT.sub(value, text) for text in one] for one in told]


def paragraphs(rng: Random, phrasing: Phrasing) -> list[list[list[str]]]:
    """Every paragraph as a list of sentences, each with its questions behind it."""
    return [_filled(rng, phrasing, essay["told"]) for essay in _DATA[phrasing]]  # type: ignore[arg-type]  # lists there


def _replaced(rng: Random, told: list[list[str]]) -> list[list[str]]:
    """Some words of both a sentence and its questions replaced by others, so that matching them is new each time."""
    words = sorted({word for sentence, *asks in told for word in _WORD.findall(" ".join(asks)) if word in sentence})
    if not words:
        return told
    chosen = rng.sample(words, min(len(words), rng.randint(1, 5)))
    other = {word: rng.choice(_WORDS) for word in chosen}
    pattern = re.compile(r"\b(" + "|".join(chosen) + r")\b")
    return [[pattern.sub(lambda match: other[match.group()], text) for text in one] for one in told]


def _passage(rng: Random, phrasing: Phrasing, at: int, count: int) -> tuple[QuotedPassage, list[Asked], list[Asked]]:
    """One paragraph, the questions that it answers, and those on its sentences that were left out."""
    essay = _DATA[phrasing][at]
    title, told = essay["title"], essay["told"]
    if not isinstance(title, str) or isinstance(told, str):
        raise TypeError("an essay has a title and what is told")
    [name], *filled = _filled(rng, phrasing, [[title], *told])
    if rng.random() < 0.6:
        filled = _replaced(rng, filled)
    kept = set(rng.sample(range(len(filled)), min(count, len(filled))))
    passage = QuotedPassage(name, tuple(one[0] for number, one in enumerate(filled) if number in kept))
    asked = [
        Asked(rng.choice(one[1:]), one[0] if number in kept else "", 0, one[0] if number in kept else "")
        for number, one in enumerate(filled)
    ]
    return passage, [one for one in asked if one.answer], [one for one in asked if not one.answer]


def page(rng: Random, phrasing: Phrasing, counts: list[int], rich: float, questions: int, absent: float) -> Page:
    """Passages of at most `counts` sentences, as `paragraphs.page` makes."""
    chosen = rng.sample(range(len(_DATA[phrasing])), min(len(counts), len(_DATA[phrasing])))
    passages: list[QuotedPassage] = []
    present: list[Asked] = []
    missing: list[Asked] = []
    for at, (which, count) in enumerate(zip(chosen, counts, strict=False)):
        passage, its, gone = _passage(rng, phrasing, which, count)
        passages.append(passage)
        present += [Asked(one.text, one.answer, at, one.value) for one in its]
        missing += gone if rng.random() < 0.3 + rich else []
    rng.shuffle(present)
    rng.shuffle(missing)
    asked: list[Asked] = []
    for _ in range(questions):
        pool = missing if rng.random() < absent else present
        if pool:
            one = pool.pop()
            asked.append(one if one.answer else Asked(one.text))
    return Page(tuple(passages), tuple(asked))
