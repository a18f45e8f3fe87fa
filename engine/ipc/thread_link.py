"""A core in a thread of this process: for small machines, tests, and programs that hold an engine of their own.

One queue leads to the core, one wake-up a step leads back, so the event loop is never blocked by the model and a step
costs it one callback, however many sequences ran. Knows nothing of scheduling or tensors.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator

from engine.builder import EngineParts, use_threads
from engine.builder import build as assemble_default
from engine.config import EngineConfig
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.loop import drive
from engine.errors import EngineStopped
from engine.ipc.link import Listener, State
from engine.structured_output.compiler import Compiler

log = logging.getLogger(__name__)


class ThreadLink:
    """A `Link`. A core that fails is not made again: it may have left other state of this process wrong."""

    core: EngineCore  # once it has started
    compiler: Compiler

    def __init__(
        self, config: EngineConfig, assemble: Callable[[EngineConfig], EngineParts] | None, listener: Listener
    ) -> None:
        """`assemble` makes the core's parts, if not `engine.builder.build`."""
        self._config = config
        self._assemble = assemble or assemble_default
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[m.Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped: EngineStopped | None = None
        self._end: Callable[[], None] = lambda: None

    @property
    def state(self) -> State:
        return "running" if self._stopped is None else "stopped"

    async def start(self) -> m.Loaded:
        parts = await asyncio.to_thread(self._assemble, self._config)
        self.core, self.compiler, self._end = parts.core, parts.compiler, parts.end
        self.core.post_with(self._commands.put)
        self._thread = threading.Thread(target=self._run, args=(parts.loaded,), name="engine-core", daemon=True)
        self._thread.start()
        return parts.loaded

    def send(self, command: m.Command) -> None:
        self._commands.put(command)

    async def close(self) -> None:
        if self._thread is None:
            return
        self._commands.put(m.Stop())
        await asyncio.to_thread(self._thread.join)
        self.compiler.close()
        await asyncio.to_thread(self._end)

    # -- the core's thread

    def _run(self, loaded: m.Loaded) -> None:
        mail = _Mail(self._commands, lambda replies: self._call(lambda: self._listener.deliver(replies)))
        stopped = EngineStopped("The engine was stopped.")
        try:
            use_threads(loaded.threads, loaded.device)
            drive(self.core, mail)
        except Exception as failure:
            log.exception("the engine's core failed")
            stopped = EngineStopped(f"The engine's core failed: {failure!r}.")
            if isinstance(failure, EngineStopped):  # it says why by itself
                stopped = failure
        finally:
            mail.send(self.core.take_replies())
            self._stopped = stopped
            self._call(lambda: self._listener.ended(stopped))

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.debug("the event loop closed before the engine stopped")


class _Mail:
    """The core's mailbox."""

    def __init__(self, commands: queue.SimpleQueue[m.Command], send: Callable[[list[m.Reply]], None]) -> None:
        self._commands = commands
        self.send = send

    def take(self, timeout_s: float | None) -> Iterator[m.Command]:
        try:
            yield self._commands.get(block=timeout_s != 0, timeout=timeout_s)
            while True:
                yield self._commands.get_nowait()
        except queue.Empty:
            return
