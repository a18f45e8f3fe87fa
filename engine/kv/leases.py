"""How long a sequence that waits for something keeps its K/V: learnt from how long that took before.

A lease ends where nearly all waits for the same thing were over. Holding longer would keep memory from others for the
few that take for ever; what waits for such a thing is given up at once. Knows nothing of blocks or tools.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

REMEMBERED = 64  # waits of a name
NAMES = 1024  # that are remembered; the one not used for longest is forgotten
LEARNT = 8  # waits before they are believed
QUANTILE = 0.95
MARGIN = 1.5  # what a lease is longer than that quantile
LEAST_S = 0.05


class Leases:
    """Waits by the name of what was waited for."""

    def __init__(self) -> None:
        self._waits: OrderedDict[str, deque[float]] = OrderedDict()

    def expected(self, name: str) -> float | None:
        """Seconds within which nearly all waits were over, with a margin; None while too few are known."""
        waits = self._waits.get(name)
        if waits is None or len(waits) < LEARNT:
            return None
        return max(LEAST_S, MARGIN * sorted(waits)[int(QUANTILE * (len(waits) - 1) + 0.5)])

    def lease(self, names: Iterable[str], longest_s: float) -> float:
        """Seconds that K/V is kept for who waits for all of these; 0 where that would take more than `longest_s`."""
        known = [self.expected(name) for name in names]
        if not known or None in known:
            return longest_s
        seconds = max(each for each in known if each is not None)
        return seconds if seconds <= longest_s else 0.0

    def waited(self, names: Iterable[str], seconds: float) -> None:
        """The wait for all of these took so long: that of the slowest did."""
        slowest = max(names, key=lambda name: self.expected(name) or 0.0, default=None)
        if slowest is None:
            return
        waits = self._waits.setdefault(slowest, deque(maxlen=REMEMBERED))
        self._waits.move_to_end(slowest)
        waits.append(seconds)
        if len(self._waits) > NAMES:
            self._waits.popitem(last=False)
