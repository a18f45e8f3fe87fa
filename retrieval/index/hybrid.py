"""Hybrid search: dense and lexical hits, fused, without near-duplicates, reranked where that is asked for.

Rights and filters are applied inside the indexes and once more by the document store. Overlapping pieces of one
passage, and copies of it in other documents, are shown once. Reranking is late interaction: every word of the query
finds its nearest word in the passage (MaxSim, Khattab & Zaharia, 2020). The token vectors are those of the embedder
itself, which was not trained for it; it still ranks passages that say the query's words of one thing above those that
say them of many.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from retrieval.document_store import DocumentStore
from retrieval.embedding import Embedder, Vectors
from retrieval.index.filters import Filters
from retrieval.index.lexical import terms
from retrieval.index.search_index import SearchIndex
from retrieval.records import Among, Found, Hit

DENSE_SHARE = 0.5


def min_max(scores: Mapping[int, float]) -> dict[int, float]:
    """Scores stretched to 0…1; all 1 where they are equal."""
    if not scores:
        return {}
    low, high = min(scores.values()), max(scores.values())
    return {key: (score - low) / (high - low) if high > low else 1.0 for key, score in scores.items()}


def weighted(dense: Mapping[int, float], lexical: Mapping[int, float], share: float = DENSE_SHARE) -> dict[int, float]:
    """The weighted sum of both, each stretched to 0…1; a hit in one list only scores 0 in the other."""
    a, b = min_max(dense), min_max(lexical)
    return {key: share * a.get(key, 0.0) + (1 - share) * b.get(key, 0.0) for key in a.keys() | b.keys()}


def reciprocal_ranks(rankings: Sequence[Sequence[int]], k: int = 60) -> dict[int, float]:
    """Reciprocal rank fusion (Cormack et al., 2009), for scores that do not compare."""
    made: dict[int, float] = {}
    for ranking in rankings:
        for rank, key in enumerate(ranking, 1):
            made[key] = made.get(key, 0.0) + 1 / (k + rank)
    return made


def best(scores: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    """The highest, best first; equal ones by number, so that an order is never chance."""
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:count]


SAME = 0.85  # of the shorter one's word pairs
WITHIN = 0.6  # of the shorter one's characters, where both are of one document


def distinct(hits: list[Hit], count: int) -> list[Hit]:
    """The first `count` hits that do not repeat one before them."""
    kept = list[Hit]()
    pairs = list[frozenset[tuple[str, str]]]()
    for hit in hits:
        mine = _pairs(hit.passage.text)
        if not any(_repeats(hit, mine, other, theirs) for other, theirs in zip(kept, pairs, strict=True)):
            kept.append(hit)
            pairs.append(mine)
            if len(kept) == count:
                break
    return kept


def _repeats(hit: Hit, mine: frozenset[tuple[str, str]], other: Hit, theirs: frozenset[tuple[str, str]]) -> bool:
    a, b = hit.passage, other.passage
    if a.document == b.document:
        shared = min(a.end, b.end) - max(a.start, b.start)
        return shared >= WITHIN * min(a.end - a.start, b.end - b.start)
    shorter = min(len(mine), len(theirs))
    return shorter > 0 and len(mine & theirs) >= SAME * max(len(mine), len(theirs))


def _pairs(text: str) -> frozenset[tuple[str, str]]:
    words = terms(text)
    return frozenset(pairwise(words)) or frozenset((word, "") for word in words)


def max_sim(embedder: Embedder, query: str, texts: Sequence[str]) -> list[float]:
    """For each text the mean over the query's tokens of the highest cosine with one of the text's."""
    (asked,) = embedder.tokens([query])
    return [float((asked @ tokens.T).max(axis=1).mean()) for tokens in embedder.tokens(texts)]


CANDIDATES = 200  # from each index
RERANKED = 50
RERANK_SHARE = 0.5  # of the reranker's score against the fused one
MAX_HITS = 1000
MAX_QUERY_LENGTH = 4000  # characters; the embedder reads some 1,200


class BadQuery(Exception):
    """A query that cannot be searched for; the message names the accepted values."""


class Scorer(Protocol):
    """Another judge of relevance: of each text, how well it answers the query. Higher is better, on any scale."""

    def __call__(self, query: str, texts: Sequence[str]) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class Query:
    """A query of `user`, of the user's own collections unless others are named, and of the attached ones of `files`."""

    user: str
    text: str
    limit: int = 10
    collections: Among = "own"
    filters: Filters | None = None
    rerank: bool = False
    repeats: bool = False  # also show near-duplicates of a better hit
    dense_share: float = DENSE_SHARE  # 0: BM25 alone; 1: vectors alone
    files: frozenset[int] = frozenset()


