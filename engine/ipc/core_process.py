"""An engine process as its server sees it: environment, handshake, framed socket.

One client's end of the socket to a core's process: commands out, replies in, on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from engine.config import EngineConfig
from engine.core import messages as m
from engine.errors import EngineError
from engine.ipc import wire

MAX_DEATHS = 5  # within `WITHIN_S`: the next one ends it
WITHIN_S = 60.0
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0


class RestartBackoff:
    """Deaths of one process and its successors. After too many in a short while the fault will not go away."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = deque[float]()

    def __len__(self) -> int:
        """Counts the deaths within the last `WITHIN_S`, at the last one."""
        return len(self._at)

    def pause_s(self) -> float | None:
        """Records a death. Returns the seconds to wait before the next start; None when it was one death too many."""
        now = self._clock()
        self._at.append(now)
        while now - self._at[0] > WITHIN_S:
            self._at.popleft()
        if len(self._at) > MAX_DEATHS:
            return None
        return min(MAX_PAUSE_S, FIRST_PAUSE_S * 4 ** (len(self._at) - 1))


class CoreStart(msgspec.Struct):
    """The first message to the process. `assemble` is "module:function"; sockets are files of `directory`."""

    config: EngineConfig
    assemble: str
    directory: str
    log_level: int


def address(directory: str) -> str:
    return f"ipc://{directory}/engine.sock"


def identity(client: int) -> bytes:
    """Returns the name of a client's socket."""
    return b"client-%d" % client


class CoreSocket:
    """Socket to the core in `directory`; `hear` gets the replies to the client of this number."""

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
        """Returns the core's description, once it can run.

        Raises:
            EngineError: why it cannot, or the error given to `fail`.
        """
        self.send(wire.Hello())
        return await self._loaded

    def fail(self, error: EngineError) -> None:
        """Fails a start that may still be awaited."""
        if not self._loaded.done():
            self._loaded.set_exception(error)
            self._loaded.exception()  # it may no longer be awaited

    def send(self, command: m.Command | wire.Hello) -> None:
        """Sends a command; without effect once closed."""
        if self._socket.closed:
            return
        self._socket.send(wire.encode_command(command))
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:  # sending may have cleared the signal of a new message
            self._loop.call_soon(self.receive)

    def receive(self) -> None:
        """Receives all that has come: the socket's file signals new messages once, not each."""
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
        """Closes the socket, after receiving the last replies. Idempotent."""
        if self._socket.closed:
            return
        self.receive()
        self._loop.remove_reader(self._file)
        self._socket.close()
        self._context.term()
