"""One server's membership of the servers that share a database: its lease, and the channels to the others."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from app.cluster.commands import CommandChannel
from app.cluster.leases import RENEW_S, Leases
from app.cluster.redis_client import check_redis, redis_client
from app.cluster.run_streams import RunStreams
from app.config import Settings
from app.db.database import Database
from app.db.postgres import database_identity
from app.db.sqlite import STORAGE_ERRORS
from app.db.store import Store

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("ponder")

_CANCEL_S = 0.2  # for a task to end, before it is cancelled again


async def open_store(settings: Settings) -> Store:
    """Opens the database of a server, which with Redis it shares with others.

    Raises:
        BadSetting: the data directory, the database or Redis cannot be used; the message says why.
    """
    settings.check_servers()
    if settings.redis_address is not None:
        await check_redis(settings.redis_address)
    shared = settings.redis is not None
    return await Store.open(settings.resolved_data_dir, settings.database_address, shared=shared)


class Cluster:
    """The part of one server. `name` is the server's since its start; `namespace` begins each key of its database's
    servers, so several databases may share a Redis."""

    def __init__(self, redis: Redis, namespace: str, name: str) -> None:
        self.name = name
        self.namespace = namespace
        self.leases = Leases(redis, namespace, name)
        self.streams = RunStreams(redis, namespace)
        self.commands = CommandChannel(redis, namespace, name)
        self._redis = redis
        self._tasks = list[asyncio.Task[None]]()
        self._is_away = False

    @classmethod
    async def join(cls, address: str, database: Database) -> Cluster:
        """Takes the lease of the server that has opened the database as a member.

        Raises:
            BadSetting: Redis cannot be used; the message says why.
        """
        assert database.member is not None
        await check_redis(address)
        identity = await database.read(database_identity)
        digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        made = cls(redis_client(address), f"ponder:{digest}", database.member)
        await made.leases.renew()
        made.begin(made._renew(), "lease")
        made.begin(made.streams.send_all(), "run events")
        return made

    def serve(self, obey: Callable[[str], Awaitable[str]], take_over: Callable[[], Awaitable[object]]) -> None:
        """Carries out commands by `obey` from now on, and calls `take_over` often, for runs of lost servers."""
        self.begin(self.commands.serve(obey), "commands")
        self.begin(self._watch(take_over), "lost servers")

    async def leave(self) -> None:
        """Gives the lease back. Idempotent."""
        from redis.exceptions import RedisError

        left = set(self._tasks)
        while left:  # once is not enough: the client's `asyncio.wait_for` may lose a cancellation, before Python 3.12
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=_CANCEL_S)
        with contextlib.suppress(RedisError, OSError, TimeoutError):  # it ends by itself
            await self.leases.release()
        await self._redis.aclose()

    async def lost(
        self, servers: Sequence[str], connected: Callable[[Sequence[str]], Awaitable[set[str]]]
    ) -> list[str]:
        """Returns those of the servers that show no sign of life: no lease, and none of `connected` to the database.

        None while Redis does not answer.
        """
        from redis.exceptions import RedisError

        try:
            held = await self.leases.held(servers)
        except (RedisError, OSError, TimeoutError):
            return []
        missing = [name for name in servers if name not in held]
        there = await connected(missing) if missing else set[str]()
        return [name for name in missing if name not in there]

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Has work done until the server leaves."""
        self._tasks.append(asyncio.create_task(work, name=name))

    async def _renew(self) -> None:
        from redis.exceptions import RedisError

        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self.leases.renew()
                if self._is_away:
                    log.warning("Redis answers again")
                self._is_away = False
            except (RedisError, OSError, TimeoutError) as error:
                if not self._is_away:
                    log.error("Redis does not answer: limits are counted by each server alone (%s)", error)
                self._is_away = True

    async def _watch(self, take_over: Callable[[], Awaitable[object]]) -> None:
        failed = False
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await take_over()
                failed = False
            except STORAGE_ERRORS as error:
                if not failed:
                    log.error("runs of lost servers cannot be looked for: %s", error)
                failed = True
            except Exception:
                log.exception("runs of lost servers cannot be looked for")
