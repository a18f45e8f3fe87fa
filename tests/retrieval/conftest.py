"""Libraries in temporary folders, on an embedder that is quick, the same everywhere, and needs no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from retrieval import Given, Hit, Job, Library, Query
from retrieval.records import MemberRole
from tests.retrieval.words import WordEmbedder


@pytest.fixture(scope="session")
def embedder() -> WordEmbedder:
    return WordEmbedder()


@pytest.fixture
def library(tmp_path: Path, embedder: WordEmbedder) -> Iterator[Library]:
    with Library.open(tmp_path / "library", embedder) as opened:
        yield opened


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Make a file of a name with a content."""

    def make(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def add(library: Library, user: str, *paths: Path, collection: int | None = None, **metadata: str | int) -> Job:
    """Ingest files under their names, and wait until that is over."""
    number = library.collection(user).id if collection is None else collection
    job = library.ingest.submit(user, number, [Given(path.name, path, metadata) for path in paths])
    return library.ingest.wait(job.id, 60)


def admit(library: Library, owner: str, collection: int, user: str, role: MemberRole) -> None:
    """Make a user a member: the owner invites, the user accepts."""
    library.rights.invite(owner, collection, user, role)
    library.rights.accept(user, collection)


def hits(library: Library, user: str, text: str, limit: int = 10) -> tuple[Hit, ...]:
    return library.search(Query(user, text, limit)).hits
