"""`python -m tests.e2e.support.real_main KNOBS serve …`: the real server, whose engine a test can slow down, hold and
break.

KNOBS is a file of JSON, read before each step of the engine: `step_s` is how long a step takes at least, `hold` lets it
make none (it still hears commands), `crash` lets it raise. `approval_s` is how long a person has to decide, `sent` a
file that gets a line of JSON, [time, number], for each event as it is handed to the connection, and `idle` one that
gets the time whenever a command leaves the engine with nothing to do. Nothing else differs from `ponder serve`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import app.api.runs
from app.cli.main import main
from app.runs import run_tools
from engine.core.engine_core import EngineCore


class Knobs:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at = 0
        self._values: dict[str, Any] = {}  # JSON

    def get(self, name: str, default: Any = 0) -> Any:
        written_at = self._path.stat().st_mtime_ns
        if written_at != self._read_at:
            self._values, self._read_at = json.loads(self._path.read_text("utf-8")), written_at
        return self._values.get(name, default)


def install(knobs: Knobs) -> None:
    step = EngineCore.step
    handle = EngineCore.handle
    init = run_tools.RunTools.__init__
    sent = app.api.runs._sent

    def paced(core: EngineCore) -> None:
        if knobs.get("crash"):
            raise RuntimeError("a test broke the engine")
        if knobs.get("hold"):
            time.sleep(0.005)
            return
        began = time.perf_counter()
        step(core)
        if core.has_work:
            time.sleep(max(0.0, knobs.get("step_s") - (time.perf_counter() - began)))

    def heard(core: EngineCore, command: Any) -> None:
        worked = core.has_work
        handle(core, command)
        if worked and not core.has_work and (path := knobs.get("idle", "")):
            with Path(path).open("a") as file:
                file.write(f"{time.time()}\n")

    def patient(self: run_tools.RunTools, *args: Any, **options: Any) -> None:
        init(self, *args, **{"wait_s": knobs.get("approval_s", run_tools.WAIT_S), **options})

    async def noted(events: Any) -> AsyncGenerator[Any, None]:
        async for event in sent(events):
            if path := knobs.get("sent", ""):
                with Path(path).open("a") as file:
                    file.write(f"[{time.time()}, {event.id}]\n")
            yield event

    setattr(EngineCore, "step", paced)  # noqa: B010  # methods, to mypy
    setattr(EngineCore, "handle", heard)  # noqa: B010
    setattr(run_tools.RunTools, "__init__", patient)  # noqa: B010
    app.api.runs._sent = noted


if __name__ == "__main__":
    install(Knobs(Path(sys.argv.pop(1))))
    main()
