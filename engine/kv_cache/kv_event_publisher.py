"""Sends K/V events to other processes in vLLM's wire form, and sends again what a subscriber missed.

A batch a step, MessagePack over a ZeroMQ PUB socket with a sequence number, and a replay socket for subscribers
that see a gap (vLLM's `kv_events.py`), from a thread of its own. Hashes are one-way digests of the pool's digests, so
neither the engine's secret nor a tenant's root can be learnt from them; token ids are the prompts' own.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import msgspec
import zmq

from engine.config import KVEventsConfig
from engine.errors import InvalidParameter
from engine.kv_cache.kv_events import Change, KVEventLog

log = logging.getLogger(__name__)

MEDIUM = "GPU"  # vLLM's word for the pool that attention reads, on whatever device
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
CLOSING_S = 1.0  # to send what is queued when the engine stops


class KVEvent(msgspec.Struct, gc=False, tag=True):
    """An event on the wire: a map with its kind's name as `type`."""


class BlockStored(KVEvent):
    """Blocks that can be found from now on: each follows the one before, the first one `parent_block_hash`."""

    block_hashes: list[int]  # 64 bits each
    parent_block_hash: int | None  # None: they begin a sequence
    token_ids: list[int]  # `block_size` of each block
    block_size: int  # tokens
    lora_id: int | None  # None: adapters are told by name
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVEvent):
    """Blocks that cannot be found any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(KVEvent):
    """Nothing can be found any more."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A step's events, in the order in which they happened."""

    ts: float  # seconds since the epoch
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def block_hash(digest: bytes) -> int:
    """Returns the 64 bits that stand for a block of the pool outside of the engine."""
    return int.from_bytes(hashlib.blake2b(digest, digest_size=8).digest(), "big")


def events_of(changes: Sequence[Change], block_size: int) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Makes events of changes, those of one chain joined."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    for change in changes:
        last = events[-1] if events else None
        if change is None:
            events.append(AllBlocksCleared())
        elif isinstance(change, bytes):
            if isinstance(last, BlockRemoved):
                last.block_hashes.append(block_hash(change))
            else:
                events.append(BlockRemoved([block_hash(change)], MEDIUM))
        else:
            digest, parent, tokens, adapter = change
            before = None if parent is None else block_hash(parent)
            if isinstance(last, BlockStored) and last.block_hashes[-1] == before and last.lora_name == adapter:
                last.block_hashes.append(block_hash(digest))
                last.token_ids.extend(tokens)
            else:
                hashes = [block_hash(digest)]
                events.append(BlockStored(hashes, before, list(tokens), block_size, None, MEDIUM, adapter))
    return events


class KVEventPublisher:
    """Encodes and sends batches in a thread of its own, which sleeps until there is one or a subscriber asks."""

    def __init__(self, config: KVEventsConfig, block_size: int) -> None:
        """
        Raises:
            InvalidParameter: an endpoint cannot be bound.
        """
        self._size, self._topic = block_size, config.topic.encode()
        self._queue = SimpleQueue[list[Change] | None]()
        self._sent = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)
        self._number = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://kv-events")
        self._wake.connect("inproc://kv-events")
        self._sockets = [self._wake, self._woken]
        self._out = self._bound(zmq.PUB, config.endpoint, config.hwm)
        self._replay = None
        if config.replay_endpoint is not None:
            self._replay = self._bound(zmq.ROUTER, config.replay_endpoint, 0)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        self._sockets.append(made)
        made.set_hwm(hwm)
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            message = f"kv_events cannot be published at {endpoint}: {error}; accepted: an address of this machine that"
            raise InvalidParameter("kv_events", f"{message} nobody uses, such as tcp://127.0.0.1:5557.") from None
        return made

    def publish(self, changes: list[Change]) -> None:
        """Queues a batch. Called by one thread."""
        self._queue.put(changes)
        self._wake.send(b"")

    def close(self) -> None:
        """Sends what is queued, and ends the thread."""
        self._queue.put(None)
        self._wake.send(b"")
        self._thread.join()
        self._context.destroy(linger=int(CLOSING_S * 1000))

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._replay in ready:
                self._answer()
            if self._woken in ready:
                self._woken.recv()
                changes = self._queue.get()
                if changes is None:
                    return
                self._send(changes)

    def _send(self, changes: list[Change]) -> None:
        payload = self._encoder.encode(KVEventBatch(time.time(), events_of(changes, self._size)))
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._sent.append((number, payload))
        self._out.send_multipart((self._topic, number, payload))

    def _answer(self) -> None:
        """Sends one subscriber the batches that it asks for, from a number on."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning(
                "a replay of K/V events was asked for in %d frames; accepted: none and 8 bytes", len(frames) - 1
            )
            return
        client, empty, first = frames
        start = int.from_bytes(first, "big")
        for number, payload in self._sent:
            if int.from_bytes(number, "big") >= start:
                self._replay.send_multipart((client, empty, number, payload))
        self._replay.send_multipart((client, empty, END_OF_REPLAY, b""))


def event_log(config: KVEventsConfig, block_size: int, adapter_name: Callable[[int], str | None]) -> KVEventLog:
    """Returns a log whose changes are published.

    Raises:
        InvalidParameter: an endpoint cannot be bound.
    """
    publisher = KVEventPublisher(config, block_size)
    return KVEventLog(publisher.publish, adapter_name, publisher.close)
