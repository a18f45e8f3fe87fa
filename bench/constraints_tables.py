"""What automata take, and how long a constraint keeps other threads waiting: `python -m bench.constraints_tables`.

The rest of constraints is measured by constraints.py. With Qwen's 151,936 tokens; takes minutes. Times depend on the
machine and what else it does: compare the columns of one run.
"""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np

from engine.constrain import spec
from engine.constrain.fsm import FiniteStates
from engine.constrain.guidance import Guidance
from engine.constrain.matcher import ConstraintRefused, words
from tests.engine.constrain.sources import guidance, vocabulary
from tests.engine.constrain.test_probe import HARMFUL

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}, "days": {"type": "integer"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TABLES: dict[str, spec.Constraint] = {
    "yes or no": spec.choice(["yes", "no"]),
    "50 choices": spec.choice([f"value number {i}" for i in range(50)]),
    "a date": spec.Regex("[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "an integer": spec.JsonSchema.of({"type": "integer"}),
    "a string": spec.JsonSchema.of({"type": "string"}),
    "a string of 10": spec.JsonSchema.of({"type": "string", "maxLength": 10}),
    "a tool of three": spec.sequence('{"name": "get_weather", "arguments": ', spec.JsonSchema.of(CITY), "}"),
    "any text": spec.Regex("(?s:.*)"),
    "20 letters": spec.Regex(r"\w{1,20}"),
}


def tables() -> None:
    automata = FiniteStates(vocabulary("qwen"))
    automata.compile(spec.Literal("a"))  # starts the process
    row = np.zeros(words(vocabulary("qwen").size), dtype=np.int32)
    for name, constraint in TABLES.items():
        start = time.perf_counter()
        guidance("qwen").compile(constraint)
        other = time.perf_counter() - start
        start = time.perf_counter()
        try:
            table = automata.compile(constraint)
        except ConstraintRefused as refused:
            print(f"{name}: {refused} (llguidance {1e3 * other:.1f} ms)", flush=True)
            continue
        taken = time.perf_counter() - start
        matcher = table.matcher()
        start = time.perf_counter()
        for _ in range(1000):
            matcher.fill(row)
        fill = 1e6 * (time.perf_counter() - start) / 1000
        print(
            f"{name}: table {taken:.2f} s, {len(table.final)} states, {table.size >> 10} KiB, mask {fill:.1f} µs; "
            f"llguidance {1e3 * other:.1f} ms",
            flush=True,
        )
    automata.close()


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
        with contextlib.suppress(ConstraintRefused):  # most are; what it costs the others is measured
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
    tables()
    gaps()
