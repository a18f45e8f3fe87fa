"""Ingest jobs that several servers of one database share: each is one server's, as long as that renews its lease.

A server takes up the jobs whose lease is over, by SELECT … FOR UPDATE SKIP LOCKED, so two never take one. Times are the
database's: the servers' clocks need not agree. A server that was away for longer than a lease finds its job taken
(`LeaseLost`) at its next write to it, and leaves it alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping

from retrieval.document_database import StoreConnection
from retrieval.jobs import JobStore, LeaseLost, Renewed
from retrieval.postgres.postgres_database import PostgresDatabase
from retrieval.rights import Rights

LEASE_S = 20.0
TAKEN_AT_ONCE = 4  # jobs of servers that are gone, so that those that are left share them

_NOW = "extract(epoch FROM clock_timestamp())"


class LeasedJobs(JobStore):
    """The jobs of a PostgreSQL database, as one server sees them."""

    def __init__(
        self, database: PostgresDatabase, rights: Rights, quota_bytes: int | None = None, lease_s: float | None = None
    ) -> None:
        super().__init__(database, rights, quota_bytes)
        self._postgres = database
        self.lease_s: float = LEASE_S if lease_s is None else lease_s
        self.server = uuid.uuid4().hex

    def _created(self, db: StoreConnection, job: str) -> None:
        db.execute(
            f"UPDATE jobs SET server = ?, lease_until = {_NOW} + ? WHERE id = ?", (self.server, self.lease_s, job)
        )

    def resume(self) -> list[str]:
        return self._take(-1)

    def _take(self, count: int) -> list[str]:
        """Takes up jobs whose lease is over, the oldest first; all where `count` is negative."""
        limit = "" if count < 0 else f"LIMIT {count}"
        with self._postgres.transaction() as db:
            rows = db.execute(
                f"""SELECT id FROM jobs WHERE status = 'running' AND lease_until < {_NOW}
                    ORDER BY created_at, rowid {limit} FOR UPDATE SKIP LOCKED"""
            ).fetchall()
            taken = [row[0] for row in rows]
            for job in taken:
                self._created(db, job)
                self._queue_again(db, job)
        return taken

    def renew(self, jobs: Collection[str]) -> Renewed:
        mine = sorted(jobs)
        with self._postgres.transaction() as db:
            rows = db.execute(
                f"""UPDATE jobs SET lease_until = {_NOW} + ?
                    WHERE id = ANY(?::text[]) AND server = ? AND status = 'running' RETURNING id, cancel""",
                (self.lease_s, mine, self.server),
            ).fetchall()
        kept = {row[0] for row in rows}
        return Renewed(kept, {row[0] for row in rows if row[1]}, self._take(TAKEN_AT_ONCE))

    def release(self) -> None:
        with self._postgres.transaction() as db:
            db.execute("UPDATE jobs SET lease_until = 0 WHERE server = ? AND status = 'running'", (self.server,))

    def ask_to_cancel(self, job: str) -> None:
        with self._postgres.transaction() as db:
            db.execute("UPDATE jobs SET cancel = TRUE WHERE id = ? AND status = 'running'", (job,))

    def hold(self, job: str) -> None:
        with self._postgres.reading() as db:
            self._refuse_lost(db, job)

    def _refuse_lost(self, db: StoreConnection, job: str) -> None:
        if not self._holds(db, job):
            raise LeaseLost(f"Another server has taken the job {job}.")

    def _holds(self, db: StoreConnection, job: str) -> bool:
        row = db.execute("SELECT server FROM jobs WHERE id = ?", (job,)).fetchone()
        return row is None or row[0] == self.server

    def _update(self, db: StoreConnection, job: str, changes: Mapping[int, Mapping[str, object]]) -> None:
        self._refuse_lost(db, job)
        super()._update(db, job, changes)
