"""Measures how fast retrieval is: ingesting end to end, its floor, parsing PDF, and searches of a small library."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrieval import Given, Library, Query
from retrieval.embedding import Embedder
from retrieval.index.chunks import ChunkRow
from retrieval.parsing import pdf
from tests.retrieval import made

Json = dict[str, Any]  # Any: plain JSON
USER = "bench"


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


def whole(library: Library, asked: Sequence[str]) -> Json:
    """Searches as a user makes them, through the store."""
    seconds = []
    for query in asked:
        began = time.perf_counter()
        library.search(Query(USER, query))
        seconds.append(time.perf_counter() - began)
    return {"p50_ms": float(np.percentile(seconds, 50) * 1e3), "p99_ms": float(np.percentile(seconds, 99) * 1e3)}


def rows(library: Library) -> list[ChunkRow]:
    ids = library.store.chunks.places()[:, 0]
    return library.store.chunks.rows([int(number) for number in ids])
