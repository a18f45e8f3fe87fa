"""What it takes to keep a Python process alive and to end with it: when to start another one, and what both sides do.

Knows nothing of what such a process does.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

MOST_DEATHS = 5  # within `WITHIN_S`: the next one ends it
WITHIN_S = 60.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0


class Deaths:
    """Those of one process and its successors. After too many in a short while what is wrong will not go away."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = deque[float]()

    def __len__(self) -> int:
        """Within the last `WITHIN_S`, at the last one."""
        return len(self._at)

    def pause_s(self) -> float | None:
        """It died: seconds to wait before the next one is started; None when it was one death too many."""
        now = self._clock()
        self._at.append(now)
        while now - self._at[0] > WITHIN_S:
            self._at.popleft()
        if len(self._at) > MOST_DEATHS:
            return None
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 4 ** (len(self._at) - 1))


def environment_of(package: ModuleType) -> Mapping[str, str]:
    """For a child that is to find this package where this process has found it."""
    assert package.__file__ is not None
    beside = str(Path(package.__file__).parent.parent)
    paths = [beside, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def end_with_parent(stdin: int, before: Callable[[], object] = lambda: None) -> None:
    """In a thread of a child: end the process when nobody holds the other end of its stdin any more."""
    while True:
        select.select([stdin], [], [])
        if not os.read(stdin, 1):
            before()
            os._exit(1)
