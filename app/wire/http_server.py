"""The HTTP server: uvicorn with the application's own signals and log, and a limit on its connections.

An idle server does not wake up. The limit follows from the files that the process may have open.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from app.wire.connection import HEAD_BYTES, Connection, Patience, dated, protocol_of
from app.wire.handover import adopted

if TYPE_CHECKING:
    from app.config import Settings


_OTHERS = 512  # files that are no connections: the database, documents, tools, models
_MAX_COUNT = 20_000  # connections by default


def raise_file_limit() -> int:
    """Let the process open as many files as the system allows it; how many that is."""
    if sys.platform == "win32":
        return _MAX_COUNT
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft not in (resource.RLIM_INFINITY, wanted):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # macOS says no to more than it says it allows
            return soft
    return wanted


def connections_allowed(asked: int | None, files: int) -> int:
    """Returns how many connections there may be, of those `asked` for and where so many `files` may be open."""
    return max(16, min(_MAX_COUNT if asked is None else asked, files - _OTHERS))


BACKLOG = 2048  # connections that wait to be accepted
_ACCEPT = 4  # at once, where other processes accept from the same socket
_DRAIN_S = 3  # for responses to reach their readers after everything that makes them has ended


class Server(uvicorn.Server):
    """uvicorn, except that signals are ours, that we hear when it accepts connections, and that it can sleep.

    uvicorn wakes ten times a second to look whether it should end and to renew its Date header. Here the end is an
    event, and the date is written with each response (`dated`), so a server that nobody talks to uses no CPU.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self._ending = asyncio.Event()
        self._adopting: set[asyncio.Task[None]] = set()

    async def main_loop(self) -> None:
        await self._ending.wait()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    def adopt(self, connection: socket.socket, data: bytes) -> None:
        """Serve a connection that somebody else accepted, and read `data` of."""
        if self._ending.is_set():
            connection.close()
            return
        kind: Any = self.config.http_protocol_class  # a `Connection`, which uvicorn has as any protocol
        protocol: Connection = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._adopt(loop, adopted(protocol, data), connection), name="adopt")
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    async def _adopt(self, loop: asyncio.AbstractEventLoop, protocol: Connection, connection: socket.socket) -> None:
        try:
            await loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError:  # its client is gone
            connection.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)  # asyncio's number is also how many it accepts at once, which may be fewer
        self._ready()


def server_config(
    settings: Settings, app: ASGIApp, kind: type[Connection] = Connection, **named: object
) -> uvicorn.Config:
    """Configures uvicorn with connections of this `kind`, with attributes of its class. The application's lifespan is
    the caller's to begin and end."""
    patience = Patience(connections_allowed(settings.max_connections, raise_file_limit()))
    return uvicorn.Config(
        dated(app), lifespan="off", log_config=None, ws="none", http=protocol_of(patience, kind, **named),
        backlog=BACKLOG if settings.api_workers == 1 else _ACCEPT,
        h11_max_incomplete_event_size=HEAD_BYTES, access_log=settings.log_level in ("debug", "info"),
        timeout_graceful_shutdown=_DRAIN_S, server_header=False, date_header=False,
    )  # fmt: skip
