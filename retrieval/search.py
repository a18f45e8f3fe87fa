"""A question in, passages out: both indexes, fused, near-duplicates removed, reranked where that is asked for.

Rights and filters are applied inside the indexes and once more by the truth. Knows nothing of HTTP, chats or prompts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from retrieval import fusion
from retrieval.duplicates import distinct
from retrieval.embedding import Embedder
from retrieval.filters import Filters
from retrieval.rerank import max_sim
from retrieval.store import DocumentStore, Passage
from retrieval.views import Views

CANDIDATES = 200  # from each index
RERANKED = 50
RERANK_SHARE = 0.5  # of the reranker's score against the fused one
LONGEST_QUERY = 4000  # characters; the embedder reads some 1,200


class BadQuery(Exception):
    """A query that cannot be searched for; the message says what would be."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage found; `score` orders the hits, the others say where it came from (None: not among that index's)."""

    passage: Passage
    score: float
    dense: float | None = None
    lexical: float | None = None
    rerank: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Hits, best first, and how long each part took."""

    hits: tuple[Hit, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)


class Scorer(Protocol):
    """Another judge of relevance: of each text, how well it answers the query."""

    def __call__(self, query: str, texts: Sequence[str]) -> Sequence[float]: ...


class Searcher:
    """Searches one store. Safe in threads."""

    def __init__(self, store: DocumentStore, views: Views, embedder: Embedder) -> None:
        self._store = store
        self._views = views
        self._embedder = embedder

    def search(
        self,
        user: str,
        query: str,
        limit: int = 10,
        *,
        collections: frozenset[int] | None = None,
        filters: Filters | None = None,
        rerank: bool = False,
        scorer: Scorer | None = None,
        dense_share: float = fusion.DENSE_SHARE,
    ) -> Found:
        """The best passages that `user` may read, in the given collections or in all.

        Raises:
            BadQuery: it is empty or too long.
        """
        query = query.strip()
        if not query:
            raise BadQuery("The query is empty.")
        if len(query) > LONGEST_QUERY:
            raise BadQuery(f"The query has {len(query):,} characters; up to {LONGEST_QUERY:,} are searched for.")
        clock = _Clock()
        vector = self._embedder.embed([query])
        clock.lap("embed")
        count = max(CANDIDATES, limit)
        with self._views.reading():
            readable = self._store.readable(user)
            wanted = readable if collections is None else readable & collections
            documents = self._store.matching(wanted, filters) if filters else None
            if not wanted or (documents is not None and not documents):
                return Found(())
            dense, lexical = dict[int, float](), dict[int, float]()
            if dense_share > 0:
                ids, cosines = self._views.dense.search(vector, count, self._views.allowed(wanted, documents))
                dense = {int(i): float(c) for i, c in zip(ids[0], cosines[0], strict=True) if i >= 0}
                clock.lap("dense")
            if dense_share < 1:
                ids, scores = self._views.lexical.search(query, count, wanted, documents)
                lexical = {int(i): s for i, s in zip(ids, scores, strict=True)}
                clock.lap("lexical")
            fused = fusion.best(fusion.weighted(dense, lexical, dense_share), 2 * count)
            passages = self._store.passages(user, [chunk for chunk, _ in fused])
        hits = [
            Hit(passages[chunk], score, dense.get(chunk), lexical.get(chunk)) for chunk, score in fused if chunk in passages
        ]
        clock.lap("fetch")
        hits = distinct(hits, max(limit, RERANKED))
        clock.lap("distinct")
        if rerank or scorer:
            hits = self._reranked(query, hits, scorer)
            clock.lap("rerank")
        return Found(tuple(hits[:limit]), clock.laps)

    def _reranked(self, query: str, hits: list[Hit], scorer: Scorer | None) -> list[Hit]:
        """The first of them ordered anew by both scores; the rest stays behind them."""
        first, rest = hits[:RERANKED], hits[RERANKED:]
        texts = [hit.passage.text for hit in first]
        scores = scorer(query, texts) if scorer else max_sim(self._embedder, query, texts)
        stretched = fusion.min_max(dict(enumerate(scores)))
        before = fusion.min_max({at: hit.score for at, hit in enumerate(first)})
        mixed = {at: RERANK_SHARE * stretched[at] + (1 - RERANK_SHARE) * before[at] for at in before}
        anew = [
            Hit(first[at].passage, score, first[at].dense, first[at].lexical, float(scores[at]))
            for at, score in fusion.best(mixed, len(first))
        ]
        return anew + rest


class _Clock:
    """Laps by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
