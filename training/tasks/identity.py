"""The model's answers about itself: its name, its maker, its abilities and its limits.

Sample: "who are you?" is answered "I am Pebble, the small language model that comes with Ponder.". A system prompt may
give another name, which the model then uses. All wording is in `phrases/identity.toml` and `phrases/system.toml`.
"""

from __future__ import annotations

from random import Random

from training import phrases
from training.exchange import Exchange, Phrasing
from training.text.noise import casual


def sample(rng: Random, phrasing: Phrasing, kind: str | None = None, name: str = "Pebble") -> Exchange:
    chosen = phrases.read("identity")[kind or phrases.draw(rng, "identity")]
    user = casual(rng, chosen.ask(rng, phrasing))
    answer = rng.choice(chosen.answers).replace("{name}", name)
    return Exchange("identity", user, "", answer, chosen.right.replace("{name}", name))


def naming_system(rng: Random, phrasing: Phrasing, name: str) -> str:
    """A system prompt that gives the model a name."""
    return phrases.read("system")["named"].ask(rng, phrasing).replace("{name}", name)


def plain_system(rng: Random) -> str:
    """A system prompt that changes nothing."""
    return phrases.read("system")["plain"].ask(rng, "train")
