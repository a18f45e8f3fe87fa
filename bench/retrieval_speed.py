"""How fast retrieval is: ingesting end to end, parsing PDF, searching as the number of chunks grows, and memory.

Vectors of a large index are synthesised from real ones: sums of two that were drawn, with noise, of length 1. Texts of
a large lexical index are sentences drawn from real ones, so that words keep their frequencies.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval import Given, Library, Query
from retrieval.chunks import Row
from retrieval.dense import DenseIndex
from retrieval.embedding import Embedder
from retrieval.lexical import LexicalIndex
from retrieval.parsing import pdf
from retrieval.places import Places
from retrieval.spans import sentences
from tests.retrieval import made

Json = dict[str, Any]  # Any: plain JSON
Tell = Callable[[str], None]
USER = "bench"
QUERIES = 300


def ingest(texts: Sequence[str], embedder: Embedder, folder: Path) -> Json:
    """Files of text through a whole job: read, cut, embedded, stored, indexed, shown."""
    (folder / "given").mkdir(parents=True)
    given = []
    for number, text in enumerate(texts):
        path = folder / "given" / f"{number}.md"
        path.write_text(text, "utf-8")
        given.append(Given(path.name, path))
    with Library.open(folder / "library", embedder) as library:
        embedder.embed(["Loaded before the clock starts."])
        began = time.perf_counter()
        job = library.ingest.wait(library.ingest.submit(USER, library.collection(USER).id, given).id)
        seconds = time.perf_counter() - began
        chunks = sum(file.chunks for file in job.files)
        pieces = [
            len(spans) for spans in embedder.pieces([row.text for row in library.store.chunks.rows(range(1, 200))])
        ]
        began = time.perf_counter()
        again = library.ingest.wait(library.ingest.submit(USER, library.collection(USER).id, given).id)
        again_s = time.perf_counter() - began
        number = library.store.documents(USER)[0].id
        began = time.perf_counter()
        library.delete(USER, number)
        deleted_s = time.perf_counter() - began
    return {
        "files": len(given),
        "chunks": chunks,
        "pieces_per_chunk": float(np.mean(pieces)),
        "seconds": seconds,
        "chunks_per_s": chunks / seconds,
        "status": job.counts,
        "again": again.counts,
        "again_s": again_s,
        "delete_ms": deleted_s * 1e3,
    }


def embedding(texts: Sequence[str], embedder: Embedder) -> Json:
    """The floor of ingesting: the same chunks through the embedder alone."""
    ordered = sorted(texts, key=len)
    began = time.perf_counter()
    embedder.embed(ordered)
    seconds = time.perf_counter() - began
    return {"chunks": len(texts), "seconds": seconds, "chunks_per_s": len(texts) / seconds}


def pdf_pages(folder: Path, pages: int = 500) -> Json:
    """Pages a second in the process that parses."""
    path = folder / "many.pdf"
    lines = [f"Line {n} of a page that says what a page says, in words of no great length." for n in range(40)]
    path.write_bytes(made.pdf([lines] * pages))
    began = time.perf_counter()
    parsed = pdf.parse(path)
    seconds = time.perf_counter() - began
    return {"pages": pages, "characters": len(parsed.text), "seconds": seconds, "pages_per_s": pages / seconds}


def grown(vectors: NDArray[np.float32], count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """`count` vectors like the given ones."""
    made_up = np.empty((count, vectors.shape[1]), np.float32)
    for at in range(0, count, 50_000):
        some = min(50_000, count - at)
        a, b = rng.integers(0, len(vectors), some), rng.integers(0, len(vectors), some)
        share = np.asarray(rng.random((some, 1)), np.float32)
        mixed = share * vectors[a] + (1 - share) * vectors[b]
        mixed += np.asarray(0.02 * rng.standard_normal(mixed.shape), np.float32)
        made_up[at : at + some] = mixed / np.linalg.norm(mixed, axis=1, keepdims=True)
    return made_up


def searching(
    sizes: Sequence[int], real: NDArray[np.float32], texts: Sequence[str], embedder: Embedder, folder: Path, tell: Tell
) -> list[Json]:
    """What a search without reranking takes at each size, part by part; one user may read half of the collections."""
    rng = np.random.default_rng(0)
    drawn = [text[start:end] for text in texts for start, end in sentences(text)]
    asked = [drawn[n] for n in rng.integers(0, len(drawn), QUERIES)]
    results = []
    for size in sizes:
        tell(f"{size:,} chunks")
        vectors = grown(real, size, rng)
        ids = np.arange(1, size + 1, dtype=np.int64)
        before = _resident()
        began = time.perf_counter()
        index = DenseIndex(real.shape[1])
        index.add(ids, vectors)
        if index.crowded:
            index = DenseIndex.in_cells(*index.all())
        built_s = time.perf_counter() - began
        memory = _resident() - before
        places = Places()
        places.add(np.stack([ids, ids // 20 + 1, ids % 100 + 1], axis=1))
        lexical = _lexical(size, drawn, rng, folder / str(size))
        readable = range(1, 101, 2)
        laps: dict[str, list[float]] = {name: [] for name in ("embed", "rights", "dense", "lexical", "all")}
        for query in asked:
            clock = [time.perf_counter()]
            vector = embedder.embed([query])
            clock.append(time.perf_counter())
            allowed = places.bits(readable)
            clock.append(time.perf_counter())
            index.search(vector, 200, allowed)
            clock.append(time.perf_counter())
            lexical.search(query, 200, readable)
            clock.append(time.perf_counter())
            for name, lap in zip(laps, np.diff(clock), strict=False):
                laps[name].append(float(lap))
            laps["all"].append(clock[-1] - clock[0])
        results.append(
            {"chunks": size, "built_s": built_s, "dense_bytes": _bytes(index), "resident_bytes": memory}
            | {f"{name}_p{p}_ms": float(np.percentile(some, p) * 1e3) for name, some in laps.items() for p in (50, 99)}
            | {"recall@10": _recall(index, vectors, ids, rng)}
        )
        lexical.close()
    return results


def _lexical(size: int, drawn: Sequence[str], rng: np.random.Generator, folder: Path) -> LexicalIndex:
    index = LexicalIndex(folder)
    if index.generation < 0:
        for number in range(1, size + 1):
            text = " ".join(drawn[n] for n in rng.integers(0, len(drawn), 6))
            index.add(number, number % 100 + 1, number // 20 + 1, text, "")
        index.commit(1)
    return index


def _recall(index: DenseIndex, vectors: NDArray[np.float32], ids: NDArray[np.int64], rng: np.random.Generator) -> float:
    """How many of the true ten nearest are found."""
    asked = grown(vectors, 100, rng)
    exact = np.argsort(-(asked @ vectors.T), axis=1)[:, :10] if len(vectors) <= 10**6 else None
    if exact is None:
        return float("nan")
    found, _ = index.search(asked, 10)
    return float(np.mean([len(set(ids[a]) & set(b)) / 10 for a, b in zip(exact, found, strict=True)]))


def _bytes(index: DenseIndex) -> int:
    """What the vectors take, with their numbers."""
    import faiss

    return len(faiss.serialize_index(index._index))


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def whole(library: Library, asked: Sequence[str]) -> Json:
    """Searches as a user makes them, through the store."""
    seconds = []
    for query in asked:
        began = time.perf_counter()
        library.search(Query(USER, query))
        seconds.append(time.perf_counter() - began)
    return {"p50_ms": float(np.percentile(seconds, 50) * 1e3), "p99_ms": float(np.percentile(seconds, 99) * 1e3)}


def rows(library: Library) -> list[Row]:
    ids = library.store.chunks.places()[:, 0]
    return library.store.chunks.rows([int(number) for number in ids])
