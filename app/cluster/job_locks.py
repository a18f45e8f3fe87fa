"""Locks for work that one of several servers does at a time, such as the ingestion of a document.

A lock is a key with an expiry and its holder's token (Redis's documentation, "Distributed Locks"), renewed while the
work lasts: that of a server that dies ends by itself, and another takes the work up. A holder that was stopped for
longer than the expiry finds that out by `JobLock.is_held`, before it commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.lock import Lock

log = logging.getLogger("ponder")

LOCK_S = 10.0


class JobLock:
    """A lock that is held, while it is."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    async def is_held(self) -> bool:
        """Returns whether nobody else can have the work meanwhile."""
        return bool(await self._lock.owned())


class JobLocks:
    """The locks of all servers, by name."""

    def __init__(self, redis: Redis, namespace: str, expiry_s: float = LOCK_S) -> None:
        self._redis = redis
        self._prefix = f"{namespace}:job:"
        self._expiry_s = expiry_s

    @contextlib.asynccontextmanager
    async def hold(self, job: str) -> AsyncIterator[JobLock | None]:
        """Holds the lock of a job for the block; yields None where another server has it."""
        lock = self._redis.lock(self._prefix + job, timeout=self._expiry_s, thread_local=False)
        if not await lock.acquire(blocking=False):
            yield None
            return
        renewing = asyncio.create_task(self._renew(lock, job), name="job lock")
        try:
            yield JobLock(lock)
        finally:
            renewing.cancel()
            from redis.exceptions import RedisError

            with contextlib.suppress(RedisError, OSError):  # another has it by now, or it expires
                await lock.release()

    async def _renew(self, lock: Lock, job: str) -> None:
        from redis.exceptions import LockError, RedisError

        while True:
            await asyncio.sleep(self._expiry_s / 3)
            try:
                await lock.reacquire()
            except LockError:
                log.warning("the lock of the job %s was lost: another server may have taken it up", job)
                return
            except (RedisError, OSError):  # it is tried again before the lock ends
                continue
