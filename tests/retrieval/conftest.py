"""Libraries in temporary folders, on an embedder that is quick, the same everywhere, and needs no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
from sqlalchemy import Engine

from app.db.postgres import postgres_engine
from retrieval import Given, Hit, Job, Library, Query
from retrieval.index.views import Views
from retrieval.records import MemberRole
from tests.app import postgres
from tests.retrieval.words import WordEmbedder


@pytest.fixture(scope="session")
def embedder() -> WordEmbedder:
    return WordEmbedder()


NewEngine = Callable[[], AbstractContextManager[Engine | None]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs the tests of a module that has `DATABASES` on each of them, as far as they keep anything."""
    if "new_engine" in metafunc.fixturenames and (databases := getattr(metafunc.module, "DATABASES", None)):
        metafunc.parametrize("new_engine", databases, indirect=True, scope="session")


@contextmanager
def engine_of(address: str) -> Iterator[Engine]:
    """A new database of a PostgreSQL server, for a library."""
    with postgres.schema(address) as schema:
        yield postgres_engine(schema, 30, sole=False)


@pytest.fixture(scope="session")
def new_engine(request: pytest.FixtureRequest) -> NewEngine:
    """Gives new PostgreSQL databases for libraries, None for SQLite's in their folders."""
    if getattr(request, "param", None) is None:
        return nullcontext
    address: str = request.getfixturevalue("postgres_address")
    return lambda: engine_of(address)


@pytest.fixture
def engine(new_engine: NewEngine) -> Iterator[Engine | None]:
    """A new database for the test."""
    with new_engine() as engine:
        yield engine


@pytest.fixture
def library(tmp_path: Path, embedder: WordEmbedder, engine: Engine | None) -> Iterator[Library]:
    with Library.open(tmp_path / "library", embedder, engine=engine) as opened:
        yield opened


def file_indexes(library: Library) -> Views:
    """The indexes of a library whose documents are SQLite's."""
    assert isinstance(library.views, Views)
    return library.views


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
