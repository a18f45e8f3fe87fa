"""An engine whose steps are recorded: what each had, and how long it took with all that the host does beside it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from torch import Tensor

from app.simulation.cost_model import StepLoad
from bench.load.drive import PEBBLE, drive
from bench.load.workload import TraceRequest
from engine import Engine, EngineConfig
from engine.builder import EngineParts, build
from engine.core.step import Step

StepSample = tuple[StepLoad, float]


def load_of(step: Step) -> StepLoad:
    """Returns what a step's cost goes by."""
    reads = [(row.start, row.count) for row in step.rows if row.count > 1]
    decodes = [row.start + 1 for row in step.rows if row.count == 1]
    pairs = sum(count * start + count * (count + 1) // 2 for start, count in reads)
    return StepLoad(sum(count for _, count in reads), len(decodes), sum(decodes), pairs)


class RecordedSteps:
    """Records the steps of an engine that `assemble` makes. A step's seconds are from the end of the one before where
    that left work, else from its own begin: commands, replies and their readers are in them."""

    def __init__(self) -> None:
        self.samples: list[StepSample] = []

    def assemble(self, config: EngineConfig) -> EngineParts:
        parts = build(config)
        core, runner = parts.core, parts.core._steps.runner
        run_step, run_rows = core.step, runner.run
        loads: list[StepLoad] = []
        ended: float | None = None  # when the last step ended, if it left work

        def run(step: Step) -> Tensor:
            loads.append(load_of(step))
            return run_rows(step)

        def step() -> None:
            nonlocal ended
            began = time.perf_counter()
            run_step()
            now = time.perf_counter()
            if loads:
                self.samples.append((loads.pop(), now - (began if ended is None else ended)))
            ended = now if core.has_work else None

        setattr(core, "step", step)  # noqa: B010  # of this core alone
        setattr(runner, "run", run)  # noqa: B010
        return parts


@asynccontextmanager
async def recorded(**options: Any) -> AsyncIterator[tuple[Engine, RecordedSteps]]:  # Any: fields of EngineConfig
    """An engine of the bundled model, warm, and the recorder of its steps since then."""
    recorder = RecordedSteps()
    config = EngineConfig(str(PEBBLE), loop="plain", **options)
    async with await Engine.start(config, assemble=recorder.assemble) as engine:
        await drive(engine, [TraceRequest(0.0, tuple(range(10, 10 + 40 * (at + 1))), 8) for at in range(8)])
        recorder.samples.clear()
        yield engine, recorder
