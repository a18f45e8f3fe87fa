"""The wordings, read from the TOML files beside this: ways of asking, thinking and answering.

Each table of a file is a kind of question. `train` lists the phrasings that are trained on, `held_out` those that are
only ever evaluated on. Knows nothing of how places in braces are filled.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

from training.exchange import Phrasing


@dataclass(frozen=True, slots=True)
class Kind:
    """`right` is a regular expression that a correct answer contains; `weight` is the relative frequency of the
    kind."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    thinking: str = ""
    answers: tuple[str, ...] = ()
    right: str = ""
    weight: float = 1

    def ask(self, rng: Random, phrasing: Phrasing) -> str:
        return rng.choice(self.train if phrasing == "train" else self.held_out)


@lru_cache
def read(name: str) -> dict[str, Kind]:
    """All kinds in `name`.toml, in its order."""
    document = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
    return {
        kind: Kind(
            train=tuple(table["train"]),
            held_out=tuple(table["held_out"]),
            thinking=table.get("thinking", ""),
            answers=tuple(table.get("answers", ())),
            right=table.get("right", ""),
            weight=table.get("weight", 1),
        )
        for kind, table in document.items()
    }


def draw(rng: Random, name: str) -> str:
    """Samples the name of a kind in `name`.toml, by weight."""
    kinds = read(name)
    return rng.choices(tuple(kinds), [kind.weight for kind in kinds.values()])[0]
