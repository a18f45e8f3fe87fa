"""Describes the hardware: a name for the results file, and the memory bandwidth that bounds decoding."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:  # Any: plain JSON
    """Processor, memory, accelerator and versions, as JSON."""
    cuda = torch.cuda.is_available()
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def slug() -> str:
    """A short name of the hardware for file names."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    tiles = "-amx" if torch.cpu._is_amx_tile_supported() else ""
    return f"cpu-{os.cpu_count()}-cores-{torch.backends.cpu.get_cpu_capability().lower()}{tiles}"


def read_bandwidth(gib: float = 0.5, repeats: int = 7) -> float:
    """Bytes a second at which all threads together read memory: the best of several sums over a large tensor."""
    data = torch.ones(int(gib * 2**30 / 4))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
