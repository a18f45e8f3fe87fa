"""`ponder serve` from start to end: bind, load, say when ready, and stop cleanly on a signal.

The port is taken before the model is loaded, so a port in use is reported at once; connections are accepted only when
an answer can be given. SIGTERM refuses new requests, lets running ones go on for a while and then ends them and the
process; SIGINT does not wait; a second signal hurries either.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from app.cluster import open_store
from app.config import BadSetting, Settings, server_file
from app.db.account_store import Accounts
from app.db.sqlite import refuse_damage
from app.middleware import is_loopback
from app.observability import logs, tracing
from app.wire.http_server import BACKLOG, Server, server_config

if TYPE_CHECKING:
    from app.answering.model_registry import ModelRegistry
    from app.diffusion.service import DiffusionService
    from retrieval import Library

T = TypeVar("T")


def serve(settings: Settings) -> None:
    """Run the server until a signal stops it.

    Raises:
        BadSetting: the address cannot be listened on, or nobody would be asked for a key there, or the data directory
            cannot be used.
        EngineError: the model cannot be loaded.
    """
    logs.configure(settings.log_level, settings.log_format)
    if settings.auth == "off" and not is_loopback(settings.host):
        raise BadSetting(
            f"host is {settings.host!r}, where others can reach it, and it would ask nobody for a key; accepted: "
            "--auth keys with it (`ponder keys create --user NAME` makes a key), or a loopback host such as 127.0.0.1."
        )
    listener = bind(settings.host, settings.port)
    stop_tracing = tracing.setup()
    try:
        with listener:
            asyncio.run(_serve(settings, listener))
    finally:
        stop_tracing()


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address that does not listen yet.

    Raises:
        BadSetting: the address cannot be bound; the message names the remedy.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise BadSetting(f"The host {host!r} has no address here: {error.strerror}.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _explain_bind(error, host, port) from None
    return listener


def _explain_bind(error: OSError, host: str, port: int) -> BadSetting:
    match error.errno:
        case errno.EADDRINUSE:
            return BadSetting(
                f"Port {port} on {host} is in use; stop what uses it, choose another with --port, or take any free one "
                "with --port 0."
            )
        case errno.EACCES:
            return BadSetting(f"Port {port} needs rights that this process lacks; accepted: 1024 to 65535, or 0.")
        case errno.EADDRNOTAVAIL:
            return BadSetting(f"{host} is no address of this machine; accepted: 127.0.0.1, 0.0.0.0 or one of its own.")
        case _:
            return BadSetting(f"{host}:{port} cannot be listened on: {error.strerror}.")


def url(host: str, port: int) -> str:
    """Returns the server's address for a browser on this machine."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve(settings: Settings, listener: socket.socket) -> None:
    told_to_stop, at_once = asyncio.Event(), asyncio.Event()
    hurry: list[Callable[[], None]] = []

    def on_signal(number: int) -> None:
        if told_to_stop.is_set() and at_once.is_set():
            for action in hurry:
                action()
        if told_to_stop.is_set() or number == signal.SIGINT:
            at_once.set()
        told_to_stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)

    stop = asyncio.create_task(told_to_stop.wait())
    async with contextlib.AsyncExitStack() as closing:
        closing.callback(stop.cancel)
        await asyncio.to_thread(refuse_damage, settings.resolved_data_dir)
        store = await open_store(settings)
        closing.push_async_callback(store.close)
        library = await _or_leave(_open_library(settings), stop)
        closing.push_async_callback(asyncio.to_thread, library.close)
        diffusion = await _or_leave(_load_diffusion(settings), stop)  # first: it is small, and what is wrong is told
        with _progress() as report:
            models = await _or_leave(_start_models(settings, report), stop)
        closing.push_async_callback(models.stop)
        from app.sequences import persistence
        from app.server import create_app
        from app.workers.primary import WorkerPool
        from engine.core.loop import calm_collector

        app = create_app(models, settings, store=store, library=library, diffusion=diffusion)
        await closing.enter_async_context(app.router.lifespan_context(app))
        config = server_config(settings, app)
        port = listener.getsockname()[1]
        server = Server(config, ready=lambda: _say_ready(settings, port))
        closing.callback(server_file(settings).unlink, missing_ok=True)
        hurry.append(lambda: setattr(server, "force_exit", True))
        try:
            listener.listen(BACKLOG)
        except OSError as error:
            raise _explain_bind(error, settings.host, port) from None
        state = app.state.ponder
        workers = WorkerPool(state, listener, settings.api_workers - 1, server.adopt)
        state.meter.registry.register(workers)
        closing.push_async_callback(workers.stop)
        await _or_leave(workers.start(), stop)

        calm_collector()

        async def drain() -> None:
            workers.drain()
            await state.drain.wait(lambda: len(state.runs.live) + len(workers), settings.drain_s, at_once)
            state.ending.set()

        async def keep_sequences() -> None:
            await persistence.keep(state.sequences, persistence.file_of(settings.resolved_data_dir))

        end_work = [drain, state.runs.stop, workers.stop, keep_sequences, models.stop]
        await _until(server, listener, stop, end_work)


