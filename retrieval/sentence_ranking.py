"""Ranks the sentences of retrieved passages by how well each answers a question (extractive question answering).

Late interaction (ColBERT's MaxSim, Khattab and Zaharia 2020) over the question's content words, weighed by rarity. The
embedder computes the token vectors of a whole passage, so a sentence is read in its context. A word of the question
also counts where the sentence before has it, or the headings above, though less. The nearness of the sentence as a
whole and its passage's score are added. The kind of thing asked for (a name, a number, a date) and the words of the
sentence after did not help on held-out questions. Token vectors of passages stay in memory; the least recently used are
evicted first. Knows nothing of models that write.
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieval.embedding import Embedder
from retrieval.evidence import Rarity, token_shares
from retrieval.index.lexical import content
from retrieval.prompt_context import OVERHEAD, CountTokens, PromptSource
from retrieval.spans import ENDS, Statement, statements

Half = NDArray[np.float16]

CACHE_BYTES = 64 << 20  # of token vectors, in float16
WINDOW = 200  # word pieces of a source that are embedded at once; embedders read 256 and more

# Ratios fitted on the questions of the chunking set by a softmax over sentences; XQuAD decided nothing.
COSINE, PASSAGE = 0.35, 0.4
ABOVE, BEFORE = 0.6, 0.8  # of a word's nearness to headings and to the sentence before
QUESTION = -2.0  # a question answers none: behind all statements
# A logistic regression of "the passages answer" on the best MaxSim, on our own essays (`bench/retrieval/quality.py`).
SLOPE, MIDDLE = 14.5, 0.511
_PRONOUN = re.compile(
    r"[\"'“‘(\[]*(?:it|he|she|they|this|that|these|those|its|his|her|their|such|there|here|then|both|also|however|but|"
    r"instead)\b",
    re.IGNORECASE,
)
SECTION = 400  # characters of a section that are quoted together
_IDENTIFIER = re.compile(r"\b[A-Za-z]+[-_]?\d[\w-]*")  # E3, LT-220
ANSWERS = 0.5  # the probability from which on a sentence is given as the answer


@dataclass(frozen=True, slots=True)
class RankedSentence:
    """Neighbouring statements of a source. `probability`: that the passages answer, by them."""

    source: PromptSource
    statements: tuple[Statement, ...]
    score: float
    probability: float

    @property
    def start(self) -> int:
        """Returns where it begins in the source's text."""
        return self.statements[0].start

    @property
    def end(self) -> int:
        return self.statements[-1].end

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    @property
    def shown(self) -> str:
        """Returns the text as a reader gets it: without marks of lists, a row with the names of its columns."""
        *most, last = (each.shown(self.source.text) for each in self.statements)
        return " ".join([*(each if each.endswith(ENDS) else f"{each};" for each in most), last])

    def contains(self, other: RankedSentence) -> bool:
        return self.source is other.source and self.start <= other.start and other.end <= self.end


class _Key(NamedTuple):
    """The parts of a source that its token vectors depend on."""

    title: str
    context: str
    text: str


@dataclass(frozen=True, slots=True)
class _Embedded:
    """A statement's token vectors, each of length 1, and those of the title and the headings that it stands under."""

    statement: Statement
    vectors: Half  # (tokens, size)
    above: Half  # (tokens, size)
    heading: frozenset[str]  # stems of the innermost one


