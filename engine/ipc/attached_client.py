"""Link to a core that another process keeps alive: a further client, with a number of its own.

The keeper announces the core's place each time that it is started again; requests go on there. Knows nothing of why a
core died.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from engine.core import messages as m
from engine.errors import EngineError, EngineRestarting, EngineStopped
from engine.ipc.core_process import CoreSocket
from engine.ipc.link import Listener, State
from engine.ipc.sequence_journal import SequenceJournal


class AttachedLink:
    """A `Link`. Commands that are sent while the core is away are replayed to the next one.

    `places` gives the directory with the sockets of each new core, and None when one is gone and another will come;
    with its end, or an `EngineError` that it raises, there will be none any more.
    """

    def __init__(
        self,
        client: int,
        places: AsyncIterator[str | None],
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._places = places
        self._listener = listener
        self._journal = SequenceJournal(clock)
        self._socket: CoreSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loaded: asyncio.Future[m.Loaded] = asyncio.get_running_loop().create_future()
        self._state: State = "restarting"

    @property
    def state(self) -> State:
        return self._state

    async def start(self) -> m.Loaded:
        self._tasks.append(asyncio.create_task(self._follow(), name="engine places"))
        return await asyncio.shield(self._loaded)

    def send(self, command: m.Command) -> None:
        self._journal.sent(command)
        if self._state == "running" and self._socket is not None:
            self._socket.send(command)

    async def close(self) -> None:
        """Disconnects. The core goes on; its keeper tells it that this client is gone."""
        self._state = "stopped"
        for task in self._tasks:
            task.cancel()
        self._disconnect()

    # -- parts

    async def _follow(self) -> None:
        error: EngineError = EngineStopped("Nobody keeps the engine running any more.")
        try:
            async for place in self._places:
                self._moved(place)
        except EngineError as ended_by:
            error = ended_by
        self._disconnect()
        self._state = "stopped"
        if not self._loaded.done():
            self._loaded.set_exception(error)
        self._listener.ended(error)

    def _moved(self, place: str | None) -> None:
        """Connects to the core's new place; or, without one, waits for the next."""
        was_running = self._state == "running"
        self._disconnect()
        self._state = "restarting"
        if place is not None:
            self._socket = CoreSocket(place, self._client, self._hear)
            joining = asyncio.create_task(self._join(self._socket), name="joining the engine")
            self._tasks = [each for each in self._tasks if not each.done()] + [joining]
        elif was_running:
            for request, why in self._journal.crashed().items():
                self._listener.given_up(request, EngineRestarting(why, retry_after_s=5.0))

    async def _join(self, socket: CoreSocket) -> None:
        try:
            loaded = await socket.loaded()
        except EngineError:  # it is gone again: a further place follows, or the end
            return
        if socket is not self._socket:
            return  # it has moved on
        self._journal.loaded(loaded.numerics)  # the keeper reports differences of numerics
        for command in self._journal.commands():
            socket.send(command)
        self._state = "running"
        if not self._loaded.done():
            self._loaded.set_result(loaded)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket.fail(EngineStopped("The engine has moved."))
            self._socket = None

    def _hear(self, replies: list[m.Reply]) -> None:
        for reply in replies:
            self._journal.heard(reply)
        self._listener.deliver(replies)
