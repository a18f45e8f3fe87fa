"""Scores how well retrieved passages answer a question, and searches again for the parts they leave open.

Windows of one or two sentences are looked at in two ways: how many of the question's content words one has (weighed by
how rare they are) and how near it comes as a whole; and how near its words come to each of the question's, meaning for
meaning. Their mean is the score, 0 to 1; nothing in it is fitted. Where "answer" and "partial" begin was chosen on
paragraphs of our own (`bench/retrieval/quality.py`). Checking for a number or a name in a window where one is asked for
did not help. `investigate` is bounded in hops, in questions and in hits kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from retrieval.embedding import Embedder, Vectors
from retrieval.index.hybrid import best, reciprocal_ranks
from retrieval.index.lexical import content
from retrieval.records import Found, Hit
from retrieval.spans import sentences

PASSAGES = 5  # hits looked at
WINDOWS = 8  # of their windows, those with the most of the question's words
PARTIAL = 0.42  # from here on the model is asked: so score 95 of 100 questions with their paragraph found first
ANSWER = 0.55  # from here on there is an answer: 94 of 100 score less when their paragraph is taken away

Verdict = Literal["answer", "partial", "none"]
Rarity = Callable[[str], float]  # of a stem, such as its inverse document frequency
Sufficient = Callable[[str, Sequence[str]], float]  # (question, texts) → how surely they answer it, 0 to 1


@dataclass(frozen=True, slots=True)
class Evidence:
    """The probability that the hits answer, 0 to 1; `best` is the window that speaks most for it."""

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
    """Weigh the hits."""
    weights = {stem: rarity(stem) for stem in content(question)}
    windows = _windows(hits[:PASSAGES], weights)
    if not windows:
        return Evidence(0.0, "none")
    asked, *found = embedder.tokens([question, *(window.text for window in windows)])
    whole = np.array([(_cosine(asked, t) + window.covered) / 2 for t, window in zip(found, windows, strict=True)])
    shares = token_shares(question, embedder, weights)
    by_word = max(_matched(asked, tokens, shares) for tokens in found)
    score = (float(whole.max()) + by_word) / 2
    if sufficient:
        score = (score + sufficient(question, [hit.passage.text for hit in hits[:PASSAGES]])) / 2
    return Evidence(score, verdict_of(score), windows[int(whole.argmax())].text)


def verdict_of(score: float) -> Verdict:
    return "answer" if score >= ANSWER else "partial" if score >= PARTIAL else "none"


def _windows(hits: Sequence[Hit], weights: dict[str, float]) -> list[_Window]:
    """Single sentences and pairs of neighbours, those first that have the most of the question's words."""
    total = sum(weights.values()) or 1.0
    made = list[_Window]()
    for hit in hits:
        text, title = hit.passage.text, frozenset(content(hit.passage.title))
        spans = list(sentences(text))
        for start, end in [*spans, *((first, last) for (first, _), (_, last) in pairwise(spans))]:
            words = title | frozenset(content(text[start:end]))
            covered = sum(weight for stem, weight in weights.items() if stem in words) / total
            made.append(_Window(text[start:end], covered))
    return sorted(made, key=lambda window: (-window.covered, len(window.text)))[:WINDOWS]


def _cosine(asked: Vectors, tokens: Vectors) -> float:
    a, b = asked.mean(axis=0), tokens.mean(axis=0)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def _matched(asked: Vectors, tokens: Vectors, shares: Vectors) -> float:
    """Late interaction over the question's content words alone."""
    nearest = (asked @ tokens.T).max(axis=1)[: len(shares)]
    return float(nearest @ shares[: len(nearest)])  # of a long question the embedder reads the beginning


def token_shares(question: str, embedder: Embedder, weights: dict[str, float]) -> Vectors:
    """Returns how much each of the embedder's tokens counts: its word's weight, shared among the word's pieces."""
    (spans,) = embedder.pieces([question])
    made = [0.0] * embedder.leading  # tokens before the text's own
    for start, end in spans:
        left = question.rfind(" ", 0, start + 1) + 1
        right = question.find(" ", end)
        word = question[left : right if right >= 0 else len(question)]
        heaviest = max((weights.get(stem, 0.0) for stem in content(word)), default=0.0)
        made.append(heaviest * (end - start) / max(1, len(word)))
    total = sum(made) or 1.0
    return np.array(made, np.float32) / np.float32(total)


ENOUGH = 0.5  # coverage from which a question is asked once
HOPS = 2
QUESTIONS = 4  # for one hop

Search = Callable[[str], Found]
Coverage = Callable[[str, Sequence[Hit]], float]
Split = Callable[[str, Sequence[Hit]], Sequence[str]]

_BORDERS = re.compile(
    r"\s*(?:;|\?\s+|,?\s+and\s+(?=(?:what|when|where|who|whom|whose|why|how|which|did|was|is|are)\b))"
)


@dataclass(frozen=True, slots=True)
class Investigation:
    """The questions of an investigation, in order, and their hits, best first; `coverage` is of the whole question."""

    questions: tuple[str, ...]
    hits: tuple[Hit, ...]
    coverage: float


def clauses(question: str, hits: Sequence[Hit] = ()) -> list[str]:
    """The parts of a question that asks several things; none where it asks one."""
    parts = [part.strip(" ?.,") for part in _BORDERS.split(question)]
    parts = [part for part in parts if content(part)]
    return parts if len(parts) > 1 else []


def investigate(
    search: Search,
    coverage: Coverage,
    question: str,
    split: Split = clauses,
    *,
    enough: float = ENOUGH,
    hops: int = HOPS,
    limit: int = 10,
) -> Investigation:
    """Search for a question; while it is covered too little, for the questions that `split` makes of it and of the
    hits.
    """
    asked, rankings = [question], [search(question).hits]
    hits = rankings[0][:limit]
    covered = coverage(question, hits)
    for _ in range(hops):
        if covered >= enough:
            break
        new = [part for part in split(question, hits) if part.strip() and part not in asked][:QUESTIONS]
        if not new:
            break
        asked += new
        rankings += [search(part).hits for part in new]
        hits = _merged(rankings)[:limit]
        covered = coverage(question, hits)
    return Investigation(tuple(asked), tuple(hits), covered)


def _merged(rankings: Sequence[Sequence[Hit]]) -> tuple[Hit, ...]:
    """By reciprocal ranks: scores of different questions do not compare."""
    by_chunk = {hit.passage.id: hit for ranking in reversed(rankings) for hit in ranking}
    ranks = reciprocal_ranks([[hit.passage.id for hit in ranking] for ranking in rankings])
    return tuple(by_chunk[chunk] for chunk, _ in best(ranks, len(ranks)))
