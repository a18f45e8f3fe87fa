"""Compiles constraints that may be harmful in a sandboxed process first.

llguidance overflows the stack on some grammars, and nothing can stop it while it compiles. So one process
(`compile_process`) holds the vocabulary and forks for every constraint: a fork writes it in llguidance's Lark, compiles
it and makes some masks, within limits of time, memory and stack. It returns the Lark source, which this process can
then compile without surprises, or the reason of a refusal. Threads that compile here have a stack of known size, and
with `aside` a low priority.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from engine.structured_output.matcher import CompileTimeout, ConstraintRefused
from engine.structured_output.spec import Constraint
from engine.structured_output.vocabulary import Vocabulary


class SandboxedCompile:
    """Thread-safe; constraints are tried side by side. The process starts with `start`, or with the first of them."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        deadline_s: float = 2.0,
        memory_bytes: int = 2 << 30,
        load_s: float = 0.3,
        mask_s: float = 0.008,
    ) -> None:
        """At most `memory_bytes` of addresses; of processor time at most `load_s` to compile the Lark source, as the
        engine's process will do beside its steps, and `mask_s` for a mask, at the median."""
        self._vocabulary = vocabulary
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes
        self._load_s = load_s
        self._mask_s = mask_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False
        self.started = 0  # processes, since this was made

    def start(self) -> None:
        """Have the process ready: a second or two for 150,000 tokens, which counts against no constraint.

        Raises:
            ConstraintRefused: it could not start, or the engine is stopping.
        """
        with self._lock:
            self._running()

    def lark(self, constraint: Constraint) -> str:
        """Returns the constraint in llguidance's Lark, which compiles in bounded time and memory.

        Raises:
            ConstraintRefused: it cannot be enforced, or the process ended because of it.
        """
        with self._lock:
            job = self._sent(self._running())
        try:
            answer = _exchanged(job, constraint)
        except (OSError, EOFError, pickle.UnpicklingError):
            if self._closed:
                raise ConstraintRefused(_STOPPED) from None
            raise CompileTimeout("the process that tries constraints died; try again in some seconds") from None
        if isinstance(answer, str):
            return answer
        if isinstance(answer, int):
            raise self._died(answer)
        raise ConstraintRefused(answer)

    def close(self) -> None:
        """Ends the process and all its trials. Nothing is tried after that."""
        self._closed = True
        with self._lock:
            self._kill()

    # -- with the lock held

    def _running(self) -> socket.socket:
        if self._closed:
            raise ConstraintRefused(_STOPPED)
        if self._control is None or self._process is None or self._process.poll() is not None:
            self._kill()
            self._begin()
        assert self._control is not None
        return self._control

    def _begin(self) -> None:
        script = Path(__file__).with_name("compile_process.py")
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script)],  # -P: our modules beside the script are not its library
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # its forks are ended together with it; a session of its own would have its own
                # share of the processors at any niceness (Linux's autogroups)
            )
        self.started += 1
        known = (self._vocabulary.tokens, self._vocabulary.eos)
        try:
            _exchanged(
                self._sent(self._control), (known, self._deadline_s, self._memory_bytes, self._load_s, self._mask_s)
            )
        except (OSError, EOFError, pickle.UnpicklingError):
            self._kill()
            raise CompileTimeout("the process that tries constraints could not start; try again later") from None

    def _sent(self, control: socket.socket) -> socket.socket:
        """Returns a connection to the process, which has the other end."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # a process that is gone shows by the missing reply
            socket.send_fds(control, [b"j"], [theirs.fileno()])
        return ours

    def _kill(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._control = self._process = None

    # --

    def _died(self, number: int) -> ConstraintRefused:
        match number:
            case signal.SIGALRM:
                return CompileTimeout(f"compiling it takes longer than {self._deadline_s:g} s")
            case signal.SIGSEGV | signal.SIGBUS:
                reason = "the compiler overflowed its stack on it: too deeply nested, or an integer below -2^63 + 2"
                return ConstraintRefused([reason])
            case signal.SIGABRT:
                return ConstraintRefused([f"compiling it takes more than {self._memory_bytes >> 20} MiB of memory"])
        return CompileTimeout(f"the process that compiled it was ended by {signal.Signals(number).name}")


_STOPPED = ["the engine is stopping"]


def _exchanged(job: socket.socket, message: object) -> Any:
    """Any: the process's answer. One that is cut off raises `EOFError` or `UnpicklingError`."""
    with job, job.makefile("rwb") as stream:
        pickle.dump(message, stream)
        stream.flush()
        return pickle.load(stream)


T = TypeVar("T")

STACK_BYTES = 8 << 20  # twice the limit of a constraint in its trial (compile_process)
_ASIDE = 10  # of niceness: about a tenth of a busy processor
_starting = threading.Lock()  # the size of a stack is set for all threads that start meanwhile


def start(run: Callable[..., None], *arguments: object) -> None:
    """Runs it in a thread that does not keep the process alive."""
    thread = threading.Thread(target=run, args=arguments, name="constraint", daemon=True)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


def aside(run: Callable[[], T]) -> T:
    """Runs `run` in a thread that lets all others go first, and returns or raises as it does: for long calls that do
    not hold Python's lock. Elsewhere than on Linux a thread has no priority of its own, and it is a thread like any
    other."""
    outcome: Future[T] = Future()

    def go() -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _ASIDE)
        try:
            outcome.set_result(run())
        except BaseException as error:
            outcome.set_exception(error)

    start(go)
    return outcome.result()
