"""The time after which something that nobody touches is given back.

A lease runs while nothing is done; what is under way holds it, and its whole length begins again at the end. Knows
nothing of what it is for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_JUMP_S = 1.0  # of the wall clock, from which on it was set


class Lease:
    """Calls `run_out` once, `length_s` seconds after it was last renewed. Belongs to a running event loop."""

    def __init__(self, length_s: float, run_out: Callable[[], None]) -> None:
        self.length_s = length_s
        self._run_out = run_out
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._expires_at = 0.0  # by the wall clock, as it stood then
        self._ends_at = 0.0  # by the loop's clock, which nobody sets
        self._holders = 0
        self._over = False
        self.renew()

    @property
    def expires_at(self) -> float | None:
        """Time at which it runs out, in seconds since the epoch; None while something holds it."""
        if self._holders:
            return None
        ends_at = time.time() + self._ends_at - self._loop.time()
        return ends_at if abs(ends_at - self._expires_at) > _JUMP_S else self._expires_at

    def renew(self) -> None:
        """Begin anew. Without effect while it is held, or over."""
        self._stop()
        if not self._holders and not self._over:
            self._expires_at = time.time() + self.length_s
            self._ends_at = self._loop.time() + self.length_s
            self._timer = self._loop.call_at(self._ends_at, self._run_out)

    @contextmanager
    def held(self) -> Iterator[None]:
        """It does not run out meanwhile, and begins anew after the last holder."""
        self._holders += 1
        self._stop()
        try:
            yield
        finally:
            self._holders -= 1
            self.renew()

    def end(self) -> None:
        """It never runs out any more. Idempotent."""
        self._over = True
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
