"""Greetings, thanks, goodbyes and the little things people say in between.

Sample: "hi there!" is answered "Hello! What can I do for you?".
All wording is in `phrases/smalltalk.toml`.
"""

from __future__ import annotations

from random import Random

from training import phrases
from training.exchange import Exchange, Phrasing
from training.text.noise import casual


def sample(rng: Random, phrasing: Phrasing, kind: str | None = None) -> Exchange:
    chosen = phrases.read("smalltalk")[kind or phrases.draw(rng, "smalltalk")]
    user = casual(rng, chosen.ask(rng, phrasing))
    return Exchange("smalltalk", user, "", rng.choice(chosen.answers), chosen.right)
