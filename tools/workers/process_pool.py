"""Processes beside the server for work that may hang, swell or crash: then they are ended, and the server is not.

A worker does one request at a time, within seconds, memory and bytes; one that is late, dead or talks too much is
killed with its children, and the next request gets another. It starts with nothing of the server's: no variables, no
descriptors. It is no sandbox: it is for libraries that are trusted, on data that is not. Knows nothing of the work,
which is a module's function `answer`, from JSON to JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from tools.calling import in_thread
from tools.workers import worker

START_S = 60.0  # to import the modules of the work
_SLACK_S = 5.0  # of the processor, past the limit on the wall's clock: only for a worker that nobody ends any more


class WorkerFailed(RuntimeError):
    """The work was not done. `late`: it took too long; else its process ended, or talked nonsense."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class ProcessPool:
    """Up to `count` processes that do a module's work, started when they are needed. `close` it."""

    def __init__(
        self, module: str, *, timeout_s: float, memory_bytes: int, count: int = 1, reply_bytes: int = 16 << 20,
        requests: int = 500,
    ) -> None:  # fmt: skip
        """`timeout_s` is of each request; `requests` is after how many a worker is replaced, as libraries leak."""
        self._module = module
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._reply_bytes = reply_bytes
        self._requests = requests
        self._turns = threading.Semaphore(count)
        self._lock = threading.Lock()
        self._idle = list[_Worker]()
        self._closed = False

    async def ask(self, request: Any) -> Any:
        """The module's answer, any JSON value. Cancelled, we stop waiting; the worker has its time to end.

        Raises:
            WorkerFailed: it did not answer in time, with so much memory, or at all.
            ValueError: the work itself raised; the message is the error's.
        """
        return await in_thread(lambda: self._asked(request))

    def start(self) -> None:
        """Has one worker ready, so that the first request need not wait. Blocks.

        Raises:
            WorkerFailed: it could not be started.
        """
        with self._turns:
            self._give_back(self._take())

    def close(self) -> None:
        """Ends the workers that wait; those at work end with it."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for each in idle:
            each.end()

    def _asked(self, request: Any) -> Any:
        with self._turns:
            taken = self._take()
            try:
                reply = taken.ask(request, self._timeout_s, self._reply_bytes)
            except BaseException:
                taken.end()
                raise
            self._give_back(taken)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply.get("value")

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise WorkerFailed("the workers are closed")
            if self._idle:
                return self._idle.pop()
        cpu_s = self._timeout_s + _SLACK_S
        return _Worker({"module": self._module, "memory_bytes": self._memory_bytes, "cpu_s": cpu_s})

    def _give_back(self, taken: _Worker) -> None:
        with self._lock:
            if not self._closed and taken.requests < self._requests:
                self._idle.append(taken)
                return
        taken.end()


class _Worker:
    """One process. Every method blocks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """
        Raises:
            WorkerFailed: it could not be started.
        """
        self.requests = 0
        path = [str(Path(each).resolve()) for each in sys.path]
        start = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from tools.workers.worker import main; "
        command = [sys.executable, "-I", "-c", f"{start}main(json.loads(sys.argv[1]))", json.dumps(settings)]
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, env={}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise WorkerFailed(f"its process could not be started: {error}") from None
        # Also when nobody closes it: no process stays, and no zombie.
        self._end = weakref.finalize(self, _ended, self._process)
        if self._within(START_S, lambda: self._out.read(1)) != worker.READY:
            self.end()
            raise WorkerFailed(f"its process did not start: it ended with {self._process.returncode}")

    @property
    def _out(self) -> Any:
        assert self._process.stdout is not None
        return self._process.stdout

    def ask(self, request: Any, timeout_s: float, max_bytes: int) -> dict[str, Any]:
        """
        Raises:
            WorkerFailed: there is no reply.
        """
        self.requests += 1
        message = worker.framed(request)

        def exchanged() -> Any:
            assert self._process.stdin is not None
            self._process.stdin.write(message)
            self._process.stdin.flush()
            return worker.received(self._out, max_bytes)

        try:
            reply = self._within(timeout_s, exchanged)
        except (OSError, ValueError, RecursionError) as error:
            raise WorkerFailed(f"its process ended, or talked nonsense ({error})") from None
        if not isinstance(reply, dict):
            raise WorkerFailed("its process ended without an answer: it may have needed too much memory")
        return reply

    def end(self) -> None:
        self._end()

    def _within(self, seconds: float, wait: Any) -> Any:
        """Returns the result of `wait`, once the process has replied; it is killed when the seconds are over.

        Raises:
            WorkerFailed: the seconds were over.
        """
        late = threading.Event()

        def over() -> None:
            late.set()
            _kill(self._process)

        timer = threading.Timer(seconds, over)
        timer.daemon = True
        timer.start()
        try:
            return wait()
        except (OSError, ValueError):
            if not late.is_set():
                raise
            return None
        finally:
            timer.cancel()
            if late.is_set():
                raise WorkerFailed(f"it took longer than {seconds:g} s", late=True) from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started: it is the first of its session."""
    if process.returncode is None:
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()


def _ended(process: subprocess.Popen[bytes]) -> None:
    _kill(process)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
