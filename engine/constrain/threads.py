"""Threads that compile: with a stack of known size, and where it is asked for behind everything else.

Knows nothing of constraints.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 8 << 20  # twice what a constraint may take where it is tried (probe_process)
_ASIDE = 10  # of niceness: about a tenth of a busy processor
_starting = threading.Lock()  # the size of a stack is set for all threads that start meanwhile


def start(run: Callable[..., None], *arguments: object) -> None:
    """Run it in a thread that does not keep the process alive."""
    thread = threading.Thread(target=run, args=arguments, name="constraint", daemon=True)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


def aside(run: Callable[[], T]) -> T:
    """What `run` returns or raises, run in a thread that lets all others go first: for long calls that do not hold
    Python's lock. Elsewhere than on Linux a thread has no priority of its own, and it is a thread like any other."""
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
