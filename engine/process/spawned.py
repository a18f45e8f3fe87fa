"""One life of a core's process, seen from outside: started, spoken to over a socket, and found dead when it is.

Sockets lie in a directory that only this user can enter. Knows nothing of what is said, nor of starting it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

import msgspec

import engine
from engine import messages as m
from engine.config import EngineConfig
from engine.errors import EngineStopped
from engine.process.keeping import environment_of
from engine.process.line import Line
from engine.process.meeting import Start

_STOP_S = 10.0  # from being told to stop to being killed

log = logging.getLogger(__name__)


class Spawned:
    """A core's process, whose sockets lie in `directory`. `hear` gets the replies, `died` how it ended, each on the
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
        self._process = _popen(Start(config, assemble, self.directory, logging.getLogger().getEffectiveLevel()))
        self._line = Line(self.directory, 0, hear)
        threading.Thread(target=self._wait, name="engine-process", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def loaded(self) -> m.Loaded:
        """What the core says once it can run.

        Raises:
            EngineError: why it cannot; `EngineStopped` when the process ended without a word.
        """
        return await self._line.loaded()

    def send(self, command: m.Command) -> None:
        self._line.send(command)

    def kill(self) -> None:
        """At once; `died` is told."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self) -> None:
        """Ask it to end, and kill it if it does not. Returns when it is gone and nothing is left of it."""
        if not self._gone.is_set():
            self._line.send(m.Stop())
            try:
                await asyncio.wait_for(self._gone.wait(), _STOP_S)
            except TimeoutError:
                self.kill()
                await self._gone.wait()

    # -- parts

    def _wait(self) -> None:
        """In a thread of its own."""
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self._end, code)

    def _end(self, code: int) -> None:
        self._line.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        self._line.fail(EngineStopped(f"The engine's process ended {how} before it was ready."))
        self._gone.set()
        self._died(how)


def _popen(start: Start) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.process.child"], stdin=subprocess.PIPE, env=environment_of(engine)
    )
    data = msgspec.msgpack.encode(start)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died already: whoever waits for it is told
        process.stdin.write(len(data).to_bytes(4, "big") + data)
        process.stdin.flush()
    return process
