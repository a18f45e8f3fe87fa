"""Seconds that the device takes for a call: by CUDA events there, by a clock elsewhere.

The second-level cache is filled with other things before each repeat, which are read last, so that it has nothing to
write back during the call. That also keeps the device busy while the call is queued, so that the time to launch a
recorded graph does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.model.gpu_runner import Recorded

Call = Callable[[], object]
FLUSHED = 256 << 20  # bytes: several times the second-level cache of any GPU


class Timer(Protocol):
    """Measures time."""

    def times(self, call: Call, repeats: int) -> list[float]:
        """Seconds of each of `repeats` calls, after one that does not count."""
        ...

    def recorded(self, call: Callable[[], Tensor]) -> Call:
        """The call as a graph, where there are graphs."""
        ...

    def now(self) -> float:
        """Seconds by a clock, for work that is not the device's."""
        ...


class CudaTimer:
    """By events of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=device).view(torch.int32)

    def times(self, call: Call, repeats: int) -> list[float]:
        call()
        torch.cuda.synchronize(self._device)
        found = []
        for nth in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flushed.fill_(nth).amax()
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        return found

    def recorded(self, call: Callable[[], Tensor]) -> Call:
        return Recorded(call, self._device).replay

    def now(self) -> float:
        return time.perf_counter()


class ClockTimer:
    """By a clock, where calls are over when they return."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def times(self, call: Call, repeats: int) -> list[float]:
        call()
        found = []
        for _ in range(repeats):
            start = self._clock()
            call()
            found.append(self._clock() - start)
        return found

    def recorded(self, call: Callable[[], Tensor]) -> Call:
        return call

    def now(self) -> float:
        return self._clock()


def timer_for(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else ClockTimer()
