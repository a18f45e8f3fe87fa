"""Pages of real prose: paragraphs of one module's docstrings, with questions cut from their sentences.

A question is kept only when the words it shares with its sentence, weighted by how rare they are on the page, point to
that sentence and to no other; one without an answer shares little with every sentence that is left. Half of the pages
have some words replaced throughout by others or by made-up names, so that the words to be matched and copied are always
new. Knows nothing of chats or labels.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from random import Random

from training.conversation import Phrasing
from training.text import cloze, entities, prose
from training.text.passages import MAX_WORDS_LENGTH, Asked, Page, QuotedPassage, stems

_ENDINGS = ("ing", "ed", "ly", "s")
_WORD = re.compile(r"\b[a-z]{5,}\b")
Paragraphs = tuple[tuple[str, ...], ...]


@lru_cache(maxsize=2)
def _modules(phrasing: Phrasing) -> tuple[tuple[str, Paragraphs], ...]:
    return tuple(
        (name, found)
        for name, found in prose.paragraphs()
        if (zlib.crc32(" ".join(found[0]).encode()) % 5 == 0) == (phrasing == "held_out")
    )


@lru_cache(maxsize=1)
def _by_ending() -> dict[str, tuple[str, ...]]:
    """The longer words of the prose by their ending, to put one in another's place."""
    found: dict[str, dict[str, None]] = {}
    for word in prose.vocabulary():
        if len(word) >= 5:
            found.setdefault(_ending(word), {})[word] = None
    return {ending: tuple(words) for ending, words in found.items()}


def sentence(rng: Random, phrasing: Phrasing) -> str:
    """Returns any sentence of the prose."""
    return rng.choice(rng.choice(rng.choice(_modules(phrasing))[1]))


def _ending(word: str) -> str:
    return next((ending for ending in _ENDINGS if word.endswith(ending)), "")


def _replaced(rng: Random, texts: list[list[str]], phrasing: Phrasing) -> list[list[str]]:
    """The texts with some words replaced throughout, each by one other word or by a made-up name."""
    words = sorted({word for text in texts for sentence in text for word in _WORD.findall(sentence)})
    chosen = rng.sample(words, min(len(words), rng.randint(2, 4 + len(words) // 6)))
    other: dict[str, str] = {}
    for word in chosen:
        if rng.random() < 0.25:
            other[word] = entities.name(rng, rng.choice(("place", "person", "software")), phrasing)
        else:
            other[word] = rng.choice(_by_ending()[_ending(word)])
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, chosen)) + r")\b")
    return [[pattern.sub(lambda match: other[match.group()], sentence) for sentence in text] for text in texts]


def _rarity(sentences: list[str]) -> dict[str, float]:
    """By stem, one over the number of sentences that have it."""
    counts: dict[str, int] = {}
    for sentence in sentences:
        for stem in sorted(stems(sentence)):
            counts[stem] = counts.get(stem, 0) + 1
    return {stem: 1 / count for stem, count in counts.items()}


def scores(question: str, sentences: list[str]) -> list[float]:
    """Returns how far each sentence has the words of the question, rare ones counting most; 1 is all of them."""
    rarity = _rarity(sentences)
    wanted = sorted(stems(question))
    total = sum(rarity.get(stem, 1.0) for stem in wanted)
    if not total:
        return [0.0] * len(sentences)
    kept = [stems(sentence) for sentence in sentences]
    return [sum(rarity[stem] for stem in wanted if stem in has) / total for has in kept]


def points_to(question: str, sentences: list[str], at: int) -> bool:
    """Returns whether the words of the question single out one sentence."""
    found = scores(question, sentences)
    best_other = max((score for other, score in enumerate(found) if other != at), default=0.0)
    return found[at] >= 0.6 and found[at] > 1.35 * best_other and len(stems(question) & stems(sentences[at])) >= 2


def page(rng: Random, phrasing: Phrasing, counts: list[int], rich: float, questions: int, absent: float) -> Page:
    """Passages of about `counts` sentences, as `paragraphs.page` makes; `rich` is how reworded questions are."""
    modules = _modules(phrasing)
    name, pool = rng.choice(modules)
    flat = [list(paragraph) for paragraph in pool]
    at = rng.randrange(len(flat))
    flat = flat[at:] + flat[:at]
    texts: list[list[str]] = []
    for count in counts:
        text: list[str] = []
        while len(text) < count:
            if not flat:
                name, more = rng.choice(modules)
                flat = [list(paragraph) for paragraph in more]
            text += [sentence for sentence in flat.pop(0) if all(sentence not in other for other in (*texts, text))]
        text = text[: max(count, 1)]
        if sum(len(sentence.split()) for kept in (*texts, text) for sentence in kept) > MAX_WORDS_LENGTH and texts:
            break
        texts.append(text)
    spare = [sentence for paragraph in flat[:4] for sentence in paragraph]
    if rng.random() < 0.5:
        *texts, spare = _replaced(rng, [*texts, spare], phrasing)
    passages = tuple(QuotedPassage(name, tuple(text)) for text in texts)
    sentences = [sentence for text in texts for sentence in text]
    return Page(passages, tuple(_asked(rng, phrasing, passages, sentences, spare, rich, questions, absent)))


def _asked(
    rng: Random,
    phrasing: Phrasing,
    passages: tuple[QuotedPassage, ...],
    sentences: list[str],
    spare: list[str],
    rich: float,
    questions: int,
    absent: float,
) -> list[Asked]:
    where = [at for at, passage in enumerate(passages) for _ in passage.sentences]
    order = rng.sample(range(len(sentences)), len(sentences))
    asked: list[Asked] = []
    for _ in range(questions):
        if rng.random() < absent:
            text = _unanswered(rng, phrasing, sentences, spare if rng.random() < 0.3 + 0.6 * rich else [])
            if text:
                asked.append(Asked(cloze.reworded(rng, phrasing, text, rich)))
            continue
        while order:
            at = order.pop()
            text = next(filter(None, (_answered(rng, phrasing, sentences, at) for _ in range(3))), "")
            if text:
                text = cloze.reworded(rng, phrasing, text, rich)
                asked.append(Asked(text, sentences[at], where[at], sentences[at]))
                break
    return asked


def _answered(rng: Random, phrasing: Phrasing, sentences: list[str], at: int) -> str:
    """A question on one sentence, or nothing when it might be another's too."""
    text = cloze.question(rng, phrasing, sentences[at])
    return text if sentences.count(sentences[at]) == 1 and points_to(text, sentences, at) else ""


def _unanswered(rng: Random, phrasing: Phrasing, sentences: list[str], spare: Sequence[str]) -> str:
    """A question on a sentence that is not there: one of `spare`, or of anywhere; nothing when none was found."""
    for _ in range(6):
        text = cloze.question(rng, phrasing, rng.choice(spare) if spare else sentence(rng, phrasing))
        if len(stems(text)) >= 2 and max(scores(text, sentences)) < 0.4:
            return text
    return ""
