"""Seconds since the epoch that do not jump: the wall clock as it was at the start, and the time that has passed since.

For what waits or is kept for a while: setting the machine's clock neither ends such a time nor prolongs it. What stands
for a date (a key's expiry, the day of a quota, a message's time) follows the wall clock.
"""

from __future__ import annotations

import time

_STARTED = time.time() - time.monotonic()


def steady() -> float:
    """Now, in seconds since the epoch by the clock that the process started with."""
    return _STARTED + time.monotonic()
