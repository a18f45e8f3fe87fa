"""The tail of each run's log as a Redis stream, for readers at other servers than the run's.

An entry's id is the event's number, and Redis takes no id that is not above the last one: an event that is published
twice, or late, is there once. The database has each event before the stream does. A stream keeps the newest entries
for a while, so a reader whose next number is missing there asks the database.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from app.cluster.redis_client import BLOCK_S, CALL_S, entries_of
from app.db.run_store import LoggedEvent

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("ponder")

MAX_ENTRIES = 1000  # about: of one run
KEPT_S = 600.0  # after its last entry
_AT_ONCE = 256  # entries of one reply


class RunStreams:
    """Publishes what this server's runs write, and reads what other servers' do."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis = redis
        self._prefix = f"{namespace}:events:"
        self._coming = asyncio.Queue[tuple[str, Sequence[LoggedEvent]]]()
        self._is_away = False

    def publish(self, run_id: str, events: Sequence[LoggedEvent]) -> None:
        """Have events that the database has sent to the readers elsewhere."""
        if events:
            self._coming.put_nowait((run_id, list(events)))

    async def send_all(self) -> None:
        """Sends what is published, for ever. What cannot be sent is in the database."""
        from redis.exceptions import RedisError

        while True:
            batch = [await self._coming.get()]
            while not self._coming.empty():
                batch.append(self._coming.get_nowait())
            try:
                async with asyncio.timeout(CALL_S):
                    await self._send(batch)
                self._is_away = False
            except (RedisError, OSError, TimeoutError) as error:
                if not self._is_away:
                    log.warning("Redis does not take events, readers elsewhere ask the database: %s", error)
                self._is_away = True

    async def _send(self, batch: Sequence[tuple[str, Sequence[LoggedEvent]]]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for run_id, events in batch:
            for event in events:
                fields: Any = {"type": event.type, "data": event.data}  # redis-py's type is a dict of all kinds
                pipe.xadd(self._prefix + run_id, fields, id=f"{event.seq}-0", maxlen=MAX_ENTRIES)
            pipe.pexpire(self._prefix + run_id, int(KEPT_S * 1000))
        await pipe.execute(raise_on_error=False)  # an id that is not above the last one is an error of its own

    async def tail(self, run_id: str, after: int) -> AsyncGenerator[LoggedEvent, None]:
        """Yields the events after the number `after` as they come.

        Ends where the next number is missing, nothing comes for `BLOCK_S`, or Redis does not answer.
        """
        from redis.exceptions import RedisError

        key = self._prefix + run_id
        while True:
            try:
                reply = await self._redis.xread({key: f"{after}-0"}, count=_AT_ONCE, block=int(BLOCK_S * 1000))
            except (RedisError, OSError, TimeoutError):
                await asyncio.sleep(BLOCK_S / 2)
                return
            if not (entries := entries_of(reply, key)):
                return
            for id, fields in entries:
                seq = int(id.partition("-")[0])
                if seq != after + 1:
                    return
                after = seq
                yield LoggedEvent(seq, fields["type"], fields["data"])
