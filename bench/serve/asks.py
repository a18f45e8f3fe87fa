"""The requests of a load: prompts made of words, with prefixes that some share, in turns with a tool's time between
them.

A prompt's size is given in words, of which a tokenizer makes about one token each; how many there really were, the
server's `usage` says.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random

_WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
]


@dataclass(frozen=True, slots=True)
class LoadTurn:
    """One question of a conversation, `after` so many seconds since the answer before it."""

    words: str
    max_tokens: int
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A conversation that begins at `at`; `kind` is the class that it is counted in."""

    at: float
    turns: tuple[LoadTurn, ...]
    kind: str = "chat"


@dataclass(frozen=True, slots=True)
class LoadKind:
    """A class of requests: sizes in words and tokens, sampled between half and one and a half times of these."""

    name: str
    words: int
    tokens: int
    turns: int = 1
    gap_s: float = 0.0  # between an answer and the next turn, exponentially distributed


KINDS = {
    "chat": LoadKind("chat", 120, 100),
    "long": LoadKind("long", 1500, 60),
    "write": LoadKind("write", 60, 400),
    "agent": LoadKind("agent", 200, 40, turns=4, gap_s=1.0),
}


def text(words: int, rng: Random) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def mixed(
    arrivals: Iterable[float],
    shares: Sequence[tuple[LoadKind, float]],
    rng: Random,
    *,
    scale: float = 1.0,
    prefixes: int = 0,
    prefix_words: int = 0,
) -> list[LoadRequest]:
    """Conversations of several classes. With `prefixes` each begins with one of so many texts of `prefix_words`."""
    shared = [text(prefix_words, rng) for _ in range(prefixes)]
    kinds, weights = [kind for kind, _ in shares], [share for _, share in shares]

    def about(size: float) -> int:
        return max(1, round(size * scale * rng.uniform(0.5, 1.5)))

    asks = []
    for at in arrivals:
        [kind] = rng.choices(kinds, weights)
        turns = []
        for number in range(kind.turns):
            words = text(about(kind.words), rng)
            if number == 0 and shared:
                words = f"{rng.choice(shared)} {words}"
            gap = rng.expovariate(1 / kind.gap_s) if number and kind.gap_s else 0.0
            turns.append(LoadTurn(words, about(kind.tokens), gap))
        asks.append(LoadRequest(at, tuple(turns), kind.name))
    return asks


def azure(path: Path, *, seconds: float, speed: float, scale: float, longest: int, rng: Random) -> list[LoadRequest]:
    """A trace with the columns TIMESTAMP, ContextTokens and GeneratedTokens, `speed` times as fast, its lengths times
    `scale` and `longest` at most.

    Raises:
        ValueError: the file is no such trace.
    """
    asks: list[LoadRequest] = []
    began: datetime | None = None
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if missing := {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(rows.fieldnames or ()):
            raise ValueError(f"{path.name} has no columns {', '.join(sorted(missing))}")
        for row in rows:
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])
            began = began or moment
            at = (moment - began).total_seconds() / speed
            if at >= seconds:
                break
            words = _scaled(int(row["ContextTokens"]), scale, longest)
            asks.append(
                LoadRequest(at, (LoadTurn(text(words, rng), _scaled(int(row["GeneratedTokens"]), scale, longest)),))
            )
    return asks


def mooncake(
    path: Path, *, seconds: float, speed: float, block_words: int, scale: float, longest: int
) -> list[LoadRequest]:
    """A trace of JSON lines with `timestamp` (ms), `output_length` and `hash_ids`, the chain of blocks of its prompt:
    a block becomes `block_words` words, so that shared prefixes stay shared. `longest` words of a prompt are kept.

    Raises:
        ValueError: the file is no such trace.
    """
    asks: list[LoadRequest] = []
    blocks: dict[int, str] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            at, ids = row["timestamp"] / 1000 / speed, row["hash_ids"]
            tokens = _scaled(int(row["output_length"]), scale, longest)
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"line {number} of {path.name} is no request of a Mooncake trace") from None
        if at >= seconds:
            break
        kept = ids[: max(1, longest // block_words)]
        for id in kept:
            blocks.setdefault(id, text(block_words, Random(id)))
        asks.append(LoadRequest(at, (LoadTurn(" ".join(blocks[id] for id in kept), tokens),)))
    return asks


def _scaled(size: int, scale: float, longest: int) -> int:
    return max(1, min(longest, round(size * scale)))


def poisson(rate: float, seconds: float, rng: Random) -> list[float]:
    """Independent arrivals, `rate` a second on average."""
    return bursty(rate, seconds, 1.0, rng)


def bursty(rate: float, seconds: float, variation: float, rng: Random) -> list[float]:
    """Gamma-distributed gaps. `variation` is their standard deviation over their mean: 1 is Poisson's, more comes in
    bursts, less is evener.
    """
    shape = 1 / variation**2
    return list(_until(seconds, lambda: rng.gammavariate(shape, 1 / (rate * shape))))


def ramp(first: float, last: float, seconds: float, rng: Random) -> list[float]:
    """Poisson arrivals with a rate that goes evenly from `first` to `last`."""
    most = max(first, last)
    candidates = _until(seconds, lambda: rng.expovariate(most))
    return [at for at in candidates if rng.random() * most < first + (last - first) * at / seconds]


def _until(seconds: float, gap: Callable[[], float]) -> Iterator[float]:
    at = gap()
    while at < seconds:
        yield at
        at += gap()
