"""How fast a sandbox is: `python -m bench.sandbox`. From asking to the code's first line, and to its result.

The code's first line reads the machine's monotonic clock, which a jail shares with its server, so the way there is one
difference of two readings. A warm start finds a jail waiting; a cold one makes it first. Runs follow each other at
once for the throughput; for the warm starts each waits until the next jail is up, as between two turns of a model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from bench import hardware
from tools.sandbox import Pure, Sandbox, SandboxConfig, check
from tools.sandbox.jail import Jail

_FIRST_LINE = "import time as t; at = t.clock_gettime_ns(t.CLOCK_MONOTONIC)\nat"


async def measure(runs: int) -> dict[str, Any]:  # Any: plain JSON
    """All figures, times in milliseconds; refused where there can be no jail."""
    support = await check()
    if not support.ok:
        raise SystemExit("There is nothing to measure: " + " ".join(support.reasons))
    config = SandboxConfig()
    async with await Sandbox.open(config) as sandbox:
        first_line, result = await _warm(sandbox, runs)
        cold = await _cold(sandbox, max(5, runs // 5))
        started = time.perf_counter()
        for _ in range(runs):
            await sandbox.run("1")
        in_a_row = runs / (time.perf_counter() - started)
    async with await Sandbox.open(replace(config, warm=4)) as sandbox:
        started = time.perf_counter()
        await asyncio.gather(*(sandbox.run("1") for _ in range(runs)))
        at_once = runs / (time.perf_counter() - started)
    return {
        "hardware": hardware.describe(),
        "runs": runs,
        "warm_start_to_first_line_ms": _spread(first_line),
        "warm_run_until_all_is_removed_ms": _spread(result),
        "cold_start_until_ready_ms": _spread(cold),
        "pure_run_ms": _spread(await _pure(runs)),
        "runs_a_second_one_after_another": round(in_a_row, 1),
        "runs_a_second_four_at_once": round(at_once, 1),
        "notes": list(support.notes),
    }


async def _warm(sandbox: Sandbox, runs: int) -> tuple[list[float], list[float]]:
    first_line, result = list[float](), list[float]()
    for number in range(runs + 5):
        await asyncio.gather(*sandbox._warm)
        asked = time.monotonic_ns()
        finished = await sandbox.run(_FIRST_LINE)
        done = time.monotonic_ns()
        if number >= 5:  # the first ones find cold caches
            first_line.append((int(finished.value or 0) - asked) / 1e6)
            result.append((done - asked) / 1e6)
    return first_line, result


async def _cold(sandbox: Sandbox, runs: int) -> list[float]:
    times = list[float]()
    with ThreadPoolExecutor(1) as thread:
        for _ in range(runs):
            started = time.perf_counter()
            jail = await Jail.start(sandbox._plan, thread)
            times.append((time.perf_counter() - started) * 1e3)
            await jail.discard()
    return times


async def _pure(runs: int) -> list[float]:
    times = list[float]()
    async with await Pure.open() as pure:
        for _ in range(runs):
            started = time.perf_counter()
            await pure.run("1")
            times.append((time.perf_counter() - started) * 1e3)
    return times


def _spread(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {
        "p50": round(cuts[49], 2),
        "p90": round(cuts[89], 2),
        "p99": round(cuts[98], 2),
        "max": round(max(times), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="of each kind")
    given = parser.parse_args()
    if given.runs < 10:
        parser.error(f"--runs is {given.runs}; accepted: 10 and more, for a spread to mean something.")
    print(json.dumps(asyncio.run(measure(given.runs)), indent=2))


if __name__ == "__main__":
    main()
