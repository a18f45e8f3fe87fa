"""Measures how searching grows: whole searches through a library of 10,000, 100,000 and 1,000,000 chunks.

Its vectors are synthesised from real ones: sums of two random ones, with noise, of length 1. Its texts are sentences
sampled from real ones, so that words keep their frequencies. Everything else is the path of a user's search.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval import Library, Query
from retrieval.embedding import Embedder, Vectors
from retrieval.index.dense import DenseIndex
from retrieval.index.publish import Prepared
from retrieval.index.views import Views
from retrieval.parsing.parsed import Parsed
from retrieval.spans import sentences

Json = dict[str, Any]  # Any: plain JSON
Tell = Callable[[str], None]
OWNER, READER = "owner", "reader"
COLLECTIONS = 100  # of which the reader may read every second one
SENTENCES = 60  # in a document
QUERIES = 300
WORD = re.compile(r"\w+|[^\w\s]")


class GrowthRow:
    """An embedder with real queries, and with documents put together from real vectors."""

    name = key = "grown"
    leading = 1

    def __init__(self, real: Vectors, embedder: Embedder) -> None:
        self._real = real
        self._embedder = embedder
        self._rng = np.random.default_rng(0)

    @property
    def size(self) -> int:
        return self._embedder.size

    def pieces(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        return [[word.span() for word in WORD.finditer(text)] for text in texts]

    @property
    def vocabulary(self) -> int:
        return self._embedder.vocabulary

    def text_of(self, ids: Sequence[int]) -> str | None:
        return self._embedder.text_of(ids)

    def embed(self, texts: Sequence[str]) -> Vectors:
        return self.like(len(texts))

    def embed_query(self, text: str) -> Vectors:
        return self._embedder.embed_query(text)

    def tokens(self, texts: Sequence[str]) -> list[Vectors]:
        return self._embedder.tokens(texts)

    def like(self, count: int) -> Vectors:
        """(count, size): two random vectors each, mixed, with noise."""
        rng, real = self._rng, self._real
        a, b = rng.integers(0, len(real), count), rng.integers(0, len(real), count)
        share = np.asarray(rng.random((count, 1)), np.float32)
        mixed = share * real[a] + (1 - share) * real[b]
        mixed += np.asarray(0.02 * rng.standard_normal(mixed.shape), np.float32)
        return np.asarray(mixed / np.linalg.norm(mixed, axis=1, keepdims=True), np.float32)


def searching(
    sizes: Sequence[int], real: Vectors, texts: Sequence[str], embedder: Embedder, folder: Path, tell: Tell
) -> list[Json]:
    """At each size the times of a search without reranking, part by part, and the bytes of the vectors."""
    drawn = [text[start:end] for text in texts for start, end in sentences(text)]
    asked = [drawn[n] for n in np.random.default_rng(1).integers(0, len(drawn), QUERIES)]
    made = []
    for size in sizes:
        grown = GrowthRow(real, embedder)
        with Library.open(folder / str(size), grown) as library:
            _fill(library, drawn, size, tell)
            made.append(_measured(library, asked, grown))
    return made


def _fill(library: Library, drawn: Sequence[str], size: int, tell: Tell) -> None:
    """A hundredth of the chunks into each collection; those that an earlier run has filled are left as they are."""
    rng = np.random.default_rng(2)
    for number in range(COLLECTIONS):
        mine = library.collection(OWNER, f"Collection {number:02}")
        if number % 2 and not mine.documents:
            library.rights.invite(OWNER, mine.id, READER, "reader")
            library.rights.accept(READER, mine.id)
        wanted, documents = size // COLLECTIONS, list[Prepared]()
        while wanted > 0 and not mine.documents:
            text = " ".join(drawn[n] for n in rng.integers(0, len(drawn), SENTENCES))
            parsed, name = Parsed(text, "", "prose", "text/plain"), f"{len(documents)}"
            documents.append(library.publisher.prepare(name, "1", parsed, {}, len(text)))
            wanted -= len(documents[-1].texts)
        library.publisher.embed(documents)
        if documents:
            library.publisher.show(OWNER, mine.id, documents)
        if number % 10 == 9:
            tell(f"{size:,} chunks: {number + 1}% in")
    library.views.spread()


def _measured(library: Library, asked: Sequence[str], grown: GrowthRow) -> Json:
    laps = []
    for query in asked[:20]:
        library.search(Query(READER, query, collections="all"))  # the first read comes from disk
    for query in asked:
        found = library.search(Query(READER, query, collections="all"))
        laps.append({**found.seconds, "all": sum(found.seconds.values())})
    assert isinstance(library.views, Views)
    dense = library.views.dense
    times = {part: [lap[part] * 1e3 for lap in laps] for part in laps[0]}
    return {"chunks": len(dense), "dense_bytes": _bytes(dense), "recall@10": _recall(dense, grown.like(100))} | {
        f"{part}_p{p}_ms": float(np.percentile(some, p)) for part, some in times.items() for p in (50, 99)
    }


def _recall(index: DenseIndex, asked: Vectors, k: int = 10) -> float:
    """Returns how many of the true `k` nearest are found."""
    ids, vectors = index.all()
    found, _ = index.search(asked, k)
    shares = []
    for query, some in zip(asked, found, strict=True):
        cosines: NDArray[np.float32] = vectors @ query
        nearest = ids[np.argpartition(-cosines, k)[:k]]
        shares.append(len(set(nearest.tolist()) & set(some.tolist())) / k)
    return float(np.mean(shares))


def _bytes(index: DenseIndex) -> int:
    """Returns the bytes of the vectors in memory, with their numbers."""
    import faiss

    return len(faiss.serialize_index(index._index))
