"""Supervises an engine process: spawns it, restarts it after a crash or a hang, and replays its requests.

Requests resume after their delivered tokens. Pauses between restarts grow, and restarts end when there are too many in
a short while: then the fault will not go away by itself. The sockets lie in a directory that only this user can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.child_process import start_child
from engine.config import EngineConfig
from engine.core import messages as m
from engine.errors import EngineError, EngineRestarting, EngineStopped
from engine.ipc.core_process import WITHIN_S, CoreSocket, CoreStart, RestartBackoff
from engine.ipc.link import Listener, State
from engine.ipc.sequence_journal import SequenceJournal

if TYPE_CHECKING:
    from engine.builder import EngineParts


_STOP_S = 10.0  # from the stop command to the kill


class CoreProcess:
    """A core's process, whose sockets lie in `directory`. `hear` gets the replies, `died` the way it ended, each on the
    event loop."""

    def __init__(
        self,
        config: EngineConfig,
        assemble: str,
        hear: Callable[[list[m.Reply]], None],
        died: Callable[[str], None],
    ) -> None:
        self._died = died
        self._loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self.directory = tempfile.mkdtemp(prefix="ponder-")  # entered by this user alone
        start = CoreStart(config, assemble, self.directory, logging.getLogger().getEffectiveLevel())
        self._process = start_child("engine.ipc.child", start)
        self._socket = CoreSocket(self.directory, 0, hear)
        threading.Thread(target=self._wait, name="engine-process", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def loaded(self) -> m.Loaded:
        """Returns the core's description, once it can run.

        Raises:
            EngineError: why it cannot; `EngineStopped` when the process ended without a reply.
        """
        return await self._socket.loaded()

    def send(self, command: m.Command) -> None:
        self._socket.send(command)

    def kill(self) -> None:
        """Kills the process at once; `died` is called."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Asks the process to end, and kills it if it does not. Returns when it is gone and its files are removed."""
        if not self._gone.is_set():
            self._socket.send(m.Stop())
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._gone.wait()
            except TimeoutError:
                self.kill()
                await self._gone.wait()

    # -- parts

    def _wait(self) -> None:
        """Waits for the process's end in a thread of its own."""
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self._end, code)

    def _end(self, code: int) -> None:
        self._socket.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        self._socket.fail(EngineStopped(f"The engine's process ended {how} before it was ready."))
        self._gone.set()
        self._died(how)


log = logging.getLogger(__name__)


class SupervisedLink:
    """A `Link`. Commands that are sent while the process is away are replayed to the next one."""

    def __init__(
        self,
        config: EngineConfig,
        assemble: Callable[[EngineConfig], EngineParts] | None,
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        default = "engine.builder:build"
        self._assemble = default if assemble is None else f"{assemble.__module__}:{assemble.__qualname__}"
        self._listener = listener
        self._clock = clock
        self._journal = SequenceJournal(clock)
        self._deaths = RestartBackoff(clock)
        self._restarting: asyncio.Task[None] | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._state: State = "restarting"
        self._tell_place: Callable[[str | None], None] = lambda place: None

    def hear_places(self, hear: Callable[[str | None], None]) -> None:
        """Registers `hear`, which gets `place` whenever it changes."""
        self._tell_place = hear

    @property
    def place(self) -> str | None:
        """Returns the directory of a running core's sockets."""
        return self._process.directory if self._state == "running" else None

    @property
    def state(self) -> State:
        return self._state

    @property
    def pid(self) -> int:
        """Returns the id of the current process."""
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

    def _spawn(self) -> CoreProcess:
        return CoreProcess(self._config, self._assemble, self._hear, self._died)

    def _hear(self, replies: list[m.Reply]) -> None:
        self._heard_at = self._clock()
        for reply in replies:
            self._journal.heard(reply)
        self._listener.deliver(replies)

    def _died(self, how: str) -> None:
        if self._state != "running":
            return  # a wanted end, or one reported to the waiter for its start
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
        """Checks that a process that owes a reply is not silent for too long; an idle one is left alone."""
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
