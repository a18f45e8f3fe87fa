"""Rate limits of a user's calls of a tool: at most N calls in any window of the given length, counted exactly.

A sliding log of the last N times, so no burst slips through at the edge of a window. Knows nothing of the tools, and
takes its clock from outside.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_PERIODS = {"s": 1.0, "min": 60.0, "hour": 3600.0, "day": 86400.0}
_RATE = re.compile(r"([1-9]\d*)/(s|min|hour|day)")
_MAX_COUNT = 10_000  # times kept for a user and tool
_SWEEP = 1_000  # takes between two looks for windows that nobody is in any more


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `count` calls in any `period_s` seconds."""

    count: int
    period_s: float

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Reads "20/min".

        Raises:
            ValueError: it is not a count from 1 to 10000, a slash and one of s, min, hour, day.
        """
        found = _RATE.fullmatch(text)
        if found is None or int(found[1]) > _MAX_COUNT:
            raise ValueError(
                f'{text!r} is not a rate; write a count from 1 to {_MAX_COUNT}, as in "20/min" (s, min, hour, day)'
            )
        return cls(int(found[1]), _PERIODS[found[2]])

    def __str__(self) -> str:
        return f"{self.count}/{next(unit for unit, seconds in _PERIODS.items() if seconds == self.period_s)}"


class RateLimits:
    """The times of the last calls, by user and tool. The clock gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken = dict[tuple[str, str], tuple[Rate, deque[float]]]()
        self._takes = 0

    def take(self, user: str, tool: str, rate: Rate) -> float:
        """Counts a call and returns 0, or counts nothing and returns the seconds to wait."""
        now = self._clock()
        self._takes += 1
        if self._takes % _SWEEP == 0:
            self._sweep(now)
        _, times = self._taken.get((user, tool), (rate, deque[float]()))
        while times and now - times[0] >= rate.period_s:
            times.popleft()
        if len(times) >= rate.count:
            # A tool reloaded with a lower rate may have more calls logged than fit: enough of them must leave.
            return rate.period_s - (now - times[len(times) - rate.count])
        times.append(now)
        self._taken[(user, tool)] = (rate, times)
        return 0.0

    def __len__(self) -> int:
        return len(self._taken)

    def _sweep(self, now: float) -> None:
        for key, (rate, times) in list(self._taken.items()):
            if now - times[-1] >= rate.period_s:
                del self._taken[key]
