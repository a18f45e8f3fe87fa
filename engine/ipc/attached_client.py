"""The way to a core that another process keeps alive: a further client, with a number of its own.

Who keeps it alive tells where it is, each time that it is started again; what ran goes on there. Knows nothing of why a
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
    """A `Link`. Commands that are sent while the core is away are said to the next one.

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
        self._line: CoreSocket | None = None
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
        if self._state == "running" and self._line is not None:
            self._line.send(command)

    async def close(self) -> None:
        """The core goes on; who keeps it alive tells it that this client is gone."""
        self._state = "stopped"
        for task in self._tasks:
            task.cancel()
        self._hang_up()

    # -- parts

    async def _follow(self) -> None:
        error: EngineError = EngineStopped("Nobody keeps the engine running any more.")
        try:
            async for place in self._places:
                self._moved(place)
        except EngineError as told:
            error = told
        self._hang_up()
        self._state = "stopped"
        if not self._loaded.done():
            self._loaded.set_exception(error)
        self._listener.ended(error)

    def _moved(self, place: str | None) -> None:
        """The core runs there now; or it is gone, and another one will come."""
        was_running = self._state == "running"
        self._hang_up()
        self._state = "restarting"
        if place is not None:
            self._line = CoreSocket(place, self._client, self._hear)
            joining = asyncio.create_task(self._join(self._line), name="joining the engine")
            self._tasks = [each for each in self._tasks if not each.done()] + [joining]
        elif was_running:
            for request, why in self._journal.crashed().items():
                self._listener.given_up(request, EngineRestarting(why, retry_after_s=5.0))

    async def _join(self, line: CoreSocket) -> None:
        try:
            loaded = await line.loaded()
        except EngineError:  # it is gone again: a further place follows, or the end
            return
        if line is not self._line:
            return  # it has moved on
        self._journal.loaded(loaded.numerics)  # who keeps the core alive says what is otherwise
        for command in self._journal.commands():
            line.send(command)
        self._state = "running"
        if not self._loaded.done():
            self._loaded.set_result(loaded)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line.fail(EngineStopped("The engine has moved."))
            self._line = None

    def _hear(self, replies: list[m.Reply]) -> None:
        for reply in replies:
            self._journal.heard(reply)
        self._listener.deliver(replies)
