"""A time limit that can pause, because a person's thinking is not the tool's slowness."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class Deadline:
    """A context manager; `over` is done when the seconds have run out between its entry and its exit."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._pauses = 0

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self.over.cancel()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time within does not count; pauses may overlap."""
        self._pauses += 1
        self._stop()
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0 and not self.over.done():
                self._start()

    def _start(self) -> None:
        self._timer = self._loop.call_later(self._left_s, self._expire)

    def _stop(self) -> None:
        if self._timer is not None:
            self._left_s = max(0.0, self._timer.when() - self._loop.time())
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
