"""Ingest jobs as rows of the truth: which files, how far each has come, and what went wrong. Survives a kill.

    queued → reading → embedding → done | unchanged | failed | cancelled      (a file)
    running → done | cancelled                                                (a job)

A file that was on its way when the process died starts anew; what it had embedded is kept, so it goes fast.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from retrieval.parsing.parsed import Fault
from retrieval.store import DocumentStore, Metadata

FileStatus = Literal["queued", "reading", "embedding", "done", "unchanged", "failed", "cancelled"]
JobStatus = Literal["running", "done", "cancelled"]
OVER = ("done", "unchanged", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Given:
    """A file to be ingested under the name `source`. `keep` is false for a copy that is deleted afterwards."""

    source: str
    path: Path
    metadata: Metadata = field(default_factory=dict)
    keep: bool = True


@dataclass(frozen=True, slots=True)
class File:
    """How far a file of a job has come."""

    number: int
    source: str
    path: Path
    metadata: Metadata
    keep: bool
    bytes: int
    status: FileStatus
    document: int | None = None
    pages: int = 0
    chunks: int = 0
    embedded: int = 0
    error: str | None = None
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A job with its files. `seconds_left` is None while nothing is known of its speed."""

    id: str
    collection: int
    user: str
    status: JobStatus
    created_at: float
    ended_at: float | None
    files: tuple[File, ...]

    @property
    def counts(self) -> dict[FileStatus, int]:
        made: dict[FileStatus, int] = {}
        for file in self.files:
            made[file.status] = made.get(file.status, 0) + 1
        return made

    @property
    def seconds_left(self) -> float | None:
        """By the bytes of the files that are over, and of those half-way by their chunks."""
        total = sum(file.bytes for file in self.files)
        done = sum(file.bytes * _share(file) for file in self.files)
        if self.status != "running" or not done:
            return None
        return (time.time() - self.created_at) * (total - done) / done


def _share(file: File) -> float:
    if file.status in OVER:
        return 1.0
    return file.embedded / file.chunks if file.status == "embedding" and file.chunks else 0.0


class JobStore:
    """Jobs in the store's file."""

    def __init__(self, store: DocumentStore) -> None:
        self._store = store

    def create(self, user: str, collection: int, given: Sequence[Given]) -> Job:
        """
        Raises:
            NotFound: there is no such collection.
            NotAllowed: the user may only read it.
        """
        number = uuid.uuid4().hex
        with self._store.transaction() as db:
            self._store.need_writer(db, user, collection)
            db.execute(
                "INSERT INTO jobs (id, collection, user, status, created_at) VALUES (?, ?, ?, 'running', ?)",
                (number, collection, user, time.time()),
            )
            db.executemany(
                """INSERT INTO job_files (job, number, source, file, metadata, keep, bytes, status)
                   VALUES (?, ?, ?, ?, ?, ?, ?, 'queued')""",
                [
                    (number, at, one.source, str(one.path), json.dumps(dict(one.metadata)), one.keep, _size(one.path))
                    for at, one in enumerate(given)
                ],
            )
        return self.get(number)

    def get(self, job: str) -> Job:
        """
        Raises:
            KeyError: there is no such job.
        """
        with self._store.snapshot() as db:
            row = db.execute("SELECT * FROM jobs WHERE id = ?", (job,)).fetchone()
            if row is None:
                raise KeyError(job)
            files = db.execute("SELECT * FROM job_files WHERE job = ? ORDER BY number", (job,)).fetchall()
        return Job(
            **{key: row[key] for key in ("id", "collection", "user", "status", "created_at", "ended_at")},
            files=tuple(
                File(
                    **{key: each[key] for key in ("number", "source", "bytes", "status", "document", "pages")},
                    **{key: each[key] for key in ("chunks", "embedded", "error")},
                    path=Path(each["file"]),
                    metadata=json.loads(each["metadata"]),
                    keep=bool(each["keep"]),
                    faults=tuple(Fault(*fault) for fault in json.loads(each["faults"])),
                )
                for each in files
            ),
        )

    def of(self, user: str, running: bool = False) -> list[str]:
        """The jobs of a user by number, the newest first."""
        where = "user = ?" + (" AND status = 'running'" if running else "")
        with self._store.snapshot() as db:
            return [row[0] for row in db.execute(f"SELECT id FROM jobs WHERE {where} ORDER BY created_at DESC", (user,))]

    def unfinished(self) -> list[str]:
        """Jobs that were running when the process ended, the oldest first; their half-done files are queued again."""
        with self._store.transaction() as db:
            db.execute(
                """UPDATE job_files SET status = 'queued' WHERE status IN ('reading', 'embedding')
                   AND job IN (SELECT id FROM jobs WHERE status = 'running')"""
            )
            return [row[0] for row in db.execute("SELECT id FROM jobs WHERE status = 'running' ORDER BY created_at")]

    def update(self, job: str, number: int, **values: object) -> None:
        """Set columns of a file."""
        columns = ", ".join(f"{key} = ?" for key in values)
        with self._store.transaction() as db:
            db.execute(f"UPDATE job_files SET {columns} WHERE job = ? AND number = ?", (*values.values(), job, number))

    def end(self, job: str, status: JobStatus) -> None:
        with self._store.transaction() as db:
            db.execute(
                "UPDATE jobs SET status = ?, ended_at = ? WHERE id = ? AND status = 'running'", (status, time.time(), job)
            )
            if status == "cancelled":
                db.execute(
                    f"UPDATE job_files SET status = 'cancelled' WHERE job = ? AND status NOT IN {OVER}", (job,)
                )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
