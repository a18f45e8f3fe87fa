"""Types as people do: no capitals, no full stop, a slip of the finger.

`casual` changes letters and punctuation only: digits, and anything in braces (a place still to be filled in), stay.
Knows nothing of tasks.
"""

from __future__ import annotations

import re
from random import Random

_WORD = re.compile(r"\{[^}]*\}|[A-Za-z]{4,}")
_PLACE = re.compile(r"(\{[^}]*\})")
_OPENINGS = (
    "ok, ",
    "please ",
    "so ",
    "well, ",
    "Hey, ",
    "hi, ",
    "now ",
    "and ",
    "Pebble, ",
    "tell me, ",
    "then ",
    "ok so ",
)


def _slip(rng: Random, word: str) -> str:
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(3)
    if kind == 0:
        return word[:at] + word[at + 1 :]
    if kind == 1:
        return word[:at] + word[at] + word[at:]
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def casual(rng: Random, text: str, typos: float = 0.06) -> str:
    """One informal rendering of `text`; often the text itself."""
    if rng.random() < 0.4:
        text = "".join(part if at % 2 else part.lower() for at, part in enumerate(_PLACE.split(text)))
    if rng.random() < 0.3:
        text = text.rstrip("?.!")
    elif rng.random() < 0.08:
        text = text.rstrip("?.!") + rng.choice(("!", "??", "!!", " ?", "...", "."))
    if rng.random() < typos:
        words = [match for match in _WORD.finditer(text) if not match.group().startswith("{")]
        if words:
            match = rng.choice(words)
            text = text[: match.start()] + _slip(rng, match.group()) + text[match.end() :]
    if rng.random() < 0.08:
        text = rng.choice(_OPENINGS) + text
    elif rng.random() < 0.05:
        text = text.rstrip(".!") + rng.choice((" please", ", please", " thanks"))
    return text
