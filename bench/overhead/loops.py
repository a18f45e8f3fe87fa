"""The two loops on a device that takes its time and leaves the processor free meanwhile, as a GPU does."""

from __future__ import annotations

import statistics
import time
from typing import Any, get_args
from unittest import mock

from bench.overhead.null import NullRunner, QueuedRunner
from bench.overhead.steps import filled
from engine.config import LoopName
from engine.core.async_steps import InFlightSteps
from engine.core.loop import calm_collector
from engine.ipc.wire import encode_replies
from engine.params import GREEDY


def loops(rows: int, step_s: float, steps: int) -> dict[str, Any]:
    """Median seconds from one step to the next, replies made and encoded as for another process, on each loop: of a
    device that does a step when it is asked, and of one that is told of steps ahead of time (`waiting`: of each only
    once the tokens of the one before are known)."""
    told: dict[str, Any] = {"rows": rows, "device_step_s": step_s}
    for loop in get_args(LoopName):
        told[loop] = {
            "step_s": _period(rows, step_s, steps, loop, NullRunner),
            "queued_step_s": _period(rows, step_s, steps, loop, QueuedRunner),
        }
    with mock.patch.object(InFlightSteps, "follow", lambda self: False):
        told["overlapped"]["waiting_step_s"] = _period(rows, step_s, steps, "overlapped", QueuedRunner)
    told["saved"] = 1 - told["overlapped"]["step_s"] / told["plain"]["step_s"]
    told["queued_saved"] = 1 - told["overlapped"]["queued_step_s"] / told["plain"]["queued_step_s"]
    return told


def _period(rows: int, step_s: float, steps: int, loop: LoopName, device: type[NullRunner]) -> float:
    core = filled(rows, GREEDY, step_s=step_s, loop=loop, device=device)
    runner = core._steps.runner
    assert isinstance(runner, NullRunner)
    with runner.fetched():
        while core.stats().last_batch < rows or core.stats().waiting:
            core.step()
            core.take_replies()
        calm_collector()
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            core.step()
            encode_replies([*core.take_replies()])
            seconds.append(time.perf_counter() - start)
        core.settle()
    core.close()
    return statistics.median(seconds)
