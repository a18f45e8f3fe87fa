"""`python -m bench.simulation`: fit the cost of a step on each trace, and hold the simulator to held-out minutes; and
compare orders of requests by predicted lengths, on the virtual clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.load.workload import AZURE, MOONCAKE
from bench.parts import Json, measure_parts
from bench.simulation.predicted_lengths import compared
from bench.simulation.validation import on_trace

TRACES = ("azure", "mooncake")
LOADS = (0.3, 0.5)  # of the engine's rate with everything at once
PARTS: Mapping[str, Callable[[], Json]] = {
    f"{name} at {load:.0%}": partial(on_trace, name, load) for name in TRACES for load in LOADS
} | {
    "lengths on azure": partial(compared, AZURE, rate=24.0, places=256, block_size=64, size=2000),
    "lengths on mooncake": partial(compared, MOONCAKE, rate=0.9, places=64, block_size=512, size=600),
}  # fmt: skip


if __name__ == "__main__":
    made = measure_parts("simulation", "The cost of a step, and the simulator against the engine.", PARTS)
    for name in TRACES:
        part = f"{name} at {LOADS[-1]:.0%}"
        if part in made:  # for `ponder simulate --cost`
            Path(f"step-cost-{name}.json").write_text(json.dumps(made[part]["device"], indent=1) + "\n", "utf-8")
