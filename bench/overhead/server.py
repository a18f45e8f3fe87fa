"""`python -m bench.overhead.server thread|process STEP_S ROWS`: the HTTP server on the null model, until stdin closes.

Prints its port once it accepts connections. It is set up as `ponder serve` sets up its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import cast

import uvicorn

from app.cli.serve import bind
from app.config import load_settings
from app.server import create_app
from app.wire.http_server import server_config
from bench.overhead import null
from engine import Engine, EngineConfig
from engine.config import RunsIn


async def main(where: RunsIn, step_s: str, rows: int) -> None:
    os.environ[null.PACE] = step_s
    config = EngineConfig(str(null.MODEL), max_running=rows, runs_in=where)
    with tempfile.TemporaryDirectory() as data, bind("127.0.0.1", 0) as listener:
        settings = load_settings(None, model=str(null.MODEL), data_dir=Path(data))
        async with await Engine.start(config, null.assemble) as engine:
            app = create_app(engine, settings)
            async with app.router.lifespan_context(app):
                server = uvicorn.Server(server_config(settings, app))
                listener.listen(1024)
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                print(listener.getsockname()[1], flush=True)
                await asyncio.to_thread(sys.stdin.read)
                server.should_exit = True
                await serving


if __name__ == "__main__":
    asyncio.run(main(cast(RunsIn, sys.argv[1]), sys.argv[2], int(sys.argv[3])))
