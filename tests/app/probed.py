"""`ponder serve`, with a probe in its event loop: `python -m tests.app.probed --port 0 …`.

`GET /probe` tells the longest time that the loop stood still since it was asked last. What counts is the lesser of how
late the loop was and how much the process computed meanwhile, so that a busy machine is not taken for a busy server.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import app.server
from app.cli.main import main

STEP_S = 0.005
PATH = "/probe"


class Probe:
    """The longest stall since `take`."""

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def take(self, request: Request) -> JSONResponse:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="probe")
        worst_s, self._worst_s = self._worst_s, 0.0
        return JSONResponse({"stall_s": worst_s})

    async def _watch(self) -> None:
        while True:
            wall, used = time.perf_counter(), time.process_time()
            await asyncio.sleep(STEP_S)
            late_s = time.perf_counter() - wall - STEP_S
            self._worst_s = max(self._worst_s, min(late_s, time.process_time() - used))


def probed(*arguments: Any, **named: Any) -> Any:  # as create_app, whatever it takes
    made = create(*arguments, **named)
    made.router.routes.insert(0, Route(PATH, Probe().take))
    return made


if __name__ == "__main__":
    create = app.server.create_app
    app.server.create_app = probed
    main()
