"""One client's end of the socket to a core's process: commands out, replies in, on the event loop.

Knows nothing of the process, nor of what happens when it dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from engine import messages as m
from engine.errors import EngineError
from engine.process import wire
from engine.process.meeting import address, identity


class Line:
    """To the core whose sockets lie in `directory`; `hear` gets the replies to the client of this number."""

    def __init__(self, directory: str, client: int, hear: Callable[[list[m.Reply]], None]) -> None:
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[m.Loaded] = self._loop.create_future()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.set(option, 0)
        self._socket.set(zmq.RECONNECT_IVL, 10)  # milliseconds; it may not be bound yet
        self._socket.set(zmq.IDENTITY, identity(client))
        self._socket.connect(address(directory))
        self._file = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._file, self.receive)

    async def loaded(self) -> m.Loaded:
        """What the core says once it can run.

        Raises:
            EngineError: why it cannot, or what `fail` was given.
        """
        self.send(wire.Hello())
        return await self._loaded

    def fail(self, error: EngineError) -> None:
        """Nothing will come of a start that somebody may wait for."""
        if not self._loaded.done():
            self._loaded.set_exception(error)
            self._loaded.exception()  # they may have stopped waiting

    def send(self, command: m.Command | wire.Hello) -> None:
        """Without effect once closed."""
        if self._socket.closed:
            return
        self._socket.send(wire.encode_command(command))
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:  # sending may have taken the signal that something came
            self._loop.call_soon(self.receive)

    def receive(self) -> None:
        """All that has come: the socket's file tells of new messages once, not of each."""
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            replies = wire.decode_replies(data)
            if self._loaded.done():
                self._hear(replies)
            elif isinstance(replies[0], wire.Failure):
                self._loaded.set_exception(wire.error_of(replies[0]))
            else:
                self._loaded.set_result(replies[0])

    def close(self) -> None:
        """What has come is heard first. Idempotent."""
        if self._socket.closed:
            return
        self.receive()
        self._loop.remove_reader(self._file)
        self._socket.close()
        self._context.term()
