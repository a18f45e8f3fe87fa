"""Passages and questions about them: the plain data between the modules that write passages and the tasks that ask.

    Page((Passage("Dorville", ("Dorville has 300 residents.", …)), …), (Asked("how many live in Dorville?", …), …))

The one idea: an answer is a whole sentence of one passage, so nothing is learned but to find it and to copy it. Knows
nothing of chats, labels or wording.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

MAX_WORDS_LENGTH = 700  # of all passages of a page together

_STOP = frozenset(
    (
        *("a", "an", "the", "of", "in", "on", "at", "to", "for", "from", "by", "with"),
        *("as", "is", "are", "was", "were", "be", "been", "being", "do", "does", "did", "has", "have", "had"),
        *("it", "its", "he", "she", "his", "her", "they", "them", "their", "this", "that", "these"),
        *("those", "and", "or", "but", "not", "no", "what", "which", "who", "whom"),
        *("whose", "when", "where", "why", "how", "many", "much", "any", "all", "some", "there", "here"),
        *("i", "you", "me", "my", "we", "our", "can", "could", "should", "will"),
        *("would", "may", "might", "must", "if", "than", "then", "so", "into", "about", "over", "under"),
        *("out", "up", "down", "off", "only", "also", "just", "such", "s", "t"),
        *("say", "says", "tell", "sources", "text"),
    )
)
_ENDINGS = ("ations", "ation", "ings", "ing", "edly", "ed", "es", "ly", "s", "e")
_TOKEN = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class QuotedPassage:
    title: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question; without `answer` the page does not say. `value` is the part of the answer that was asked for."""

    text: str
    answer: str = ""
    passage: int = -1
    value: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    passages: tuple[QuotedPassage, ...]
    asked: tuple[Asked, ...]


def stem(word: str) -> str:
    """The word without its ending, roughly: enough to see that "returns" and "returned" are one."""
    word = word.lower()
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def stems(text: str) -> frozenset[str]:
    """The stems of the words that carry meaning."""
    return frozenset(stem(word) for word in _TOKEN.findall(text) if word.lower() not in _STOP)


def shape(rng: Random, progress: float) -> list[int]:
    """Returns how many sentences each passage of a page has: one of one at first, from 0.5 on up to 6."""
    reach = min(1.0, progress / 0.5)
    if rng.random() > reach * 1.1 or reach < 0.12:
        return [1 if rng.random() > reach else rng.randint(1, 3)]
    if rng.random() > reach:
        return [rng.randint(1, 3) for _ in range(rng.randint(1, 2))]
    if reach == 1 and rng.random() < 0.15:
        return [rng.randint(4, 8) for _ in range(rng.randint(2, 6))]
    if reach == 1 and rng.random() < 0.25:
        return [rng.randint(4, 6) for _ in range(3)]
    most = 1 + round(4 * reach)
    return [rng.randint(1, most) for _ in range(rng.choice((1, 1, 2, 2, 3, 3, 3, 4, 5, 6)))]
