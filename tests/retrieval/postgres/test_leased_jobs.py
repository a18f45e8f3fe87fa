"""Ingest jobs of several servers of one database: each is one server's alone, and a dead server's is taken up again."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from app.db.postgres import postgres_engine
from retrieval import Given, Library
from retrieval.document_store import DocumentStore
from retrieval.jobs import LeaseLost
from retrieval.postgres import leased_jobs
from retrieval.postgres.leased_jobs import LeasedJobs
from retrieval.postgres.postgres_database import PostgresDatabase
from tests.app import postgres
from tests.app.gate import HELD, GatedEmbedder
from tests.retrieval.postgres import leasing
from tests.retrieval.words import WordEmbedder

DATABASES = (pytest.param("postgresql", id="postgresql"),)
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def jobs_of(engine: Engine) -> Iterator[Callable[[float], LeasedJobs]]:
    """Makes servers of one database, as far as they have jobs: none works any off."""
    opened = list[PostgresDatabase]()

    def make(lease_s: float) -> LeasedJobs:
        opened.append(PostgresDatabase(engine))
        store = DocumentStore(opened[-1])
        return LeasedJobs(opened[-1], store.rights, lease_s=lease_s)

    yield make
    for database in opened:
        database.close()


def _created(jobs: LeasedJobs, count: int, path: Path) -> set[str]:
    number = jobs._rights.create("ana", "mine").id
    return {jobs.create("ana", number, [Given(f"{n}.txt", path)]).id for n in range(count)}


def test_two_servers_never_take_the_same_job(jobs_of: Callable[[float], LeasedJobs], tmp_path: Path) -> None:
    made = _created(jobs_of(0.0), 40, tmp_path)  # of a server whose leases were over at once
    servers = [jobs_of(30.0) for _ in range(4)]
    taken: list[list[str]] = [[] for _ in servers]
    begin = threading.Barrier(len(servers))

    def take(at: int) -> None:
        begin.wait()
        while some := servers[at].renew(taken[at]).taken:
            taken[at] += some

    threads = [threading.Thread(target=take, args=(at,)) for at in range(len(servers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(job for some in taken for job in some) == sorted(made)
    assert all(set(server.renew(some).held) == set(some) for server, some in zip(servers, taken, strict=True))


def test_a_lease_that_is_renewed_is_not_taken(jobs_of: Callable[[float], LeasedJobs], tmp_path: Path) -> None:
    first, second = jobs_of(30.0), jobs_of(30.0)
    (job,) = _created(first, 1, tmp_path)
    assert not second.resume() and not second.renew(()).taken
    first.release()
    assert second.resume() == [job]


def test_a_server_that_was_away_leaves_its_job_alone(jobs_of: Callable[[float], LeasedJobs], tmp_path: Path) -> None:
    away, other = jobs_of(0.0), jobs_of(30.0)
    (job,) = _created(away, 1, tmp_path)
    away.update(job, {0: {"status": "reading"}})
    assert other.resume() == [job] and other.get(job).files[0].status == "queued"
    with pytest.raises(LeaseLost):
        away.update(job, {0: {"status": "failed"}})
    with pytest.raises(LeaseLost):
        away.hold(job)
    away.end(job, "cancelled")
    assert not away.renew([job]).held
    assert (other.get(job).status, other.get(job).files[0].status) == ("running", "queued")


def test_a_job_is_cancelled_from_another_server(
    tmp_path: Path, engine: Engine, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leased_jobs, "LEASE_S", 1.0)
    gated = GatedEmbedder()
    gated.gate.clear()
    with (
        Library.open(tmp_path / "files", gated, engine=engine) as first,
        Library.open(tmp_path / "files", WordEmbedder(), engine=engine) as second,
    ):
        paths = [write(f"{n}.md", f"A {HELD} lake, {n}. " * 300) for n in range(3)]
        job = first.ingest.submit("ana", first.collection("ana").id, [Given(path.name, path) for path in paths])
        assert gated.waiting.wait(30)
        second.ingest.cancel("ana", job.id)
        with second.store.database.reading() as db:
            assert db.execute("SELECT cancel FROM jobs").fetchone()[0]
        with first.ingest._condition:
            assert first.ingest._condition.wait_for(lambda: job.id in first.ingest._cancelled, 20)
        gated.gate.set()
        assert second.ingest.wait(job.id, 30).status == "cancelled"
        done = sum(file.status == "done" for file in first.ingest.jobs.get(job.id).files)
        assert second.collection("ana").documents == done < 3


def test_a_dead_servers_jobs_are_worked_off_by_another(
    tmp_path: Path, postgres_address: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leased_jobs, "LEASE_S", leasing.LEASE_S)
    file = write("lake.txt", "The green lake is deep.")
    with postgres.schema(postgres_address) as address:
        program = [sys.executable, "-m", "tests.retrieval.postgres.leasing"]
        command = [*program, address, str(tmp_path / "files"), str(file)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as dying:
            assert dying.stdout is not None
            told = {dying.stdout.readline().strip() for _ in range(3)}
            with Library.open(
                tmp_path / "files", WordEmbedder(), engine=postgres_engine(address, 30, sole=False)
            ) as library:
                jobs = sorted(told - {"embedding"})
                library.ingest.wait(jobs[0], 3 * leasing.LEASE_S)
                assert [library.ingest.jobs.get(job).status for job in jobs] == ["running", "running"]  # it lives
                dying.kill()
                assert [library.ingest.wait(job, 60).counts for job in jobs] == [{"done": 1}, {"done": 1}]
                assert {each.source for each in library.store.documents("ana")} == {"first.txt", "second.txt"}
