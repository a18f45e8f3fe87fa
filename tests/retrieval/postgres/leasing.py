"""A server of its own, for a test that kills it: begins two jobs and never ends them.

python -m tests.retrieval.postgres.leasing ADDRESS FOLDER FILE
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from app.db.postgres import postgres_engine
from retrieval import Given, Library
from retrieval.embedding import Vectors
from retrieval.postgres import leased_jobs
from tests.retrieval.words import WordEmbedder

LEASE_S = 1.0


class Stuck(WordEmbedder):
    """Says that it was asked, and never answers."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        print("embedding", flush=True)
        threading.Event().wait()
        raise AssertionError


def main(address: str, folder: Path, file: Path) -> None:
    leased_jobs.LEASE_S = LEASE_S
    library = Library.open(folder, Stuck(), engine=postgres_engine(address, 30, sole=False))
    number = library.collection("ana").id
    for name in ("first.txt", "second.txt"):
        print(library.ingest.submit("ana", number, [Given(name, file)]).id, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
