"""The thread that copies between tiers and reads and writes files, so that no step ever waits for them."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

SOON, LATER = 0, 2  # somebody waits for it, or nobody does
_END = 1


class Worker(Protocol):
    """Who runs jobs in another thread, those that are wanted soon first, else in order."""

    def submit(self, urgency: int, job: Callable[[], None]) -> None: ...

    def close(self) -> None:
        """Do what somebody waits for, and end. Other jobs may be left undone."""
        ...


class Here:
    """Runs a job at once, in the thread that asks for it."""

    def submit(self, urgency: int, job: Callable[[], None]) -> None:
        job()

    def close(self) -> None:
        pass


class ThreadWorker:
    """One daemon thread."""

    def __init__(self) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None]]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._thread.start()

    def submit(self, urgency: int, job: Callable[[], None]) -> None:
        self._jobs.put((urgency, next(self._numbers), job))

    def close(self) -> None:
        self._jobs.put((_END, next(self._numbers), self._end))
        self._thread.join()

    def _run(self) -> None:
        while True:
            _, _, job = self._jobs.get()
            if job == self._end:
                return
            try:
                job()
            except Exception:
                log.exception("a copy between K/V tiers failed")

    def _end(self) -> None:
        """Never called: a mark."""
