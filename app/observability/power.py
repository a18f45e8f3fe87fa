"""The machine's power in watts, measured or configured, never guessed.

Linux tells the energy of a CPU's packages and memory under `/sys/class/powercap` (RAPL, Intel and AMD), to root alone
by default, and NVIDIA's driver that of its GPUs (NVML, `nvidia-ml-py`). Neither knows of disks or of the power supply's
losses. RAPL knows nothing of a GPU, so a server on one whose driver tells nothing is not measured.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

log = logging.getLogger("ponder")

POWERCAP = Path("/sys/class/powercap")
WINDOW_S = 300.0
_MAX_GAP_S = 600.0  # a counter wraps within an hour at 70 W: a longer gap may hide it
_MIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Power:
    """`watts` over the last five minutes at most; `source` says where from, and what is in it: `power_watts` of the
    settings, RAPL's CPU and memory, NVML's GPUs, or both."""

    watts: float
    source: Literal["power_watts", "rapl", "nvml", "rapl+nvml"]


class GpuCounters:
    """Energy that each of the machine's NVIDIA GPUs took since its driver was loaded, by NVML (Volta and newer)."""

    def __init__(self, library: Any) -> None:  # Any: `pynvml`, which has no types
        """
        Raises:
            library.NVMLError: there is no driver, or one of the GPUs has no counter.
        """
        self._library = library
        library.nvmlInit()
        self._handles = [library.nvmlDeviceGetHandleByIndex(at) for at in range(library.nvmlDeviceGetCount())]
        self._read()

    def _read(self) -> list[int]:
        return [1000 * int(self._library.nvmlDeviceGetTotalEnergyConsumption(each)) for each in self._handles]

    def energies_uj(self) -> list[int] | None:
        """Returns microjoules by GPU; None where the driver does not answer any more."""
        try:
            return self._read()
        except self._library.NVMLError:
            return None


def gpu_counters() -> GpuCounters | None:
    """Returns the counters of this machine's GPUs; None where they cannot be read, and logs why."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        log.info("The GPUs' energy is not measured: nvidia-ml-py is not installed (pip install 'ponder[nvml]').")
        return None
    try:
        return GpuCounters(library)
    except library.NVMLError as error:
        log.warning("The GPUs' energy is not measured, as NVML says: %s. power_watts sets the machine's power.", error)
        return None


class PowerMeter:
    """`configured` watts stand for the machine; without them counters of CPU and GPUs do, where they can be read."""

    def __init__(
        self,
        configured: float | None,
        *,
        measure: bool = True,
        gpus: GpuCounters | None = None,
        folder: Path = POWERCAP,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`measure`: the counters tell all that computes; not so on a GPU without any."""
        self._configured = configured
        self._now = now
        self._zones = _zones(folder) if measure and configured is None else []
        self._gpus = gpus if measure and configured is None else None
        self._seen = deque[tuple[float, float]]()  # seconds, and joules since the first look
        self._last: list[int] | None = None
        self._cpu = 0  # of the last look's counters, those of RAPL
        self.power()

    def power(self) -> Power | None:
        """Returns the power now; None where nothing is known, or not yet."""
        if self._configured is not None:
            return Power(self._configured, "power_watts")
        self._look()
        if len(self._seen) < 2:
            return None
        (began, before), (ended, after) = self._seen[0], self._seen[-1]
        return Power((after - before) / (ended - began), self._source) if ended - began >= _MIN_S else None

    @property
    def _source(self) -> Literal["rapl", "nvml", "rapl+nvml"]:
        if self._gpus is None:
            return "rapl"
        return "rapl+nvml" if self._cpu else "nvml"

    def _reloaded(self, energies: list[int], last: list[int]) -> bool:
        """Returns whether a GPU's driver was loaded again: its counter is lower, and never wraps."""
        return any(new < old for new, old in zip(energies[self._cpu :], last[self._cpu :], strict=True))

    def _late(self, now: float) -> bool:
        return bool(self._seen) and now - self._seen[-1][0] > _MAX_GAP_S

    def _cpu_energies(self) -> list[int]:
        try:
            return [int((zone / "energy_uj").read_text(encoding="ascii")) for zone, _ in self._zones]
        except (OSError, ValueError):
            return []

    def _look(self) -> None:
        energies, on_gpus = self._cpu_energies(), [] if self._gpus is None else self._gpus.energies_uj()
        now, last = self._now(), self._last
        cpu, self._cpu = self._cpu, len(energies)
        self._last = energies = [] if on_gpus is None else [*energies, *on_gpus]
        if not energies:
            return self._seen.clear()
        others = last is None or len(last) != len(energies) or cpu != self._cpu
        if last is None or others or self._reloaded(energies, last) or self._late(now):
            self._seen.clear()
            return self._seen.append((now, 0.0))
        ranges = [most + 1 for _, most in self._zones[: self._cpu]] + [1 << 64] * len(energies[self._cpu :])
        spent = sum((new - old) % wraps for new, old, wraps in zip(energies, last, ranges, strict=True)) / 1e6
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