class Searcher:
    """Searches one store. Safe in threads."""

    def __init__(self, store: DocumentStore, views: SearchIndex, embedder: Embedder) -> None:
        self._store = store
        self._views = views
        self._embedder = embedder

    def search(self, query: Query, scorer: Scorer | None = None) -> Found:
        """The best passages; a `scorer` that is given reranks in place of late interaction.

        Raises:
            BadQuery: the text is empty or too long, or the limit out of range.
            BadFilter: a filter cannot be applied.
            NotFound: there is no such collection.
        """
        text = _checked(query)
        clock = _Clock()
        vector = self._embedder.embed_query(text)
        clock.lap("embed")
        count = max(CANDIDATES, 2 * query.limit)
        with self._views.reading():
            among = self._store.rights.readable(query.user, query.collections, query.files)
            documents = self._store.matching(among, query.filters) if query.filters else None
            clock.lap("rights")
            if not among or (documents is not None and not documents):
                return Found((), clock.laps)
            dense, lexical = dict[int, float](), dict[int, float]()
            scope = self._views.scope(query.user, among, documents)
            if query.dense_share > 0:
                dense = scope.dense(vector, count)
                clock.lap("dense")
            if query.dense_share < 1:
                lexical = scope.lexical(text, count)
                clock.lap("lexical")
            fused = best(weighted(dense, lexical, query.dense_share), max(2 * query.limit, 2 * RERANKED))
            passages = self._store.passages(query.user, [chunk for chunk, _ in fused])
        hits = [
            Hit(passages[chunk], score, dense.get(chunk), lexical.get(chunk))
            for chunk, score in fused
            if chunk in passages
        ]
        clock.lap("fetch")
        if not query.repeats:
            hits = distinct(hits, max(query.limit, RERANKED) if query.rerank or scorer else query.limit)
            clock.lap("distinct")
        if query.rerank or scorer:
            hits = self._reranked(text, hits, scorer)
            clock.lap("rerank")
        hits = self._measured(hits[: query.limit], vector[0])
        clock.lap("cosine")
        return Found(tuple(hits), clock.laps)

    def _measured(self, hits: Sequence[Hit], query: Vectors) -> list[Hit]:
        """The hits with their cosines, from stored vectors. One whose passage went meanwhile has none."""
        rows = self._views.stored([hit.passage.id for hit in hits])
        cosines = {chunk: float(vector @ query) for chunk, vector in rows.items()}
        return [replace(hit, cosine=cosines.get(hit.passage.id)) for hit in hits]

    def _reranked(self, query: str, hits: list[Hit], scorer: Scorer | None) -> list[Hit]:
        """The first of them ordered anew by both scores; the rest stays behind them."""
        first, rest = hits[:RERANKED], hits[RERANKED:]
        texts = [hit.passage.text for hit in first]
        scores = scorer(query, texts) if scorer else max_sim(self._embedder, query, texts)
        stretched = min_max(dict(enumerate(scores)))
        before = min_max({at: hit.score for at, hit in enumerate(first)})
        mixed = {at: RERANK_SHARE * stretched[at] + (1 - RERANK_SHARE) * before[at] for at in before}
        anew = [
            Hit(first[at].passage, score, first[at].dense, first[at].lexical, float(scores[at]))
            for at, score in best(mixed, len(first))
        ]
        return anew + rest


def _checked(query: Query) -> str:
    text = query.text.strip()
    if not text:
        raise BadQuery("The query is empty.")
    if len(text) > MAX_QUERY_LENGTH:
        raise BadQuery(f"The query has {len(text):,} characters; up to {MAX_QUERY_LENGTH:,} are searched for.")
    if not 1 <= query.limit <= MAX_HITS:
        raise BadQuery(f"The limit is {query.limit}; accepted: 1 to {MAX_HITS}.")
    return text


class _Clock:
    """Laps by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
