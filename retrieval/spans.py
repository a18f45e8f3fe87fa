"""Finds the places of things in a text: its sentences, a quotation in it however it is spaced, its numbers and
names."""

from __future__ import annotations

import re
from collections.abc import Iterator

_SENTENCE = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+(?=[\"'“‘(\[]*[A-Z0-9À-Þ])|\n\s*\n|\f|(?<=[。！？])")
_SHORTENED = re.compile(r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|No|vs|Fig|approx|e\.g|i\.e|etc|Jr|Sr|Inc|Co|Ltd)\.$")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NAME = re.compile(r"[A-ZÀ-Þ][\w’'-]*")
_SAME = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\u00a0": " "})
_DROPPED = "\u00ad\u200b\u200c\u200d\ufeff"


def sentences(text: str) -> Iterator[tuple[int, int]]:
    """The spans of a text's sentences, without the white space between them."""
    start = 0
    for found in _SENTENCE.finditer(text):
        if shortened(text, start, found.start()) and "\n" not in found[0]:
            continue
        if text[start : found.end()].strip():
            yield _stripped(text, start, found.end())
        start = found.end()
    if text[start:].strip():
        yield _stripped(text, start, len(text))


def shortened(text: str, start: int, end: int) -> bool:
    """Returns whether the full stop before `end` ends a shortened word and not a sentence."""
    return _SHORTENED.search(text[max(start, end - 12) : end]) is not None


def _stripped(text: str, start: int, end: int) -> tuple[int, int]:
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip())


class Folded:
    """A text searched for quotations, ignoring case, quotation marks, dashes and spaces."""

    def __init__(self, text: str) -> None:
        self._text, self._at = _fold(text)

    def find(self, quotation: str) -> tuple[int, int] | None:
        """The span of the text that it is, at the borders of words."""
        wanted = _fold(quotation)[0].strip()
        if not wanted:
            return None
        at = self._text.find(wanted)
        while at >= 0:
            end = at + len(wanted)
            if not (self._joins(at) or self._joins(end)):
                return self._at[at], self._at[end - 1] + 1
            at = self._text.find(wanted, at + 1)
        return None

    def all(self, quotation: str) -> Iterator[tuple[int, int]]:
        """Every place where it stands, inside words too."""
        wanted = _fold(quotation)[0].strip()
        at = self._text.find(wanted) if wanted else -1
        while at >= 0:
            yield self._at[at], self._at[at + len(wanted) - 1] + 1
            at = self._text.find(wanted, at + len(wanted))

    def _joins(self, at: int) -> bool:
        """Returns whether a word goes on over this place."""
        return 0 < at < len(self._text) and self._text[at - 1].isalnum() and self._text[at].isalnum()


def _fold(text: str) -> tuple[str, list[int]]:
    made, at = list[str](), list[int]()
    for place, character in enumerate(text.translate(_SAME)):
        if character in _DROPPED:
            continue
        if character.isspace():
            if made and made[-1] == " ":
                continue
            character = " "
        for part in character.lower():
            made.append(part)
            at.append(place)
    return "".join(made), at


def numbers(text: str) -> frozenset[str]:
    """The numbers in a text, without the commas between their thousands."""
    return frozenset(re.sub(r",(?=\d{3}\b)", "", found).rstrip(".,") for found in _NUMBER.findall(text))


def names(text: str, everywhere: bool = False) -> frozenset[str]:
    """Capitalised words in lower case; those that begin a sentence only where `everywhere` is asked for."""
    found = set[str]()
    for match in _NAME.finditer(text):
        before = text[: match.start()].rstrip(" \"'“‘([")
        if everywhere or (before and before[-1] not in ".!?…:\n"):
            found.add(re.sub(r"['’]s$", "", match[0]).lower())
    return frozenset(found)
