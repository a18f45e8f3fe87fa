"""An API worker's process: `python -m app.workers.worker`, started by `home.py` and by nobody else.

It reads its start from stdin and then watches it: when that closes, its home is gone, and it ends. Signals that a
terminal or a service manager sends to a whole group are for the home, which says when to end.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading

import msgspec

from app import logs, tracing
from app.config import Settings
from app.models import Models
from app.state import Serving
from app.wire import Giver, OwnOrOthers
from app.wire.server import Server, server_config
from app.workers.answering import create_worker_app
from app.workers.link import HomeLink
from app.workers.own import is_own
from app.workers.talk import LENGTH, Hello, Ready, Start
from engine.core.loop import calm_collector
from engine.ipc.core_process import end_with_parent


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    source = sys.stdin.buffer
    start = msgspec.msgpack.decode(source.read(int.from_bytes(source.read(LENGTH), "big")), type=Start)
    threading.Thread(target=end_with_parent, args=(source.fileno(),), daemon=True).start()
    settings = Settings.model_validate_json(start.settings)
    logs.configure(settings.log_level, settings.log_format)
    stop_tracing = tracing.setup()
    try:
        with socket.socket(fileno=start.listener) as listener:
            asyncio.run(_work(start, settings, listener))
    finally:
        stop_tracing()


async def _work(start: Start, settings: Settings, listener: socket.socket) -> None:
    """From the first word to the home to the last."""
    home = await HomeLink.open(f"{start.directory}/home.sock")
    home.say(Hello(start.client))
    giver = Giver(f"{start.directory}/connections.sock")
    async with await Models.join(settings, start.client, home.places) as models:
        app = create_worker_app(models, settings, home)
        serving: Serving = app.state.ponder
        home.on_draining = serving.drain.begin
        config = server_config(settings, app, OwnOrOthers, is_own=staticmethod(is_own), hand_over=giver.give)
        server = Server(config, ready=lambda: home.say(Ready()))
        calm_collector()
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait({running, home.ended}, return_when=asyncio.FIRST_COMPLETED)
        await models.stop()  # every open stream gets its last event
        server.end()
        await running
        await serving.manners.checkers.close()


if __name__ == "__main__":
    main()
