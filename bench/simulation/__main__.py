"""`python -m bench.simulation`: fit the cost of a step on each trace, and hold the simulator to held-out minutes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.parts import Json, measure_parts
from bench.simulation.validation import on_trace

TRACES = ("azure", "mooncake")
LOADS = (0.3, 0.5)  # of the engine's rate with everything at once
PARTS: dict[str, Callable[[], Json]] = {
    f"{name} at {load:.0%}": partial(on_trace, name, load) for name in TRACES for load in LOADS
}


if __name__ == "__main__":
    made = measure_parts("simulation", "The cost of a step, and the simulator against the engine.", PARTS)
    for name in TRACES:
        part = f"{name} at {LOADS[-1]:.0%}"
        if part in made:  # for `ponder simulate --cost`
            Path(f"step-cost-{name}.json").write_text(json.dumps(made[part]["device"], indent=1) + "\n", "utf-8")
