"""Is the answer in what was found? A score from 0 to 1 for a question and its hits, and what follows from it.

Looked at are windows of one or two sentences: how many of the question's words they have, weighed by how rare those
are; how near they come in meaning, as a whole and word by word; and whether they hold something of the kind that is
asked for, such as a year. A logistic function makes one number of it, whose weights were fitted on paragraphs of our
own (`bench/evidence.py` does it again). Knows nothing of models that answer: a `sufficient` that is passed in, such as
a model's own log-probability that the answer is there, is mixed in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from retrieval.embedding import Embedder, Vectors
from retrieval.lexical import content, terms
from retrieval.records import Hit
from retrieval.spans import names, numbers, sentences

PASSAGES = 5  # hits looked at
WINDOWS = 8  # of their windows embedded
ANSWER, PARTIAL = 0.5, 0.25  # scores from which on there is an answer, or part of one
WEIGHTS = (0.0, 0.0, 0.0, 0.0, 0.0)
BIAS = 0.0

Verdict = Literal["answer", "partial", "none"]
Rarity = Callable[[str], float]  # of a stem, such as its inverse document frequency
Sufficient = Callable[[str, Sequence[str]], float]  # (question, texts) → how surely they answer it, 0 to 1

_WHEN = re.compile(r"\b(?:when|what year|which year|how many|how much|how (?:long|old|tall|far|high|big|large)|"
                   r"what (?:percentage|number|date|century))\b", re.IGNORECASE)  # fmt: skip
_WHO = re.compile(r"\b(?:who|whom|whose|where|which (?:city|country|person|team|company)|"
                  r"what (?:city|country|person|team|company|place))\b", re.IGNORECASE)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Evidence:
    """How surely the hits answer, 0 to 1; `best` is the window that speaks most for it."""

    score: float
    verdict: Verdict
    best: str = ""


@dataclass(frozen=True, slots=True)
class _Window:
    text: str
    covered: float  # of the question's words, by rarity


def weigh(
    question: str, hits: Sequence[Hit], embedder: Embedder, rarity: Rarity, sufficient: Sufficient | None = None
) -> Evidence:
    """Weigh what was found."""
    if not hits or not content(question):
        return Evidence(0.0, "none")
    values, best = features(question, [(hit.passage.title, hit.passage.text) for hit in hits], embedder, rarity)
    score = 1 / (1 + math.exp(-(BIAS + float(np.dot(WEIGHTS, values)))))
    if sufficient:
        score = (score + sufficient(question, [hit.passage.text for hit in hits[:PASSAGES]])) / 2
    return Evidence(score, "answer" if score >= ANSWER else "partial" if score >= PARTIAL else "none", best)


def features(
    question: str, texts: Sequence[tuple[str, str]], embedder: Embedder, rarity: Rarity
) -> tuple[NDArray[np.float64], str]:
    """The five numbers that are weighed, of passages with their titles, and the window they speak for."""
    weights = {stem: rarity(stem) for stem in content(question)}
    total = sum(weights.values()) or 1.0
    windows, covered = list[_Window](), 0.0
    for title, text in texts[:PASSAGES]:
        titled = frozenset(content(title))
        covered = max(covered, _share(weights, total, titled | frozenset(content(text))))
        spans = list(sentences(text))
        for start, end in [*spans, *((a, d) for (a, _), (_, d) in pairwise(spans))]:
            part = text[start:end]
            windows.append(_Window(part, _share(weights, total, titled | frozenset(content(part)))))
    windows = sorted(windows, key=lambda window: (-window.covered, len(window.text)))[:WINDOWS]
    asked, *found = embedder.tokens([question, *(window.text for window in windows)])
    near = np.array([_cosine(asked, tokens) for tokens in found])
    both = near + np.array([window.covered for window in windows])
    soft = _token_weights(question, embedder, weights)
    matched = np.array([_matched(asked, tokens, soft) for tokens in found])
    first = int(both.argmax())
    kind = max((_of_kind(question, window.text) for window in windows[:3]), default=0.0)
    values = (float(both.max()) / 2, covered, float(near.max()), float(matched.max()), kind)
    return np.array(values), windows[first].text


def _share(weights: dict[str, float], total: float, words: frozenset[str]) -> float:
    return sum(weight for stem, weight in weights.items() if stem in words) / total


def _cosine(asked: Vectors, tokens: Vectors) -> float:
    a, b = asked.mean(axis=0), tokens.mean(axis=0)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def _matched(asked: Vectors, tokens: Vectors, weights: Vectors) -> float:
    """Late interaction over the question's content words alone."""
    return float((asked @ tokens.T).max(axis=1)[: len(weights)] @ weights)


def _token_weights(question: str, embedder: Embedder, weights: dict[str, float]) -> Vectors:
    """How much each of the embedder's tokens counts: that of its word, shared among the word's pieces."""
    (spans,) = embedder.pieces([question])
    made = [0.0]  # the first token is none of the text's
    for start, end in spans:
        left = max(question.rfind(" ", 0, start + 1) + 1, 0)
        right = question.find(" ", end)
        word = question[left : right if right >= 0 else len(question)]
        stems = [stem for stem in content(word) if stem in weights]
        made.append(max((weights[stem] for stem in stems), default=0.0) * (end - start) / max(1, len(word)))
    total = sum(made) or 1.0
    return np.array(made, np.float32) / np.float32(total)


def _of_kind(question: str, text: str) -> float:
    """Whether a text has a number or a name that the question has not, where it asks for one; 0.5 if it does not."""
    asked = frozenset(terms(question))
    if _WHEN.search(question):
        return float(bool(numbers(text) - numbers(question)))
    if _WHO.search(question):
        return float(bool({name for name in names(text, everywhere=True) if name not in asked}))
    return 0.5
