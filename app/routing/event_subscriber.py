"""Keeps the prefix index up to date with one replica's K/V events.

At its start, and whenever a number is missing, it asks the replica's replay socket for what it lacks; where there is
none, the replica's blocks are forgotten and learnt again. A replica that numbers from the beginning has been restarted.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import zmq
import zmq.asyncio

from app.routing.prefix_index import PrefixIndex
from engine.kv_cache.kv_event_publisher import END_OF_REPLAY, KVEventBatch

log = logging.getLogger("ponder")

REPLAY_S = 2.0  # without a word, after which a replay is given up


class EventSubscriber:
    """Subscribes to `endpoint`, and replays from `replay_endpoint`, if there is one."""

    def __init__(self, replica: str, index: PrefixIndex, endpoint: str, replay_endpoint: str | None) -> None:
        self._replica, self._index = replica, index
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next = 0  # the number of the next batch
        self._last_ts = 0.0  # of the newest batch
        self.missed = 0  # batches that could not be replayed

    async def run(self) -> None:
        """Follows the replica until it is cancelled."""
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as hearing:
            hearing.linger = 0
            hearing.subscribe(b"")
            watching = asyncio.create_task(self._watch(hearing.get_monitor_socket(zmq.EVENT_DISCONNECTED)))
            hearing.connect(self._endpoint)
            try:
                await self._hear(context, hearing)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                hearing.disable_monitor()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Forgets all when the connection ends: what numbers from then on stand for is another engine's to say."""
        while True:
            await monitor.recv_multipart()
            self.forget()

    async def _hear(self, context: zmq.asyncio.Context, hearing: zmq.asyncio.Socket) -> None:
        await self._replay(context)
        while True:
            frames = await hearing.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != 8:
                log.warning("%s: a K/V event of %d frames is ignored", self._endpoint, len(frames))
                continue
            number = int.from_bytes(frames[1], "big")
            if number > self._next:
                await self._replay(context)
            self._skip_to(number)
            self._take(number, frames[2])

    def forget(self) -> None:
        """Forgets what the replica had, say as it is down."""
        self._index.remove(self._replica)
        self._next, self._last_ts = 0, 0.0

    def _skip_to(self, number: int) -> None:
        """Forgets all where batches are missing: blocks may have been removed by them."""
        if number > self._next:
            self.missed += number - self._next
            self.forget()
            self._next = number

    def _take(self, number: int, payload: bytes) -> None:
        try:
            batch = self._decoder.decode(payload)
        except msgspec.DecodeError as error:  # of another version, say
            log.warning("%s: a batch of K/V events is ignored: %s", self._endpoint, error)
            self._next = number + 1
            return
        if number < self._next:
            if batch.ts <= self._last_ts:
                return  # it was replayed before it came
            self.forget()  # the replica numbers from the beginning
        self._index.apply(self._replica, batch.events)
        self._next, self._last_ts = number + 1, batch.ts

    async def _replay(self, context: zmq.asyncio.Context) -> None:
        """Takes over the batches from the next number on, as far as the replica still has them."""
        if self._replay_endpoint is None:
            return
        with context.socket(zmq.DEALER) as asking:
            asking.linger = 0
            asking.connect(self._replay_endpoint)
            await asking.send_multipart((b"", self._next.to_bytes(8, "big")))
            while True:
                try:
                    async with asyncio.timeout(REPLAY_S):
                        frames = await asking.recv_multipart()
                except TimeoutError:
                    log.warning("%s does not replay K/V events", self._replay_endpoint)
                    return
                if len(frames) != 3 or frames[1] == END_OF_REPLAY:
                    return
                number = int.from_bytes(frames[1], "big")
                self._skip_to(number)  # earlier ones have left the replica's buffer
                self._take(number, frames[2])
