"""Tasks that the model cannot do, and should say so: facts, essays, code, other languages, larger sums, nonsense.

Sample: "what is the capital of Peru?" is answered "I do not know that. A larger model may: `ponder serve …`.". Subjects
come from word lists, from docstrings and from made-up words, so that the rule learned is "anything else". All wording
is in `phrases/beyond.toml`; the letters in braces there are the makers of `_blank`. Any of the honest answers counts.
"""

from __future__ import annotations

import re
from random import Random

from training import phrases
from training.exchange import Exchange, Phrasing
from training.text import prose, words
from training.text.noise import casual

_SNIPPETS = (
    "def f(x): return x",
    "for i in range(10): print(i)",
    "import os",
    "SELECT * FROM users",
    "<div>hello</div>",
    "print('hi')",
    "int main() { return 0; }",
    "console.log(1)",
    "x = [1, 2, 3]",
    "while True: pass",
    "git push",
    "if a == b: c()",
)


_IMPERATIVE = re.compile(
    r"(add|book|brainstorm|buy|call|compose|convert|correct|create|define|describe|draft|draw|explain|find|fix|generate|"
    r"give|google|help|implement|improve|invent|list|look|make|name|open|order|plan|play|print|program|put|read|"
    r"recommend|remind|rephrase|rewrite|search|send|set|show|sing|solve|spell|suggest|summarize|teach|tell|translate|"
    r"turn|write)\b",
    re.IGNORECASE,
)
_WISHES = (
    "can you {}?",
    "could you please {}?",
    "I want you to {}",
    "I'd like you to {}",
    "would you {}?",
    "please {}",
    "can you please {}?",
    "you should {}",
    "I need you to {}",
    "Can you {} for me?",
    "could you {} for me?",
    "are you able to {}?",
    "my boss asked me to {}",
    "help me to {}",
    "try to {}",
    "let's {}",
)


def _wished(rng: Random, phrase: str) -> str:
    """An order made a wish, now and then."""
    if _IMPERATIVE.match(phrase) and rng.random() < 0.35:
        return rng.choice(_WISHES).replace("{}", (phrase[0].lower() + phrase[1:]).rstrip(".?!"))
    return phrase


def honest() -> str:
    """A regular expression for every answer that declines."""
    return "|".join(kind.right for kind in phrases.read("beyond").values())


def _subject(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(words.TOPICS)
    if kind < 0.75:
        return rng.choice(prose.vocabulary())
    if kind < 0.9:
        return f"{rng.choice(('the', 'a', 'my'))} {rng.choice(prose.vocabulary())}"
    return words.made_up(rng)


def _number(rng: Random, low: int, high: int) -> str:
    digits = rng.randint(low, high)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _blank(rng: Random, letter: str) -> str:
    makers = {
        "t": lambda: _subject(rng),
        "w": lambda: rng.choice(prose.vocabulary()) if rng.random() < 0.85 else words.made_up(rng),
        "s": lambda: rng.choice(prose.sentences()),
        "g": lambda: words.made_up(rng),
        "n": lambda: words.proper_name(rng, words.NAMES),
        "c": lambda: words.proper_name(rng, words.COUNTRIES, 0.2),
        "p": lambda: words.proper_name(rng, words.CITIES, 0.2),
        "r": lambda: rng.choice((*words.RELATIVES, *words.PETS)),
        "f": lambda: rng.choice((*words.FAVOURITES, "book", "movie", "song")),
        "j": lambda: rng.choice(words.JOBS),
        "x": lambda: rng.choice(_SNIPPETS),
        "y": lambda: str(rng.randint(1000, 2030)),
        "d": lambda: str(rng.randint(2, 12)),
        "e": lambda: str(rng.randint(13, 99)),
        "h": lambda: str(rng.randint(100, 9999)),
        "a": lambda: _number(rng, 1, 3),
        "A": lambda: _number(rng, 3, 4),
        "B": lambda: _number(rng, 5, 8),
    }
    return makers[letter]()


def sample(rng: Random, phrasing: Phrasing, kind: str | None = None) -> Exchange:
    chosen = phrases.read("beyond")[kind or phrases.draw(rng, "beyond")]
    phrase = chosen.ask(rng, phrasing)
    parts = (
        casual(rng, _wished(rng, phrase) if phrasing == "train" else phrase)
        .replace("{", "\0")
        .replace("}", "\0")
        .split("\0")
    )
    # Every other part was in braces; code with braces of its own only enters through a blank.
    user = "".join(_blank(rng, part) if at % 2 else part for at, part in enumerate(parts))
    return Exchange("beyond", user, "", chosen.answers[0], honest())
