"""Longest wait of another thread while a constraint is compiled: `python -m bench.constraints.gil_gaps`.

The rest of constraints is measured by constraints.py. With Qwen's 151,936 tokens; takes minutes.
"""

from __future__ import annotations

import contextlib
import threading
import time

from engine.structured_output import spec
from engine.structured_output.llguidance_backend import Guidance
from engine.structured_output.matcher import ConstraintRefused
from tests.engine.structured_output.sources import guidance
from tests.engine.structured_output.test_probe import HARMFUL


def gaps() -> None:
    """The longest time for which another thread of this process did not get on while a bomb was compiled."""
    backend = guidance("qwen")
    for name, constraint in HARMFUL.items():
        backend.prepare(constraint)
        print(f"{name}: {1e3 * longest_gap(backend, constraint):.0f} ms", flush=True)


def longest_gap(backend: Guidance, constraint: spec.Constraint) -> float:
    """Seconds, seen by a thread that does next to nothing."""
    done = threading.Event()

    def compile() -> None:
        with contextlib.suppress(ConstraintRefused):  # most are; the cost to the others is measured
            backend.compile(constraint)
        done.set()

    worker = threading.Thread(target=compile)
    longest, before = 0.0, time.perf_counter()
    worker.start()
    while not done.wait(0.001):
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    worker.join()
    return longest


if __name__ == "__main__":
    gaps()
