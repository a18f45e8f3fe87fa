"""Lines to be looked up: by their label, by two of their words, by their beginning or by their key.

    system: [S1] The mill was sold.         user: which line has "mill" and "sold"?
            [S2] vorn: 41 tulips            answer: [S1] The mill was sold.
            [S3] table, ferry, lamp         user: what does S3 say?
                                            answer: [S3] table, ferry, lamp

The step between `training.procedural` and `training.tasks.grounded`: the words to be matched stand in the line as they
are asked for, so nothing is learned but to find a line and to copy it, in the layouts of sources.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from training import phrases
from training.conversation import Conversation, Message, Phrasing
from training.tasks import grounded
from training.text import entities, prose, quotable, words
from training.text.noise import casual
from training.text.passages import QuotedPassage, stems

WORDS = 2  # that a line is asked for by
LAYOUTS = tuple(layout for layout in grounded.LAYOUTS if "{title}" not in layout)


def _listed(rng: Random, phrasing: Phrasing) -> str:
    """A line of words that have nothing to do with each other."""
    known = prose.vocabulary()
    count = rng.randint(3, 9)
    chosen = [words.made_up(rng) if rng.random() < 0.2 else rng.choice(known) for _ in range(count)]
    return rng.choice((", ", " ", "; ")).join(chosen)


def _pair(rng: Random, phrasing: Phrasing) -> str:
    """A key and its value."""
    kind = rng.choice(("place", "person", "software"))
    key = entities.name(rng, kind, phrasing) if rng.random() < 0.5 else words.made_up(rng, 2)
    value = f"{rng.randint(2, 9999)} {rng.choice(words.PLURAL_THINGS)}"
    if rng.random() < 0.5:
        value = " ".join(rng.choice(prose.vocabulary()) for _ in range(rng.randint(1, 4)))
    return f"{key}{rng.choice((': ', ' = ', ' - '))}{value}"


_LINES: tuple[Callable[[Random, Phrasing], str], ...] = (quotable.sentence, quotable.sentence, _listed, _pair)


def lines(rng: Random, phrasing: Phrasing, count: int) -> list[str]:
    """Returns up to `count` different lines, of one kind or of all."""
    kinds = _LINES if rng.random() < 0.4 else (rng.choice(_LINES),)
    return list(dict.fromkeys(rng.choice(kinds)(rng, phrasing) for _ in range(count)))


def _words(rng: Random, line: str, others: list[str]) -> list[str]:
    """Words of `line`, in its order, that no other line has all of; none where there are no such words."""
    known = [word.strip(".,;:?'\"") for word in line.split()]
    known = [word for word in dict.fromkeys(known) if stems(word)]
    if len(known) < WORDS:
        return []
    at = sorted(rng.sample(range(len(known)), WORDS))
    chosen = [known[one] for one in at]
    wanted = stems(" ".join(chosen))
    return [] if any(wanted <= stems(other) for other in others) else chosen


def _ask(rng: Random, phrasing: Phrasing, kind: str, *values: str) -> str:
    wording = casual(rng, phrases.read("lookup")[kind].ask(rng, phrasing), typos=0.0)
    for place, value in zip(("{a}", "{b}"), values, strict=False):
        wording = wording.replace(place, value, 1)
    return wording


def _asked(rng: Random, phrasing: Phrasing, found: list[str], labels: list[str], at: int) -> tuple[str, str]:
    """A question about line `at`, or on words that no line has, and its answer."""
    line, answer = found[at], f"[{labels[at]}] {found[at]}"
    others = found[:at] + found[at + 1 :]
    kind = rng.choices(("words", "label", "beginning", "missing"), (55, 15, 15, 15))[0]
    if kind == "words" and (chosen := _words(rng, line, others)):
        return _ask(rng, phrasing, "words", *chosen), answer
    if kind == "missing":
        strange = _words(rng, rng.choice(_LINES)(rng, phrasing), found)
        if strange and not stems(" ".join(strange)) & stems(" ".join(found)):
            return _ask(rng, phrasing, "words", *strange), grounded.MISSING
    start = " ".join(line.split()[:WORDS])
    if kind == "beginning" and not any(other.startswith(start) for other in others):
        return _ask(rng, phrasing, "beginning", start), answer
    return _ask(rng, phrasing, "label", labels[at]), answer


def conversation(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    """Asks for most of two to twelve lines; of few at `progress` 0."""
    found = lines(rng, phrasing, rng.randint(2, 3 + round(9 * progress)))
    labels = grounded.sample_labels(rng, len(found), plain=0.4)
    sources = grounded.sources(rng, [QuotedPassage("", (line,)) for line in found], labels, rng.choice(LAYOUTS))
    opening = f"{phrases.read('grounded')['instruction'].ask(rng, phrasing)}\n{sources}"
    order = rng.sample(range(len(found)), len(found))[: rng.randint(3, 8)]
    asked = [_asked(rng, phrasing, found, labels, at) for at in order]
    inside = rng.random() < 0.3
    messages = [] if inside else [Message("system", opening)]
    for at, (question, answer) in enumerate(asked):
        messages += [Message("user", f"{opening}\n\n{question}" if inside and at == 0 else question)]
        messages += [Message("assistant", answer)]
    return Conversation(tuple(messages))
