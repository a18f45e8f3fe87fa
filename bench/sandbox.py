"""Measures how fast a sandbox is: `python -m bench.sandbox`. From asking to the code's first line, and to its result.

The code's first line reads the machine's monotonic clock, which a sandbox shares with its server, so the way there is
one difference of two readings. A warm start finds a sandbox waiting; a cold one makes it first. Runs follow each other
at once for the throughput; for the warm starts each waits until the next sandbox is up, as between two turns of a
model.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from bench import hardware, report
from tools.sandbox import Pure, Sandbox, SandboxConfig, check
from tools.sandbox.sandbox_process import SandboxProcess

_FIRST_LINE = "import time as t; at = t.clock_gettime_ns(t.CLOCK_MONOTONIC)\nat"


async def measure(runs: int) -> dict[str, Any]:  # Any: plain JSON
    """All figures, times in milliseconds; refused where there can be no sandbox."""
    before = os.getloadavg()
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
        "date": datetime.date.today().isoformat(),
        "command": f"python -m bench.sandbox --runs {runs}",
        "slug": f"sandbox-{hardware.slug()}",
        "hardware": hardware.describe(),
        "load": {"before": before, "after": os.getloadavg()},
        "runs": runs,
        "warm_start_to_first_line_ms": spread(first_line),
        "warm_run_until_all_is_removed_ms": spread(result),
        "cold_start_until_ready_ms": spread(cold),
        "pure_run_ms": spread(await _pure(runs)),
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
            process = await SandboxProcess.start(sandbox._plan, thread)
            times.append((time.perf_counter() - started) * 1e3)
            await process.discard()
    return times


async def _pure(runs: int) -> list[float]:
    times = list[float]()
    async with await Pure.open() as pure:
        for _ in range(runs):
            started = time.perf_counter()
            await pure.run("1")
            times.append((time.perf_counter() - started) * 1e3)
    return times


def spread(times: list[float]) -> dict[str, float]:
    """The percentiles of ten times or more."""
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
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results")
    given = parser.parse_args()
    if given.runs < 10:
        parser.error(f"--runs is {given.runs}; accepted: 10 and more, for a spread to mean something.")
    results = asyncio.run(measure(given.runs))
    print(json.dumps(results, indent=1))
    if given.write:
        print(f"Kept in {report.save(results).relative_to(report.ROOT)}.")


if __name__ == "__main__":
    main()
