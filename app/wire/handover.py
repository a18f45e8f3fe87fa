"""Handing a connection to another process of this machine: its socket, and the bytes of a request that were read of it.

A worker looks at the line that a request begins with. A request of another's, or no such line, it hands over before
anything is answered; the other process goes on as if it had accepted the connection. Knows nothing of the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import h11

from app.wire.connection import Connection

_FIRST_BYTES = 32 << 10  # that go with the socket itself
_DRAIN_S = 0.01  # between two checks whether the written bytes have left

log = logging.getLogger("ponder")


class OwnOrOthers(Connection):
    """A worker's connection. `is_own` is asked of the bytes that a request begins with, `hand_over` gets the rest."""

    is_own: Callable[[bytes], bool]
    hand_over: Callable[[socket.socket, bytes], None]

    def data_received(self, data: bytes) -> None:
        begins = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if begins and not type(self).is_own(data):
            self._give(data)
        else:
            super().data_received(data)

    def on_response_complete(self) -> None:
        waiting, _ = self.conn.trailing_data  # a request that came while this one was answered
        if waiting and not type(self).is_own(waiting) and not self.transport.is_closing():
            self._give(waiting)
        else:
            super().on_response_complete()

    def _give(self, data: bytes) -> None:
        self.transport.pause_reading()
        self._enter("")
        self._unset_keepalive_if_required()
        self._give_when_read(data)

    def _give_when_read(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():  # of the answer before
            self.loop.call_later(_DRAIN_S, self._give_when_read, data)
            return
        copy = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
        self.transport.abort()  # closes this process's own copy
        type(self).hand_over(copy, data)


class ConnectionSender:
    """Hands connections to the listener at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._giving: set[asyncio.Task[None]] = set()

    def give(self, connection: socket.socket, data: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._give(connection, data), name="hand over")
        self._giving.add(task)
        task.add_done_callback(self._giving.discard)

    async def _give(self, connection: socket.socket, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        with connection, socket.socket(socket.AF_UNIX) as way:
            way.setblocking(False)
            try:
                await loop.sock_connect(way, self._path)
                sent = socket.send_fds(way, [data[:_FIRST_BYTES]], [connection.fileno()])
                await loop.sock_sendall(way, data[sent:])
            except OSError as error:
                log.warning("a connection could not be handed over: %s", error)


class ConnectionReceiver:
    """Listens at `path` for connections that are handed over; `adopt` gets each with the bytes that were read of it."""

    def __init__(self, path: str, adopt: Callable[[socket.socket, bytes], None]) -> None:
        self._adopt = adopt
        self._loop = asyncio.get_running_loop()
        self._coming: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen(1024)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                way, _ = self._listener.accept()
                way.setblocking(False)
                task = self._loop.create_task(self._take(way), name="take over")
                self._coming.add(task)
                task.add_done_callback(self._coming.discard)

    async def _take(self, way: socket.socket) -> None:
        with way:
            readable = asyncio.Event()
            self._loop.add_reader(way, readable.set)
            try:
                await readable.wait()
            finally:
                self._loop.remove_reader(way)
            data, files, _, _ = socket.recv_fds(way, _FIRST_BYTES, 1)
            if not files:
                return
            connection = socket.socket(fileno=files[0])
            with contextlib.ExitStack() as closing:
                closing.callback(connection.close)
                while more := await self._loop.sock_recv(way, 1 << 18):
                    data += more
                connection.setblocking(False)
                closing.pop_all()
        self._adopt(connection, data)


def adopted(protocol: Connection, data: bytes) -> Connection:
    """`protocol`, which has read `data` as soon as it has its connection."""
    made: Callable[[Any], None] = protocol.connection_made

    def connection_made(transport: asyncio.Transport) -> None:
        made(transport)
        if not transport.is_closing():
            protocol.data_received(data)

    protocol.connection_made = connection_made  # type: ignore[method-assign]  # before anything else is read
    return protocol
