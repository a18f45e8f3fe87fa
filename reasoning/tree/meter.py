"""The meter of a search, limits and spending: tokens, seconds, and jobs that run at once.

Tokens are set aside before a job begins, so jobs that run side by side stay within the limit together; at the deadline
the rest is cancelled. Knows nothing of states.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ponder import ContextLengthExceeded, DeadlineExceeded
from reasoning.tree.nodes import Ended

T = TypeVar("T")


class Meter:
    """`written` and `read` count the tokens that the model wrote, and those of prompts; `ended` is a limit's name."""

    def __init__(self, tokens: int | None, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.written = self.read = 0
        self.ended: Ended | None = None
        self._tokens, self._limit_s = tokens, seconds
        self._clock = clock
        self._began = clock()
        self._aside = 0

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    @property
    def over(self) -> bool:
        """Returns whether a limit was reached."""
        if self._limit_s is not None and self.seconds >= self._limit_s:
            self.reach("seconds")
        return self.ended is not None

    def reach(self, limit: Ended) -> None:
        """A limit was reached; the first one counts."""
        self.ended = self.ended or limit

    @contextmanager
    def aside(self, read: int, written: int) -> Iterator[bool]:
        """Set tokens aside for a job, and count its prompt of `read` tokens; False where there are too few left.

        The job itself counts its written tokens.
        """
        most = read + written
        if self._tokens is not None and self.written + self.read + self._aside + most > self._tokens:
            self.reach("tokens")
            yield False
            return
        self._aside += most
        try:
            yield True
            self.read += read
        finally:
            self._aside -= most

    async def together(self, jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T | ContextLengthExceeded | None]:
        """Run jobs as one batch. Results in their order; None for a job that the deadline, of the search or of the
        request, cut off.

        Raises the error of the first failing job, once none of them runs any more.
        """
        tasks = [asyncio.ensure_future(job) for job in jobs]
        if not tasks:
            return []
        try:
            left = None if self._limit_s is None else max(0.0, self._limit_s - self.seconds)
            _, late = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            if any(not task.done() for task in late) and not any(map(_failure, tasks)):
                self.reach("seconds")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if failure := next(filter(None, map(_failure, tasks)), None):
            raise failure
        if any(map(_late, tasks)):
            self.reach("seconds")
        return [_result(task) for task in tasks]


def _result(task: asyncio.Task[T]) -> T | ContextLengthExceeded | None:
    if task.cancelled() or _late(task):
        return None
    error = task.exception()
    return error if isinstance(error, ContextLengthExceeded) else task.result()


def _failure(task: asyncio.Task[T]) -> BaseException | None:
    """Returns why a job failed; one that does not fit the context, or the request's time, has not."""
    error = task.exception() if task.done() and not task.cancelled() else None
    return None if isinstance(error, ContextLengthExceeded | DeadlineExceeded) else error


def _late(task: asyncio.Task[T]) -> bool:
    return task.done() and not task.cancelled() and isinstance(task.exception(), DeadlineExceeded)
