"""Keeps a core's process alive: one that dies or hangs is started again, and what ran goes on where it was.

Restarts wait longer each time, and end when there are too many in a short while: then whatever is wrong will not go
away by itself. Knows nothing of sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine import messages as m
from engine.client import Listener, State
from engine.config import EngineConfig
from engine.errors import EngineError, EngineRestarting, EngineStopped
from engine.process.journal import Journal
from engine.process.keeping import WITHIN_S, Deaths
from engine.process.spawned import Spawned

if TYPE_CHECKING:
    from engine.assemble import Parts

log = logging.getLogger(__name__)


class SupervisedLink:
    """A `Link`. Commands that are sent while the process is away are said to the next one."""

    def __init__(
        self,
        config: EngineConfig,
        assemble: Callable[[EngineConfig], Parts] | None,
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        default = "engine.assemble:assemble"
        self._assemble = default if assemble is None else f"{assemble.__module__}:{assemble.__qualname__}"
        self._listener = listener
        self._clock = clock
        self._journal = Journal(clock)
        self._deaths = Deaths(clock)
        self._restarting: asyncio.Task[None] | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._state: State = "restarting"
        self._tell_place: Callable[[str | None], None] = lambda place: None

    def hear_places(self, hear: Callable[[str | None], None]) -> None:
        """`hear` gets `place` whenever it changes."""
        self._tell_place = hear

    @property
    def place(self) -> str | None:
        """Where the sockets of a core lie that runs."""
        return self._process.directory if self._state == "running" else None

    @property
    def state(self) -> State:
        return self._state

    @property
    def pid(self) -> int:
        """Of the process that there is now."""
        return self._process.pid

    async def start(self) -> m.Loaded:
        self._process = self._spawn()
        try:
            loaded = await self._process.loaded()
        except BaseException:
            self._state = "stopped"
            await self._process.stop()
            raise
        self._journal.loaded(loaded.numerics)
        self._state = "running"
        return loaded

    def send(self, command: m.Command) -> None:
        self._journal.sent(command)
        if self._state == "running":
            self._process.send(command)
            if self._watching is None and self._journal.waiting:
                self._heard_at = self._clock()
                self._watch()

    async def close(self) -> None:
        self._state = "stopped"
        if self._watching is not None:
            self._watching.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        await self._process.stop()

    # -- parts

    def _spawn(self) -> Spawned:
        return Spawned(self._config, self._assemble, self._hear, self._died)

    def _hear(self, replies: list[m.Reply]) -> None:
        self._heard_at = self._clock()
        for reply in replies:
            self._journal.heard(reply)
        self._listener.deliver(replies)

    def _died(self, how: str) -> None:
        if self._state != "running":
            return  # it was to end, or its end is told to who waits for its start
        self._state = "restarting"
        self._tell_place(None)
        log.error("the engine's process ended %s; %d sequences are open", how, len(self._journal))
        for request, why in self._journal.crashed().items():
            self._listener.given_up(request, EngineRestarting(why, retry_after_s=5.0))
        self._restarting = asyncio.create_task(self._restart(how), name="engine restart")

    async def _restart(self, how: str) -> None:
        while (pause := self._deaths.pause_s()) is not None:
            await asyncio.sleep(pause)
            self._process = self._spawn()
            try:
                loaded = await self._process.loaded()
            except EngineError as error:
                how = str(error)
                log.error("the engine's process could not be started again: %s", how)
                await self._process.stop()
                continue
            if others := self._journal.loaded(loaded.numerics):
                log.warning("the engine computes otherwise now, so answers may go on otherwise: %s", "; ".join(others))
            for command in self._journal.commands():
                self._process.send(command)
            self._state = "running"
            self._tell_place(self.place)
            self._heard_at = self._clock()
            self._watch()
            log.warning("the engine's process runs again")
            return
        self._state = "stopped"
        message = f"The engine's process died {len(self._deaths)} times in {WITHIN_S:g} s, the last time {how}."
        log.error("%s It is not started again.", message)
        self._listener.ended(EngineStopped(message))

    def _watch(self) -> None:
        """Look now and then whether a process that owes an answer still says something; an idle one is left alone."""
        silent = self._clock() - self._heard_at
        if self._state != "running" or not self._journal.waiting:
            self._watching = None
            return
        if silent > self._config.hang_s:
            log.error("the engine's process has said nothing for %.1f s", silent)
            self._watching = None
            self._process.kill()
            return
        if silent > self._config.hang_s / 2:
            self._process.send(m.GetStats(m.NOBODY))  # even a core with nothing to tell answers this between two steps
        self._watching = asyncio.get_running_loop().call_later(self._config.hang_s / 4, self._watch)
