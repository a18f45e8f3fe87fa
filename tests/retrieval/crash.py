"""A process that kills itself in the middle of ingesting, again and again, and then says whether anything was lost.

    python -m tests.retrieval.crash FOLDER TRIALS SEED

Each trial is a child that opens the library, goes on with the job and sends itself SIGKILL at a drawn call of a drawn
place, before or after it. When all are dead the job is finished undisturbed, and what is stored and indexed is printed
as JSON beside what an undisturbed ingest makes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

from retrieval import Given, Library, ingest, jobs, library
from retrieval.document_store import DocumentStore
from retrieval.index import dense, lexical, views
from retrieval.index import views as places
from retrieval.index.chunks import Chunks
from retrieval.parsing import parser
from retrieval.parsing.parsed import Parsed
from tests.retrieval.conftest import file_indexes
from tests.retrieval.words import WordEmbedder

PLACES: tuple[tuple[Any, str], ...] = (
    (parser, "parse"), (WordEmbedder, "embed"), (Chunks, "put_vectors"), (DocumentStore, "put"),
    (places.FilterBitmaps, "add"), (lexical.LexicalIndex, "add"), (lexical.LexicalIndex, "remove"),
    (lexical.LexicalIndex, "commit"), (dense.DenseIndex, "add"), (dense.DenseIndex, "remove"),
    (dense.DenseIndex, "save"), (views.Views, "save"), (os, "replace"), (jobs.JobStore, "update"),
    (jobs.JobStore, "end"), (Path, "unlink"),
)  # fmt: skip


class HereParser:
    """Parses in this process: a child that dies leaves no other behind."""

    def submit(self, path: Path, name: str, root: Path | None = None) -> Future[Parsed]:
        made = Future[Parsed]()
        made.set_result(parser.parse(path, name))
        return made

    def result(self, future: Future[Parsed]) -> Parsed:
        return future.result()

    def close(self) -> None:
        pass


def given(folder: Path) -> list[Given]:
    """Files that repeat each other's texts, and one that is given twice."""
    made = []
    for number in range(6):
        path = folder / f"{number}.md"
        path.write_text("\n\n".join(f"# Part {n}\n\nWord{number} {'shared' * (n % 2)} stone. " * 30 for n in range(4)))
        made.append(Given(f"{number % 5}.md", path))
    return made


def state(opened: Library) -> dict[str, Any]:
    """Returns what is stored, and what each index holds of it."""
    rows = opened.store.database.rows("SELECT id, document, number, text FROM chunks ORDER BY document, number")
    ids = [row["id"] for row in rows]
    return {
        "chunks": [(row["document"], row["number"], row["text"]) for row in rows],
        "dense": sorted(file_indexes(opened).dense.all()[0].tolist()) == sorted(ids),
        "lexical": len(file_indexes(opened).lexical) == len(ids),
        "allowed": int(file_indexes(opened).allowed([1], None).astype(int).sum() > 0),
        "vectors": len(opened.store.database.rows("SELECT * FROM vectors"))
        == len({row[0] for row in opened.store.database.rows("SELECT hash FROM chunks")}),
    }


def _die_at(owner: Any, name: str, call: int, after: bool) -> None:
    real: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(call, -1, -1))

    def dying(*arguments: Any, **named: Any) -> Any:
        last = next(calls, -1) == 0
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        made = real(*arguments, **named)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    setattr(owner, name, dying)


def _go_on(folder: Path) -> dict[str, Any]:
    with Library.open(folder, WordEmbedder()) as opened:
        (job,) = opened.ingest.jobs.of("ana")
        ended = opened.ingest.wait(job, 60)
        opened.views.save()
        return {"status": ended.status, "counts": ended.counts, "stalled": opened.ingest.stalled(job), **state(opened)}


def _child(work: Callable[[], Any]) -> bool:
    """Do it in a child; whether that was killed."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _begin(folder: Path, files_given: list[Given]) -> None:
    with Library.open(folder, WordEmbedder()) as opened:
        opened.ingest.jobs.create("ana", opened.collection("ana").id, files_given)


def main(folder: Path, trials: int, seed: int) -> None:
    vars(ingest)["Parser"] = HereParser  # in its place, for this process alone
    rng = Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    all_files = given(folder)
    _child(lambda: _begin(folder / "library", all_files))
    killed = list[str]()
    for trial in range(trials):
        owner, name = PLACES[trial % len(PLACES)]
        call, after = rng.choice((0, 0, 0, 1, 3)), rng.random() < 0.5

        def attempt(owner: Any = owner, name: str = name, call: int = call, after: bool = after) -> None:
            _die_at(owner, name, call, after)
            _go_on(folder / "library")

        if _child(attempt):
            killed.append(f"{owner.__name__}.{name}")
        else:  # it was done: begin anew
            for path in sorted((folder / "library").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            _child(lambda: _begin(folder / "library", all_files))
    made = _go_on(folder / "library")
    _child(lambda: _begin(folder / "calm", all_files))
    calm = _go_on(folder / "calm")
    print(json.dumps({"killed": killed, "made": made, "calm": calm}))


if __name__ == "__main__":
    assert library
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
