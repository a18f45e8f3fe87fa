"""Ingest jobs as rows of the database: which files, how far each has come, and errors. Survives a kill.

    queued → reading → embedding → done | unchanged | failed | cancelled      (a file)
    running → done | cancelled                                                (a job)

A file that was on its way when the process died starts anew; its embedded chunks are kept, so it goes fast. One process
has the jobs of a file; those of PostgreSQL are shared by leases (`retrieval/postgres/leased_jobs.py`).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from retrieval.document_database import DocumentDatabase, StoreConnection
from retrieval.folders import Folders
from retrieval.parsing.parsed import ParseFault
from retrieval.records import Metadata, NotFound
from retrieval.rights import Rights, check_source

FileStatus = Literal["queued", "reading", "embedding", "done", "unchanged", "failed", "cancelled"]
JobStatus = Literal["running", "done", "cancelled"]
KNOWN_FROM = 0.05  # of the bytes: before that a guess of the time is none
TWICE = "Another file of this job has the same name; the last one was taken."
OVER = ("done", "unchanged", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Given:
    """A file to be ingested under the name `source`. `owned`: it is a copy that goes when its document goes. `root`:
    the folder from which on no link to it is followed; its own folder if left out. `folder`: the number of the one
    that it is indexed with."""

    source: str
    path: Path
    metadata: Metadata = field(default_factory=dict)
    owned: bool = False
    root: Path | None = None
    folder: int | None = None


@dataclass(frozen=True, slots=True)
class File:
    """The progress of a job's file. `change`: against the document of its source, once it is being read."""

    number: int
    source: str
    path: Path
    metadata: Metadata
    owned: bool
    bytes: int
    status: FileStatus
    document: int | None = None
    pages: int = 0
    chunks: int = 0
    embedded: int = 0
    error: str | None = None
    faults: tuple[ParseFault, ...] = ()
    root: Path | None = None
    folder: int | None = None
    change: Literal["new", "changed"] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job with its files. `seconds_left` is None while nothing is known of its speed. `replace`: documents that other
    users added may be replaced."""

    id: str
    collection: int
    user: str
    status: JobStatus
    created_at: float
    ended_at: float | None
    files: tuple[File, ...]
    replace: bool = False

    @property
    def counts(self) -> dict[FileStatus, int]:
        made: dict[FileStatus, int] = {}
        for file in self.files:
            made[file.status] = made.get(file.status, 0) + 1
        return made

    @property
    def seconds_left(self) -> float | None:
        """By the bytes that were worked off, once there are some; files that took no work do not count."""
        worked = [file for file in self.files if file.status not in ("unchanged", "failed", "cancelled")]
        total = sum(file.bytes for file in worked)
        done = sum(file.bytes * _share(file) for file in worked)
        if self.status != "running" or done < KNOWN_FROM * total or not done:
            return None
        return max(0.0, time.time() - self.created_at) * (total - done) / done


def _share(file: File) -> float:
    if file.status == "done":
        return 1.0
    return file.embedded / file.chunks if file.status == "embedding" and file.chunks else 0.0


class OverQuota(Exception):
    """The files would take more than the owner of their collection may keep; the message has the numbers."""


class LeaseLost(Exception):
    """Another server has taken the job, and works it off."""


@dataclass(frozen=True, slots=True)
class Renewed:
    """Jobs after their leases were renewed: those still `held`, those of them that are to be `cancelled`, and those of
    other servers that were `taken` up."""

    held: Collection[str]
    cancelled: Collection[str]
    taken: Sequence[str]


class JobStore:
    """The jobs of a database. `quota_bytes` limits the files of one owner's collections together."""

    lease_s: float | None = None  # for which a job is this process's own; None: as long as it runs

    def __init__(self, database: DocumentDatabase, rights: Rights, quota_bytes: int | None = None) -> None:
        self._database = database
        self._rights = rights
        self._folders = Folders(database, rights)
        self._quota_bytes = quota_bytes

    def create(
        self, user: str, collection: int, given: Sequence[Given], replace: bool = False, *, attached: bool = False
    ) -> Job:
        """`attached`: the collection may be an attached one.

        Raises:
            NotFound: there is no such collection, or no such folder of the user's in it.
            NotAllowed: the user may only read it.
            SourceTaken: a document of another user has the source of a file, and `replace` is false.
            OverQuota: its owner may not keep that much.
        """
        for folder in {one.folder for one in given if one.folder is not None}:
            self._folders.get(user, collection, folder)
        number = f"job_{uuid.uuid4().hex}"
        with self._database.writing() as db:
            self._rights.need(db, user, collection, "add documents to", attached=attached)
            for source in () if replace else {one.source for one in given}:
                check_source(db, user, collection, source)
            self._check_quota(db, collection, given)
            db.execute(
                """INSERT INTO jobs (id, collection, "user", status, created_at, replace)
                   VALUES (?, ?, ?, 'running', ?, ?)""",
                (number, collection, user, time.time(), replace),
            )
            self._created(db, number)
            last = {one.source: at for at, one in enumerate(given)}
            db.executemany(
                """INSERT INTO job_files
                       (job, number, source, path, owned, root, folder, metadata, bytes, status, error)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
                [
                    (
                        *(number, at, one.source, str(one.path), one.owned, _root(one), one.folder),
                        json.dumps(dict(one.metadata)),
                        *(_size(one.path), *(("queued", None) if last[one.source] == at else ("failed", TWICE))),
                    )
                    for at, one in enumerate(given)
                ],
            )
        return self.get(number)

    def _holds(self, db: StoreConnection, job: str) -> bool:
        return True

    def _created(self, db: StoreConnection, job: str) -> None:
        """Makes a new job this process's own."""

    def _check_quota(self, db: StoreConnection, collection: int, given: Sequence[Given]) -> None:
        """
        Raises:
            OverQuota: see there. A file that takes the place of another counts in its stead.
        """
        if self._quota_bytes is None:
            return
        owner = db.execute("SELECT owner FROM collections WHERE id = ?", (collection,)).fetchone()[0]
        kept = """SELECT coalesce(sum(d.bytes), 0) FROM documents d JOIN collections c ON c.id = d.collection
                  WHERE c.owner = ?1"""
        coming = f"""SELECT coalesce(sum(f.bytes), 0) FROM job_files f JOIN jobs j ON j.id = f.job
                     JOIN collections c ON c.id = j.collection
                     WHERE c.owner = ?1 AND j.status = 'running' AND f.status NOT IN {OVER}"""
        used = sum(int(db.execute(statement, (owner,)).fetchone()[0]) for statement in (kept, coming))
        for source in {one.source for one in given}:
            replaced = "SELECT coalesce(sum(bytes), 0) FROM documents WHERE collection = ? AND source = ?"
            used -= int(db.execute(replaced, (collection, source)).fetchone()[0])
        size = sum(_size(one.path) for one in given)
        if used + size > self._quota_bytes:
            raise OverQuota(
                f"These files have {size:,} bytes, and of the {self._quota_bytes:,} that the collection's owner may "
                f"keep {max(0, used):,} are in use; accepted: at most {max(0, self._quota_bytes - used):,} more. "
                "Delete documents, or ask the operator for a higher storage_per_user."
            )

    def get(self, job: str, user: str | None = None) -> Job:
        """A job, of that user if one is named.

        Raises:
            NotFound: there is no such job.
        """
        with self._database.reading() as db:
            row = db.execute(
                f'SELECT {_JOB} FROM jobs WHERE id = ? AND "user" = coalesce(?, "user")', (job, user)
            ).fetchone()
            if row is None:
                raise NotFound(f"There is no job {job!r:.60}.")
            files = db.execute(f"SELECT {_FILE} FROM job_files WHERE job = ? ORDER BY number", (job,)).fetchall()
        return Job(**{**dict(row), "replace": bool(row["replace"])}, files=tuple(_file(each) for each in files))

    def of(self, user: str, running: bool = False, *, listed: bool = False) -> list[str]:
        """The jobs of a user by number, the newest first. `listed`: not those of attached collections."""
        where = '"user" = ?' + (" AND status = 'running'" if running else "")
        if listed:
            where += " AND collection NOT IN (SELECT id FROM collections WHERE attached)"
        rows = self._database.rows(f"SELECT id FROM jobs WHERE {where} ORDER BY created_at DESC, rowid DESC", (user,))
        return [row[0] for row in rows]

    def newest(self, collection: int) -> Job | None:
        """The newest job of a collection; None where there is none."""
        sql = "SELECT id FROM jobs WHERE collection = ? ORDER BY created_at DESC, rowid DESC LIMIT 1"
        rows = self._database.rows(sql, (collection,))
        return self.get(rows[0][0]) if rows else None

    def forget(self, collection: int) -> None:
        """Deletes the rows of a collection's jobs, which have ended."""
        with self._database.writing() as db:
            db.execute("DELETE FROM jobs WHERE collection = ? AND status != 'running'", (collection,))

    def forget_user(self, user: str) -> None:
        """Deletes the rows of a user's jobs, which have ended."""
        with self._database.writing() as db:
            db.execute("DELETE FROM jobs WHERE \"user\" = ? AND status != 'running'", (user,))

    def resume(self) -> list[str]:
        """Jobs that were running when the process ended, the oldest first; their half-done files are queued again."""
        with self._database.writing() as db:
            running = db.execute("SELECT id FROM jobs WHERE status = 'running' ORDER BY created_at").fetchall()
            for (job,) in running:
                self._queue_again(db, job)
        return [job for (job,) in running]

    @staticmethod
    def _queue_again(db: StoreConnection, job: str) -> None:
        db.execute(
            """UPDATE job_files SET status = 'queued', embedded = 0
               WHERE status IN ('reading', 'embedding') AND job = ?""",
            (job,),
        )

    def renew(self, jobs: Collection[str]) -> Renewed:
        """Holds these jobs for another `lease_s`, and takes up some of servers that are gone."""
        return Renewed(jobs, (), ())

    def release(self) -> None:
        """Leaves the jobs that run to whoever starts next."""

    def ask_to_cancel(self, job: str) -> None:
        """Has the server that a job belongs to cancel it."""

    def hold(self, job: str) -> None:
        """
        Raises:
            LeaseLost: another server has taken it.
        """

    def any_running(self) -> bool:
        return bool(self._database.rows("SELECT 1 FROM jobs WHERE status = 'running' LIMIT 1"))

    def files(self) -> set[Path]:
        """The files of ours that running jobs still need."""
        rows = self._database.rows(
            "SELECT path FROM job_files f JOIN jobs j ON j.id = f.job WHERE f.owned AND j.status = 'running'"
        )
        return {Path(row[0]) for row in rows}

    def update(self, job: str, changes: Mapping[int, Mapping[str, object]]) -> None:
        """Set columns of files, by the files' numbers.

        Raises:
            LeaseLost: another server has taken the job.
        """
        with self._database.writing() as db:
            self._update(db, job, changes)

    def _update(self, db: StoreConnection, job: str, changes: Mapping[int, Mapping[str, object]]) -> None:
        for number, values in changes.items():
            columns = ", ".join(f"{key} = ?" for key in values)
            db.execute(f"UPDATE job_files SET {columns} WHERE job = ? AND number = ?", (*values.values(), job, number))

    def end(self, job: str, status: JobStatus) -> None:
        """Ends a job that runs and is this process's own."""
        with self._database.writing() as db:
            if not self._holds(db, job):
                return
            db.execute(
                "UPDATE jobs SET status = ?, ended_at = ? WHERE id = ? AND status = 'running'",
                (status, time.time(), job),
            )
            if status == "cancelled":
                db.execute(f"UPDATE job_files SET status = 'cancelled' WHERE job = ? AND status NOT IN {OVER}", (job,))


_JOB = 'id, collection, "user", status, created_at, ended_at, replace'
_FILE = """number, source, path, owned, root, folder, metadata, bytes, status, document, pages, chunks, embedded, error,
    faults, change"""


def _file(row: Any) -> File:
    values = dict(row)
    values["path"] = Path(values["path"])
    values["owned"] = bool(values["owned"])
    values["root"] = Path(values["root"]) if values["root"] else None
    values["metadata"] = json.loads(values["metadata"])
    values["faults"] = tuple(ParseFault(message, page) for message, page in json.loads(values["faults"]))
    return File(**values)


def _root(given: Given) -> str | None:
    return None if given.owned else str(given.root or given.path.parent)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