async def _open_library(settings: Settings) -> Library:
    """The documents of the data directory, opened early: a lock of another process is reported at once."""
    from app.document_library import open_library  # indexes come with it: not before the port is ours
    from retrieval import InUse

    try:
        return await asyncio.to_thread(open_library, settings)
    except InUse as error:
        raise BadSetting(f"{error} Stop that one, or give another --data-dir.") from None


async def _load_diffusion(settings: Settings) -> DiffusionService | None:
    """The masked-diffusion model, loaded before the others: one that cannot be is refused at once."""
    if settings.diffusion_model is None:
        return None
    from app.diffusion.service import DiffusionService  # the engine comes with it

    return await DiffusionService.load(settings.diffusion_model, settings.device)


async def _start_models(settings: Settings, report: Callable[[str], None]) -> ModelRegistry:
    from app.answering.model_registry import (
        ModelRegistry,  # torch comes with it: not before port and data directory are ours
        fallback_memory,
    )

    count = 1 + len(settings.models)
    numbers = itertools.count(1)

    def begin(model: str) -> None:
        report(f"Loading {model}" if count == 1 else f"Loading {model} ({next(numbers)} of {count})")

    if (fallback := settings.engine_fallback()) is not None:
        print(await asyncio.to_thread(fallback_memory, settings.engine_config(), fallback), file=sys.stderr, flush=True)
    return await ModelRegistry.start(settings, begin)


async def _or_leave(starting: Coroutine[Any, Any, T], stop: asyncio.Task[bool]) -> T:
    """Returns the result of `starting`; exits if a signal stops the server before."""
    begun = asyncio.ensure_future(starting)
    await asyncio.wait({begun, stop}, return_when=asyncio.FIRST_COMPLETED)
    if not begun.done():
        # Models are loaded in threads that cannot be interrupted, and nothing was begun that needs an end.
        sys.stdout.flush()
        os._exit(0)
    return begun.result()


async def _until(
    server: Server,
    listener: socket.socket,
    stop: asyncio.Task[bool],
    end_work: list[Callable[[], Awaitable[None]]],
) -> None:
    """Serve until `stop`, then end the work first: every open stream gets its last event and nothing has to drain."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
    for end in end_work:
        await end()
    server.end()
    await serving


def _say_ready(settings: Settings, port: int) -> None:
    host = settings.host
    server_file(settings).write_text(url(host, port), encoding="utf-8")
    if settings.auth == "keys" and not _anybody(settings):
        print("Nobody has a key yet: make one with `ponder keys create --user local`.", file=sys.stderr, flush=True)
    print(f"Ponder is ready at {url(host, port)}", flush=True)


def _anybody(settings: Settings) -> bool:
    """Returns whether there is a key that lets somebody in."""
    accounts = Accounts.open(settings.resolved_data_dir, settings.database_address)
    try:
        return any(key.state == "valid" for key in accounts.keys_of())
    finally:
        accounts.close()


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows progress on a terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("Starting …") as status:
            yield lambda text: status.update(f"{text} …")
    else:
        yield lambda text: None
