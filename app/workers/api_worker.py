"""An API worker: a process that accepts from the shared socket and answers its own routes.

Started only by `app/workers/primary.py`, as `python -m app.workers.api_worker`. It answers the routes of `/v1` that
need the engines and nothing that is kept, after the primary has admitted the request; all others it hands over. It
reads its start from stdin and then watches it: when stdin closes, the primary is gone, and the worker ends. It ignores
the signals that a terminal or a service manager sends to the whole group, because the primary says when to end.
"""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
import threading

import msgspec
from fastapi import FastAPI

from app import errors, openai
from app.answering.model_registry import ModelRegistry
from app.answering.reasoning_config import ReasoningResolver
from app.answering.tool_selection import ToolSelector
from app.anthropic.routes import router as anthropic_router
from app.config import Settings
from app.connections import Drain, DrainMiddleware
from app.middleware import add_middleware
from app.observability import logs, tracing
from app.observability.metrics import Goals
from app.state import Serving
from app.wire import ConnectionSender, OwnOrOthers
from app.wire.http_server import Server, server_config
from app.workers.primary_client import PrimaryClient, PrimaryLink
from app.workers.worker_metrics import RemoteMetrics
from app.workers.worker_protocol import LENGTH, Start, WorkerHello, WorkerReady
from engine.child_process import end_with_parent
from engine.core.loop import calm_collector


def create_worker_app(models: ModelRegistry, settings: Settings, primary: PrimaryLink) -> FastAPI:
    """The application of one worker, with its link to the primary."""
    remote_metrics = RemoteMetrics(Goals.of_settings(settings), primary.say)
    if models.auto is not None:
        models.auto.hear = lambda model, given: remote_metrics.at_once().routed.append((model, given))
    app = FastAPI(title="Ponder", openapi_url=None, docs_url=None, redoc_url=None)
    resolver, selector = ReasoningResolver.of_settings(settings), ToolSelector.of_settings(settings)
    serving = Serving(settings, models, remote_metrics, resolver, Drain(), selector)
    serving.attach(app)
    errors.install(app, lambda error: remote_metrics.at_once().errors.append(error.code or str(error.status)))
    app.include_router(openai.router)
    app.include_router(anthropic_router)
    app.add_middleware(PrimaryClient, settings=settings, remote_metrics=remote_metrics, ask=primary.ask)
    app.add_middleware(DrainMiddleware, drain=serving.drain)
    add_middleware(app, settings)
    return app


_OWN = re.compile(
    rb"(POST /v1/((chat/)?completions|messages(/count_tokens)?)|GET /v1/models(/[^ ?]+)?)(\?[^ ]*)? HTTP/1\.1\r?\n"
)


def is_own(data: bytes) -> bool:
    """Returns whether a request that begins with these bytes is a worker's: its whole first line must be there."""
    return _OWN.match(data) is not None


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
    """From the first message to the primary to the last."""
    primary = await PrimaryLink.open(f"{start.directory}/primary.sock")
    primary.say(WorkerHello(start.client))
    giver = ConnectionSender(f"{start.directory}/connections.sock")
    async with await ModelRegistry.join(settings, start.client, primary.places) as models:
        app = create_worker_app(models, settings, primary)
        serving: Serving = app.state.ponder
        primary.on_draining = serving.drain.begin
        config = server_config(settings, app, OwnOrOthers, is_own=staticmethod(is_own), hand_over=giver.give)
        server = Server(config, ready=lambda: primary.say(WorkerReady()))
        calm_collector()
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait({running, primary.ended}, return_when=asyncio.FIRST_COMPLETED)
        await models.stop()  # every open stream gets its last event
        server.end()
        await running
        await serving.reasoning_resolver.checkers.close()


if __name__ == "__main__":
    main()
