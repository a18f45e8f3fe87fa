"""Commands to the server that makes a run, and its replies: a request that arrives at another server is passed on.

Each server reads a stream of its own, under the name that it has since its start, from the beginning: a command is
read once. Its reply goes to a list that the sender alone waits for. Both expire.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from app.cluster.redis_client import BLOCK_S, entries_of

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("ponder")

REPLY_S = 10.0
_KEPT_S = 60
_MAX_ENTRIES = 1000


class ServerSilent(Exception):
    """The server did not reply, or Redis did not pass the command on."""


class CommandChannel:
    """Commands and replies are texts, which this knows nothing of."""

    def __init__(self, redis: Redis, namespace: str, name: str) -> None:
        self._redis = redis
        self._namespace = namespace
        self._name = name
        self._answering = set[asyncio.Task[None]]()

    async def call(self, server: str, command: str) -> str:
        """Returns the reply of another server to a command.

        Raises:
            ServerSilent: there was none within `REPLY_S`.
        """
        from redis.exceptions import RedisError

        reply_to = f"{self._namespace}:reply:{secrets.token_hex(16)}"
        stream = self._stream(server)
        try:
            async with asyncio.timeout(REPLY_S + BLOCK_S):
                await self._redis.xadd(stream, {"command": command, "reply_to": reply_to}, maxlen=_MAX_ENTRIES)
                await self._redis.expire(stream, _KEPT_S)
                # Any: redis-py's types are those of both of its clients.
                found = await cast("Awaitable[Any]", self._redis.blpop([reply_to], timeout=REPLY_S))
        except (RedisError, OSError, TimeoutError) as error:
            raise ServerSilent(str(error)) from None
        if found is None:
            raise ServerSilent("no reply came")
        return str(found[1])

    async def serve(self, obey: Callable[[str], Awaitable[str]]) -> None:
        """Has `obey` carry out what other servers send, each command in a task of its own, for ever."""
        from redis.exceptions import RedisError

        stream, at = self._stream(self._name), "0-0"
        while True:
            try:
                reply = await self._redis.xread({stream: at}, block=int(BLOCK_S * 1000))
            except (RedisError, OSError, TimeoutError):
                await asyncio.sleep(BLOCK_S / 2)
                continue
            for id, fields in entries_of(reply, stream):
                at = id
                task = asyncio.create_task(self._answer(obey, fields["command"], fields["reply_to"]), name="command")
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _answer(self, obey: Callable[[str], Awaitable[str]], command: str, reply_to: str) -> None:
        try:
            reply = await obey(command)
            await cast("Awaitable[Any]", self._redis.rpush(reply_to, reply))
            await self._redis.expire(reply_to, _KEPT_S)
        except Exception:
            log.exception("a command of another server failed")

    def _stream(self, server: str) -> str:
        return f"{self._namespace}:commands:{server}"
