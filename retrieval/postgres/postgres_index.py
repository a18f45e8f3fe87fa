"""Dense and lexical search in PostgreSQL: pgvector's HNSW (Malkov & Yashunin, 2016), and BM25 over a GIN index.

The user's rights are joined inside each statement, so a right that is taken back meanwhile shows nothing. While a
search is of few chunks all their vectors are compared: exact, and sooner than a graph of everybody's. Of more, the
graph is scanned on until enough chunks have passed the conditions; where it gives up, all are compared. GIN gives the
chunks with the query's rarest words, and `bm25` scores these, by the same counts and so the same numbers as beside
SQLite. Vectors of texts are stored before their chunks; those that went meanwhile, or are another embedder's, are made
when that is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrieval.document_database import StoreConnection
from retrieval.embedding import Embedder, Vectors
from retrieval.index.bm25 import best_scored, field_queries, heaviest
from retrieval.index.chunks import Chunks
from retrieval.index.lexical import LOOKUP_WORDS, query_terms
from retrieval.index.views import vectors_of
from retrieval.postgres.postgres_database import PostgresDatabase
from retrieval.postgres.words import WordCounts, as_tsquery, rarest

EXACT_UP_TO = 20_000  # chunks of a search whose vectors are compared one by one
EF_SEARCH = 400  # candidates that a scan of the graph keeps (1 to 1000)
SCANNED = 200_000  # vectors of the graph that a search looks at before it compares all
MAX_SIZE = 4000  # numbers of a vector that pgvector has an index for
CANDIDATES = 5000  # chunks that are scored by BM25; those with the query's rarest words
BATCH = 256  # chunks embedded at once where vectors are missing

_READABLE = """c.collection = ANY(:collections::bigint[]) AND EXISTS (
    SELECT 1 FROM collections o WHERE o.id = c.collection AND (o.owner = :user
        OR EXISTS (SELECT 1 FROM members m WHERE m.collection = o.id AND m."user" = :user)))"""
_COUNT = "SELECT count(*) FROM (SELECT 1 FROM chunks c WHERE {allowed} LIMIT :limit) AS held"
# Not by the index's own expression: the planner is not to take the index.
_EXACT = """SELECT c.id, -(v.vector <#> :vector::halfvec) AS cosine
    FROM chunks c JOIN vectors v ON v.hash = c.hash AND v.embedder = :embedder
    WHERE {allowed} ORDER BY cosine DESC, c.id LIMIT :count"""
_NEAREST = """SELECT c.id, -(v.vector::halfvec({size}) <#> :vector::halfvec({size})) AS cosine
    FROM vectors v JOIN chunks c ON c.hash = v.hash
    WHERE v.embedder = :embedder AND {allowed}
    ORDER BY v.vector::halfvec({size}) <#> :vector::halfvec({size}) LIMIT :count"""
# A plan that takes the vectors in the index's order and looks up the chunks of each, until there are enough.
_GRAPH = (
    "SET LOCAL enable_seqscan = off", "SET LOCAL enable_sort = off", "SET LOCAL enable_hashjoin = off",
    "SET LOCAL enable_mergejoin = off", "SET LOCAL hnsw.iterative_scan = strict_order",
    f"SET LOCAL hnsw.ef_search = {EF_SEARCH}", f"SET LOCAL hnsw.max_scan_tuples = {SCANNED}",
)  # fmt: skip
_MATCHING = "SELECT c.id, c.text_hashes, c.title_hashes FROM chunks c WHERE c.words @@ :words::tsquery AND {allowed}"
_LACKING = """SELECT c.id FROM chunks c WHERE c.added > ? AND NOT EXISTS (
    SELECT 1 FROM vectors v WHERE v.hash = c.hash AND v.embedder = ?) ORDER BY c.id LIMIT ?"""


class PostgresIndex:
    """The indexes of a PostgreSQL database, as `retrieval.index.search_index.SearchIndex`."""

    def __init__(self, database: PostgresDatabase, chunks: Chunks, embedder: Embedder) -> None:
        """
        Raises:
            ValueError: the embedder's vectors are too long for an index.
        """
        if embedder.size > MAX_SIZE:
            raise ValueError(
                f"The embedder's vectors have {embedder.size} numbers, and pgvector's index takes {MAX_SIZE}; "
                "accepted: another embedder, or no --database"
            )
        self._database, self._chunks, self._embedder = database, chunks, embedder
        self._seen = -1  # generation up to which every chunk has a vector
        self._make_graph()
        self._catch_up()

    def _make_graph(self) -> None:
        name = f"vectors_{hashlib.sha256(self._embedder.key.encode()).hexdigest()[:16]}_{self._embedder.size}"
        with self._database.writing() as db:
            db.execute(
                f"CREATE INDEX IF NOT EXISTS {name} ON vectors USING hnsw "
                f"((vector::halfvec({self._embedder.size})) halfvec_ip_ops) WHERE embedder = ?",
                (self._embedder.key,),
            )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change of the truth, which a transaction makes whole; then makes vectors that are missing."""
        yield
        self._catch_up()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Does nothing: each statement sees whole changes, and passages that went between two are left out."""
        yield

    def _catch_up(self) -> None:
        now = self._chunks.generation()
        while lacking := self._database.rows(_LACKING, (self._seen, self._embedder.key, BATCH)):
            vectors_of(self._chunks, self._embedder, self._chunks.rows([row[0] for row in lacking]))
        self._seen = now

    def scope(self, user: str, collections: Collection[int], documents: Collection[int] | None) -> _Scope:
        return _Scope(self._database, self._embedder, user, sorted(collections), documents)

    def stored(self, chunks: Sequence[int]) -> dict[int, Vectors]:
        rows = self._chunks.rows(chunks)
        vectors = vectors_of(self._chunks, self._embedder, rows)
        return {row.id: vector for row, vector in zip(rows, vectors, strict=True)}

    def rarity(self, collections: Collection[int]) -> Callable[[str], float]:
        def of(stem: str) -> float:
            with self._database.reading() as db:
                return WordCounts(db, collections, [stem]).rarity(stem)

        return of

    def spread(self) -> None:
        """Does nothing: the graph grows with what is put into it."""

    def save(self, at_least: float = 0.0) -> None:
        """Forgets what went, which no index has to follow; everything else is in the database."""
        self._chunks.forget_gone(self._chunks.generation())

    def close(self) -> None:
        """Does nothing: the database is closed by itself."""


@dataclass(frozen=True, slots=True)
class _Scope:
    """The chunks of some collections that a user may read, and of some documents of theirs if given."""

    database: PostgresDatabase
    embedder: Embedder
    user: str
    collections: Sequence[int]
    documents: Collection[int] | None

    def dense(self, vector: Vectors, count: int) -> dict[int, float]:
        size = self.embedder.size
        given = {
            "vector": self.database.encode_vector(vector[0].astype(np.float16)),
            "embedder": self.embedder.key,
            "count": count,
        }
        with self.database.reading() as db:
            if self._count(db, EXACT_UP_TO + 1) > EXACT_UP_TO:
                for setting in _GRAPH:
                    db.execute(setting)
                if len(found := self._found(db, _NEAREST.replace("{size}", str(size)), given)) == count:
                    return found
                db.execute("SET LOCAL enable_seqscan = on")
                db.execute("SET LOCAL enable_sort = on")
                db.execute("SET LOCAL enable_hashjoin = on")
            return self._found(db, _EXACT, given)

    def lexical(self, text: str, count: int) -> dict[int, float]:
        times = query_terms(text)
        with self.database.reading() as db:
            counts = WordCounts(db, self.collections, times)
            asked = field_queries(times, counts)
            words = rarest(heaviest(asked, LOOKUP_WORDS), counts, CANDIDATES)
            rows = self._all(db, _MATCHING, {"words": as_tsquery(words)}) if words else []
        ids = np.array([row[0] for row in rows], np.int64)
        hashes = {"text": [row[1] for row in rows], "title": [row[2] for row in rows]}
        ids, scores = best_scored(asked, ids, hashes, count)
        return dict(zip(ids.tolist(), scores, strict=True))

    def _count(self, db: StoreConnection, limit: int) -> int:
        """Counts the chunks up to `limit`."""
        ((count,),) = self._all(db, _COUNT, {"limit": limit})
        return int(count)

    def _found(self, db: StoreConnection, statement: str, given: dict[str, object]) -> dict[int, float]:
        return {int(number): float(cosine) for number, cosine in self._all(db, statement, given)}

    def _all(self, db: StoreConnection, statement: str, given: dict[str, object]) -> list[Any]:
        """The rows of a statement, narrowed to what the user may read."""
        allowed, values = _READABLE, {**given, "user": self.user, "collections": self.collections}
        if self.documents is not None:
            allowed += " AND c.document = ANY(:documents::bigint[])"
            values["documents"] = sorted(self.documents)
        return db.execute(statement.replace("{allowed}", allowed), values).fetchall()
