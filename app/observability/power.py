"""The machine's power in watts, measured or configured, never guessed.

Linux tells the energy of a CPU's packages and memory under `/sys/class/powercap` (RAPL, Intel and AMD), to root alone
by default. It knows nothing of a GPU, of disks or of the power supply's losses, so a server on a GPU is not measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

POWERCAP = Path("/sys/class/powercap")
WINDOW_S = 300.0
_MAX_GAP_S = 600.0  # a counter wraps within an hour at 70 W: a longer gap may hide it
_MIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Power:
    """`watts` over the last five minutes at most; `source` says where from, and what is in it: `power_watts` of the
    settings, or RAPL's CPU and memory."""

    watts: float
    source: Literal["power_watts", "rapl"]


class PowerMeter:
    """`configured` watts stand for the machine; without them RAPL's counters do, where they can be read."""

    def __init__(
        self,
        configured: float | None,
        *,
        measure: bool = True,
        folder: Path = POWERCAP,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`measure`: RAPL tells all that computes; not so on a GPU."""
        self._configured = configured
        self._now = now
        self._zones = _zones(folder) if measure and configured is None else []
        self._seen = deque[tuple[float, float]]()  # seconds, and joules since the first look
        self._last: list[int] | None = None
        self.power()

    def power(self) -> Power | None:
        """Returns the power now; None where nothing is known, or not yet."""
        if self._configured is not None:
            return Power(self._configured, "power_watts")
        self._look()
        if len(self._seen) < 2:
            return None
        (began, before), (ended, after) = self._seen[0], self._seen[-1]
        return Power((after - before) / (ended - began), "rapl") if ended - began >= _MIN_S else None

    def _look(self) -> None:
        try:
            energies = [int((zone / "energy_uj").read_text(encoding="ascii")) for zone, _ in self._zones]
        except (OSError, ValueError):
            energies = []
        now, last = self._now(), self._last
        self._last = energies
        if not energies:
            return self._seen.clear()
        if last is None or len(last) != len(energies) or (self._seen and now - self._seen[-1][0] > _MAX_GAP_S):
            self._seen.clear()
            return self._seen.append((now, 0.0))
        pairs = zip(energies, last, self._zones, strict=True)
        spent = sum((new - old) % (most + 1) for new, old, (_, most) in pairs) / 1e6
        if now > self._seen[-1][0]:
            self._seen.append((now, self._seen[-1][1] + spent))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        return None


def _zones(folder: Path) -> list[tuple[Path, int]]:
    """Returns the counters of packages and of memory beside them, each with its largest value. Others are in these, or,
    as a platform's, have them within."""
    found = []
    for zone in sorted(folder.glob("*-rapl:*")):
        try:
            name = (zone / "name").read_text(encoding="ascii").strip()
            if name.startswith("package-") or name == "dram":
                found.append((zone, int((zone / "max_energy_range_uj").read_text(encoding="ascii"))))
        except (OSError, ValueError):
            continue
    return found