class SentenceRanker:
    """Safe in threads."""

    def __init__(self, embedder: Embedder, cache_bytes: int = CACHE_BYTES) -> None:
        self._embedder = embedder
        self._max_bytes = cache_bytes
        self._cached: OrderedDict[_Key, tuple[_Embedded, ...]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def rank(
        self, question: str, found: Sequence[PromptSource], rarity: Rarity, limit: int | None = 5
    ) -> list[RankedSentence]:
        """Returns the statements of `found` that answer best, the best first, all of them without a `limit`; none of a
        source without an identifier that the question has."""
        weights = {stem: rarity(stem) for stem in content(question)}
        (asked,) = self._embedder.tokens([question])
        shares = token_shares(question, self._embedder, weights)[: len(asked)]
        mean, words = asked.mean(axis=0), asked[: len(shares)]
        ranked = list[RankedSentence]()
        found = [source for source in found if _has_all(_IDENTIFIER.findall(question), source)]
        for source, cut in zip(found, self._statements([_key(source) for source in found]), strict=True):
            block, before = -1, np.zeros(len(words), np.float32)
            for each in cut:
                at, vectors = each.statement, each.vectors.astype(np.float32)
                own, above = (words @ vectors.T).max(axis=1), (words @ each.above.astype(np.float32).T).max(axis=1)
                if at.block != block:
                    block, before = at.block, np.zeros_like(before)
                titled = bool(weights) and weights.keys() <= each.heading
                max_sim = float(np.maximum.reduce([own, (1.0 if titled else ABOVE) * above, BEFORE * before]) @ shares)
                before = own
                centre = vectors.mean(axis=0)
                cosine = float(mean @ centre / math.sqrt(float(mean @ mean) * float(centre @ centre)))
                score = max_sim + COSINE * cosine + PASSAGE * source.score
                if source.text[at.start : at.end].endswith(("?", "？")):
                    score += QUESTION
                ranked.append(RankedSentence(source, (at,), score, _sigmoid(max_sim)))
        return sorted(ranked, key=lambda sentence: -sentence.score)[:limit]

    def _statements(self, keys: Sequence[_Key]) -> list[tuple[_Embedded, ...]]:
        with self._lock:
            known = {key: self._cached[key] for key in keys if key in self._cached}
            for key in known:
                self._cached.move_to_end(key)
        missing = [key for key in dict.fromkeys(keys) if key not in known]
        made = dict(zip(missing, self._embedded(missing), strict=True))
        with self._lock:
            for key, cut in made.items():
                if key not in self._cached:
                    self._cached[key] = cut
                    self._bytes += _size(cut)
            while self._bytes > self._max_bytes:
                self._bytes -= _size(self._cached.popitem(last=False)[1])
        return [known[key] if key in known else made[key] for key in keys]

    def _embedded(self, keys: Sequence[_Key]) -> list[tuple[_Embedded, ...]]:
        """Embeds texts in windows of whole spans, and cuts the vectors into those of each; a table's row with the names
        of its columns, and what a whole text stands under, by itself."""
        cuts = [statements(key.text, key.context) for key in keys]
        windows = list(self._windows(keys, cuts))
        parts = [keys[number].text[spans[0][0] : spans[-1][1]] for number, spans in windows]
        rows = [(number, each) for number, cut in enumerate(cuts) for each in cut if each.header]
        alone = [*(each.shown(keys[number].text) for number, each in rows), *(f"{k.title}. {k.context}" for k in keys)]
        lead = self._embedder.leading
        vectors = [each.astype(np.float16) for each in self._embedder.tokens([*parts, *alone])]
        held: list[dict[tuple[int, int], Half]] = [{} for _ in keys]
        for (number, spans), made, pieces in zip(windows, vectors, self._embedder.pieces(parts), strict=False):
            first = spans[0][0]
            for start, end in spans:
                own = [
                    lead + at
                    for at, (left, right) in enumerate(pieces)
                    if start <= first + left and first + right <= end and lead + at < len(made)
                ]
                if own:  # else it is past the window of the embedder, or has no word
                    held[number][start, end] = made[own[0] : own[-1] + 1]
        for (number, each), made in zip(rows, vectors[len(parts) :], strict=False):
            held[number][each.start, each.end] = made
        tops = vectors[len(vectors) - len(keys) :]
        return [
            tuple(
                _Embedded(
                    each, by_span[each.start, each.end], np.concatenate([top, *_of(each.headings, by_span)]),
                    _heading_words(key.text, each),
                )
                for each in cut
                if (each.start, each.end) in by_span
            )
            for key, cut, by_span, top in zip(keys, cuts, held, tops, strict=True)
        ]  # fmt: skip

    def _windows(
        self, keys: Sequence[_Key], cuts: Sequence[Sequence[Statement]]
    ) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yields a text's number and those of its spans, headings among them, that are embedded at once."""
        for number, pieces in enumerate(self._embedder.pieces([key.text for key in keys])):
            spans = {(each.start, each.end) for each in cuts[number] if not each.header}
            window, size = list[tuple[int, int]](), 0
            for start, end in sorted(spans.union(*(each.headings for each in cuts[number]))):
                count = sum(start <= first and last <= end for first, last in pieces)
                if window and size + count > WINDOW:
                    yield number, window
                    window, size = [], 0
                window.append((start, end))
                size += count
            if window:
                yield number, window


def with_context(question: str, best: RankedSentence) -> RankedSentence:
    """Extends a statement to what it needs: to its section, where the heading has all of the question's words; to the
    next one, where that has a word of the question which it lacks itself; to the one before, where it begins with a
    pronoun."""
    text, wanted, (own,) = best.source.text, set(content(question)), best.statements
    if own.header:
        return best
    every = statements(text, best.source.context)
    at = next(number for number, each in enumerate(every) if (each.start, each.end) == (own.start, own.end))
    heading = _heading_words(text, own)
    if wanted and wanted <= heading:
        section = [each for each in every if each.headings == own.headings and not each.header]
        if section[-1].end - section[0].start <= SECTION:
            return replace(best, statements=tuple(section))
    lacking = wanted - set(content(best.text)) - set(content(best.source.title)) - heading
    after = every[at + 1] if at + 1 < len(every) and every[at + 1].block == own.block else None
    if after and lacking & set(content(text[after.start : after.end])):
        return replace(best, statements=(own, after))
    if at and every[at - 1].block == own.block and _PRONOUN.match(best.text):
        return replace(best, statements=(every[at - 1], own))
    return best


def windows(question: str, ranked: Iterable[RankedSentence], budget: int, count: CountTokens) -> list[PromptSource]:
    """Cuts sources to what answers best: the statements of `ranked`, the best first, with what they need, in at most
    `budget` tokens (contextual compression). Neighbouring ones are one source. Sources keep their order, and the places
    of their text in its document.
    """
    kept: dict[int, tuple[PromptSource, list[tuple[int, int]]]] = {}
    left = budget
    for one in ranked:
        wide = with_context(question, one)
        spans = kept.setdefault(id(wide.source), (wide.source, []))[1]
        if any(start <= wide.start and wide.end <= end for start, end in spans):
            continue
        size = count(wide.text) + OVERHEAD
        if size > left:
            break
        left -= size
        spans.append((wide.start, wide.end))
    cut = [
        (source, start, end)
        for source, spans in sorted(kept.values(), key=lambda each: (each[0].document, each[0].start))
        for start, end in _joined(spans, source.text)
    ]
    return [source.part(f"S{number}", start, end) for number, (source, start, end) in enumerate(cut, 1)]


def _joined(spans: Iterable[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Returns the spans in order, those with nothing but white space between them as one."""
    made = list[tuple[int, int]]()
    for start, end in sorted(spans):
        if made and not text[made[-1][1] : start].strip():
            made[-1] = made[-1][0], max(end, made[-1][1])
        else:
            made.append((start, end))
    return made


def _heading_words(text: str, statement: Statement) -> frozenset[str]:
    """Returns the stems of the innermost heading that a statement stands under."""
    return frozenset(content(text[slice(*statement.headings[-1])])) if statement.headings else frozenset()


def _key(source: PromptSource) -> _Key:
    return _Key(source.title, source.context, source.text)


def _has_all(words: Iterable[str], source: PromptSource) -> bool:
    held = f"{source.title} {source.context} {source.text}".lower()
    return all(word.lower() in held for word in words)


def _of(spans: Iterable[tuple[int, int]], held: Mapping[tuple[int, int], Half]) -> list[Half]:
    return [held[span] for span in spans if span in held]


def _sigmoid(max_sim: float) -> float:
    return 1.0 / (1.0 + math.exp(-SLOPE * (max_sim - MIDDLE)))


def _size(cut: Sequence[_Embedded]) -> int:
    return sum(each.vectors.nbytes + each.above.nbytes for each in cut)
