"""Questions with exactly one right answer, to compare ways of decoding.

    sums    27+5 61-4 30+9 =        32 57 39        each part by itself: nothing hinders writing them all at once
    chain   27+5-4+9 =              32 28 37        each result from the one before it
    gap     one two th______ur five ree fo          the text between both sides, a mask for each character

Chains and sums have the same operands, the same signs and answers of the same length, so that only the dependence
differs. All results have two digits. Knows nothing of models or tokens.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

Task = Literal["sums", "chain", "gap"]
TASKS: tuple[Task, ...] = ("sums", "chain", "gap")
MASK = "_"
ANSWER = 16  # characters of the longest answer, with its end
MIN_PARTS, MAX_PARTS = 2, 5
MIN_GAP, MAX_GAP = 3, 12  # characters
SIDE = 3  # characters that are left on both sides of a gap
HELD_OUT = 8  # of so many questions, by their hash, one is never trained on

_NUMBERS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_LETTERS = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey xray yankee zulu"
)
_DAYS = "monday tuesday wednesday thursday friday saturday sunday"
_MONTHS = "january february march april may june july august september october november december"
_PLANETS = "mercury venus earth mars jupiter saturn uranus neptune"


@dataclass(frozen=True, slots=True)
class PairQuestion:
    """`prompt` ends with "=", or, of a gap, has MASK for each character of the answer."""

    task: Task
    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Returns whether training leaves it out."""
        return hashlib.blake2b(self.prompt.encode(), digest_size=4).digest()[0] % HELD_OUT == 0


def _next(rng: Random, value: int) -> tuple[str, int]:
    """Returns an operation with one digit on a number, and its result of two digits."""
    digit = rng.randint(1, 9)
    sign = rng.choice([s for s in (1, -1) if 10 <= value + s * digit <= 99])
    return f"{'+' if sign > 0 else '-'}{digit}", value + sign * digit


def _sums(rng: Random) -> PairQuestion:
    parts, results = [], []
    for _ in range(rng.randint(MIN_PARTS, MAX_PARTS)):
        value = rng.randint(10, 99)
        operation, result = _next(rng, value)
        parts.append(f"{value}{operation}")
        results.append(str(result))
    return PairQuestion("sums", " ".join(parts) + " =", " ".join(results))


def _chain(rng: Random) -> PairQuestion:
    value = rng.randint(10, 99)
    text, results = str(value), []
    for _ in range(rng.randint(MIN_PARTS, MAX_PARTS)):
        operation, value = _next(rng, value)
        text += operation
        results.append(str(value))
    return PairQuestion("chain", text + " =", " ".join(results))


@cache
def _texts() -> tuple[str, ...]:
    """Returns runs of three to five words, in both directions; days and months begin anew."""
    found = []
    for listed, cyclic in ((_NUMBERS, 0), (_LETTERS, 0), (_DAYS, 1), (_MONTHS, 1), (_PLANETS, 0)):
        words = listed.split()
        for count in (3, 4, 5):
            for first in range(len(words) if cyclic else len(words) - count + 1):
                run = [words[(first + i) % len(words)] for i in range(count)]
                found += [" ".join(run), " ".join(reversed(run))]
    return tuple(found)


@cache
def _by_length() -> dict[int, list[str]]:
    found = defaultdict(list)
    for text in _texts():
        found[len(text)].append(text)
    return dict(found)


def fits(pattern: str) -> list[str]:
    """Returns the texts that a gap could be of."""
    same = _by_length().get(len(pattern), [])
    return [text for text in same if all(p in (MASK, t) for p, t in zip(pattern, text, strict=True))]


def _gap(rng: Random) -> PairQuestion:
    while True:
        text = rng.choice(_texts())
        size = rng.randint(MIN_GAP, MAX_GAP)
        last = len(text) - SIDE - size
        if last < SIDE:
            continue
        at = rng.randint(SIDE, last)
        pattern = text[:at] + MASK * size + text[at + size :]
        if fits(pattern) == [text]:
            return PairQuestion("gap", pattern, text[at : at + size])


_MAKERS = {"sums": _sums, "chain": _chain, "gap": _gap}


def question(rng: Random, task: Task, *, held_out: bool) -> PairQuestion:
    """Makes a question that training sees, or one that it leaves out."""
    while True:
        made = _MAKERS[task](rng)
        if made.held_out == held_out:
            return made
