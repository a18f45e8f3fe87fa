"""Leases by which servers see each other live.

A server's lease is a key with an expiry, renewed three times within it. It is one of two signs of life; the other is
the lock of the server's connection to PostgreSQL (`app/db/postgres.py`). A server is lost where both are gone: a Redis
that was emptied or a PostgreSQL that was restarted ends no runs. A server without both signs cannot write any more
either, as whoever takes its runs over becomes their owner in the database first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.cluster.redis_client import CALL_S

if TYPE_CHECKING:
    from redis.asyncio import Redis

LEASE_S = 6.0
RENEW_S = 2.0


class Leases:
    """The lease of the server `name`, and a look at those of others."""

    def __init__(self, redis: Redis, namespace: str, name: str) -> None:
        self._redis = redis
        self._prefix = f"{namespace}:lease:"
        self._name = name

    async def renew(self) -> None:
        """Takes the lease, or keeps it for `LEASE_S` more seconds. Raises as every call: the client's errors."""
        async with asyncio.timeout(CALL_S):
            await self._redis.set(self._prefix + self._name, "", px=int(LEASE_S * 1000))

    async def release(self) -> None:
        """Gives the lease back."""
        async with asyncio.timeout(CALL_S):
            await self._redis.delete(self._prefix + self._name)

    async def held(self, names: Sequence[str]) -> set[str]:
        """Returns those of the servers that have a lease."""
        async with asyncio.timeout(CALL_S):
            found = await self._redis.mget([self._prefix + name for name in names]) if names else []
        return {name for name, value in zip(names, found, strict=True) if value is not None}
