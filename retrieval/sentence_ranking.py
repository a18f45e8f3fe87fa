"""Ranks the sentences of retrieved passages by how well each answers a question (extractive question answering).

Late interaction (ColBERT's MaxSim, Khattab and Zaharia 2020) over the question's content words, weighed by rarity. The
embedder computes the token vectors of a whole passage, so a sentence is read in its context. The nearness of the
sentence as a whole and its passage's score are added. The kind of thing asked for (a name, a number, a date) and the
score of the sentence before did not help on held-out questions. Token vectors of passages stay in memory; the least
recently used are evicted first. Knows nothing of models that write.
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from retrieval.embedding import Embedder
from retrieval.evidence import Rarity, token_shares
from retrieval.index.lexical import content
from retrieval.prompt_context import PromptSource
from retrieval.spans import sentences

CACHE_BYTES = 64 << 20  # of token vectors, in float16
WINDOW = 200  # word pieces of a source that are embedded at once; embedders read 256 and more

# Ratios fitted on the questions of the chunking set by a softmax over sentences; XQuAD decided nothing.
COSINE, PASSAGE = 0.35, 0.4
QUESTION = -2.0  # a question answers none: behind all statements
# A logistic regression of "the passages answer" on the best MaxSim, on our own essays (`bench/retrieval/quality.py`).
SLOPE, MIDDLE = 14.4, 0.503
_PRONOUN = re.compile(
    r"[\"'“‘(\[]*(?:it|he|she|they|this|that|these|those|its|his|her|their|such|there|here|then|both|also|however|but|"
    r"instead)\b",
    re.IGNORECASE,
)
ANSWERS = 0.5  # the probability from which on a sentence is given as the answer


@dataclass(frozen=True, slots=True)
class RankedSentence:
    """Characters `start` to `end` of a source's text. `probability`: that the passages answer, by this sentence."""

    source: PromptSource
    start: int
    end: int
    score: float
    probability: float

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def contains(self, other: RankedSentence) -> bool:
        return self.source is other.source and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, slots=True)
class _Sentence:
    start: int
    end: int
    vectors: NDArray[np.float16]  # (tokens, size), each of length 1


class SentenceRanker:
    """Safe in threads."""

    def __init__(self, embedder: Embedder, cache_bytes: int = CACHE_BYTES) -> None:
        self._embedder = embedder
        self._max_bytes = cache_bytes
        self._cached: OrderedDict[str, tuple[_Sentence, ...]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def rank(
        self, question: str, found: Sequence[PromptSource], rarity: Rarity, limit: int = 5
    ) -> list[RankedSentence]:
        """Returns the sentences of `found` that answer best, the best first."""
        weights = {stem: rarity(stem) for stem in content(question)}
        (asked,) = self._embedder.tokens([question])
        shares = token_shares(question, self._embedder, weights)[: len(asked)]
        mean = asked.mean(axis=0)
        ranked = list[RankedSentence]()
        for source, cut in zip(found, self._sentences([source.text for source in found]), strict=True):
            for each in cut:
                vectors = each.vectors.astype(np.float32)
                own = vectors.mean(axis=0)
                max_sim = float((asked[: len(shares)] @ vectors.T).max(axis=1) @ shares)
                cosine = float(mean @ own / math.sqrt(float(mean @ mean) * float(own @ own)))
                score = max_sim + COSINE * cosine + PASSAGE * source.score
                if source.text[each.start : each.end].rstrip().endswith("?"):
                    score += QUESTION
                ranked.append(RankedSentence(source, each.start, each.end, score, _sigmoid(max_sim)))
        return sorted(ranked, key=lambda sentence: -sentence.score)[:limit]

    def _sentences(self, texts: Sequence[str]) -> list[tuple[_Sentence, ...]]:
        with self._lock:
            known = {text: self._cached[text] for text in texts if text in self._cached}
            for text in known:
                self._cached.move_to_end(text)
        missing = [text for text in dict.fromkeys(texts) if text not in known]
        made = dict(zip(missing, self._embedded(missing), strict=True))
        with self._lock:
            for text, cut in made.items():
                if text not in self._cached:
                    self._cached[text] = cut
                    self._bytes += _size(cut)
            while self._bytes > self._max_bytes:
                self._bytes -= _size(self._cached.popitem(last=False)[1])
        return [known[text] if text in known else made[text] for text in texts]

    def _embedded(self, texts: Sequence[str]) -> list[tuple[_Sentence, ...]]:
        """Embeds texts in windows of whole sentences, and cuts the vectors into those of each sentence."""
        windows = list[tuple[int, list[tuple[int, int]]]]()  # a text's number, and its sentences
        for number, (text, pieces) in enumerate(zip(texts, self._embedder.pieces(texts), strict=True)):
            size = WINDOW
            for start, end in sentences(text):
                count = sum(start <= first and last <= end for first, last in pieces)
                if size + count > WINDOW:
                    windows.append((number, []))
                    size = 0
                windows[-1][1].append((start, end))
                size += count
        parts = [texts[number][cut[0][0] : cut[-1][1]] for number, cut in windows]
        made: list[list[_Sentence]] = [[] for _ in texts]
        lead = self._embedder.leading
        for (number, cut), vectors, pieces in zip(
            windows, self._embedder.tokens(parts), self._embedder.pieces(parts), strict=True
        ):
            first = cut[0][0]
            for start, end in cut:
                own = [
                    lead + at
                    for at, (left, right) in enumerate(pieces)
                    if start <= first + left and first + right <= end and lead + at < len(vectors)
                ]
                if own:  # else it is past the window of the embedder, or has no word
                    made[number].append(_Sentence(start, end, vectors[own[0] : own[-1] + 1].astype(np.float16)))
        return [tuple(cut) for cut in made]


def with_context(question: str, best: RankedSentence) -> RankedSentence:
    """Extends a sentence to the next one, where that has a word of the question which it lacks itself; else to the one
    before, where it begins with a pronoun."""
    text, title = best.source.text, content(best.source.title)
    cut = list(sentences(text))
    at = next(number for number, (start, end) in enumerate(cut) if start <= best.start < end)
    lacking = set(content(question)) - set(content(best.text)) - set(title)
    if at + 1 < len(cut) and lacking & set(content(text[slice(*cut[at + 1])])):
        return replace(best, end=cut[at + 1][1])
    if at and _PRONOUN.match(best.text):
        return replace(best, start=cut[at - 1][0])
    return best


def _sigmoid(max_sim: float) -> float:
    return 1.0 / (1.0 + math.exp(-SLOPE * (max_sim - MIDDLE)))


def _size(cut: Sequence[_Sentence]) -> int:
    return sum(each.vectors.nbytes for each in cut)
