"""The primary's side of its workers: starts them, reads their messages, and restarts them.

A worker that dies takes with it the answers that it was writing, and nothing else: connections that it had not accepted
wait for the others. Knows nothing of decisions and counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.wire import ConnectionReceiver
from app.workers.worker_protocol import (
    Draining,
    End,
    EngineEnded,
    EngineMoved,
    FromPrimary,
    Start,
    WorkerHello,
    WorkerReady,
    framed,
    from_worker,
    heard,
)
from app.workers.worker_session import WorkerSession
from engine.child_process import child_environment
from engine.ipc.core_process import MAX_DEATHS, WITHIN_S, RestartBackoff

if TYPE_CHECKING:
    from app.state import State
    from engine.errors import EngineError

_STOP_S = 5.0  # from the request to end to the kill
_START_S = 120.0

log = logging.getLogger("ponder")


class _Place:
    """A slot for one worker after another."""

    def __init__(self) -> None:
        self.tried = asyncio.Event()  # whether the first accepts connections, or could not
        self.process: asyncio.subprocess.Process | None = None
        self.session: WorkerSession | None = None  # of a worker that accepts connections
        self.deaths = RestartBackoff()

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class WorkerPool(Collector):
    """`count` workers beside this process, which accept from `listener` too; `adopt` gets the connections that they
    hand over."""

    def __init__(
        self, state: State, listener: socket.socket, count: int, adopt: Callable[[socket.socket, bytes], None]
    ) -> None:
        self._state = state
        self._listener = listener
        self._places = [_Place() for _ in range(count)]
        self._by_client: dict[int, _Place] = {}
        self._clients = itertools.count(1)
        self._sessions: set[WorkerSession] = set()
        self._adopt = adopt
        self._where: dict[str, EngineMoved | EngineEnded] = {}  # the engines, by model
        self._keeping: list[asyncio.Task[None]] = []
        self._ending = False
        self.restarts = 0

    async def start(self) -> None:
        """Returns when each accepts connections, or has failed to: then it is tried again, and the others do."""
        if not self._places:
            return
        self._directory = tempfile.mkdtemp(prefix="ponder-")  # entered by this user alone
        self._taker = ConnectionReceiver(f"{self._directory}/connections.sock", self._adopt)
        for served in self._state.models:
            self._share(served.name)
        self._server = await asyncio.start_unix_server(self._hear, f"{self._directory}/primary.sock")
        self._keeping = [asyncio.create_task(self._keep(place), name="API worker") for place in self._places]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                for place in self._places:
                    await place.tried.wait()

    @property
    def pids(self) -> list[int]:
        """Of the processes that there are now."""
        return [place.process.pid for place in self._places if place.process is not None]

    @property
    def ready(self) -> int:
        """Workers that accept connections."""
        return sum(place.session is not None for place in self._places)

    def __len__(self) -> int:
        """Requests that they answer."""
        return sum(len(session) for session in self._sessions)

    def collect(self) -> Iterator[Metric]:
        """As a collector of `prometheus_client`."""
        yield GaugeMetricFamily("ponder_api_workers", "Processes that accept connections.", value=1 + self.ready)
        yield CounterMetricFamily(
            "ponder_api_worker_restarts", "Such processes that died and were started again.", value=self.restarts
        )

    def drain(self) -> None:
        """They are to take on nothing new."""
        self._send_all(Draining())

    async def stop(self) -> None:
        """End them, and their answers. Idempotent."""
        if self._ending or not self._keeping:
            return
        self._ending = True
        self._send_all(End())
        _, left = await asyncio.wait(self._keeping, timeout=_STOP_S)
        for place in self._places:
            place.kill()
        if left:
            await asyncio.wait(left)
        self._server.close()
        self._taker.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- processes

    async def _keep(self, place: _Place) -> None:
        """One worker after another, until they die too often."""
        while not self._ending:
            code = await self._live(place)
            place.tried.set()
            if self._ending:
                return
            log.error("an API worker ended with exit code %s", code)
            if (pause_s := place.deaths.pause_s()) is None:
                log.error("it did so more than %d times in %g s, and is not started again", MAX_DEATHS, WITHIN_S)
                return
            self.restarts += 1
            await asyncio.sleep(pause_s)

    async def _live(self, place: _Place) -> int:
        """From a worker's start to its end; its exit code."""
        client = next(self._clients)
        file = self._listener.fileno()
        start = Start(
            self._state.settings.model_dump_json(exclude={"database", "redis"}), client, self._directory, file
        )
        try:
            place.process = process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "app.workers.api_worker", stdin=asyncio.subprocess.PIPE, pass_fds=[file],
                env=child_environment(),
            )  # fmt: skip
        except OSError as error:
            log.error("an API worker cannot be started: %s", error)
            return -1
        self._by_client[client] = place
        assert process.stdin is not None
        process.stdin.write(framed(start))  # and it stays open: a worker ends with its primary
        try:
            return await process.wait()
        finally:
            process.stdin.close()
            place.process = None
            del self._by_client[client]

    # -- messages

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One worker's session, from its first message to its last."""
        first = await heard(reader, from_worker)
        place = self._by_client.get(first.client) if isinstance(first, WorkerHello) else None
        if not isinstance(first, WorkerHello) or place is None:
            writer.close()
            return
        session = WorkerSession(self._state, lambda message: writer.write(framed(message)))
        self._sessions.add(session)
        for where in self._where.values():
            session.send(where)
        try:
            while (message := await heard(reader, from_worker)) is not None:
                if isinstance(message, WorkerReady):
                    place.session = session
                    place.tried.set()
                else:
                    session.hear(message)
        except Exception:
            log.exception("an API worker said what cannot be understood")
            place.kill()
        finally:
            self._sessions.discard(session)
            if place.session is session:
                place.session = None
            session.end()
            for served in self._state.models:
                served.engine.forget_client(first.client)
            writer.close()

    def _send_all(self, message: FromPrimary) -> None:
        for session in self._sessions:
            session.send(message)

    def _share(self, model: str) -> None:
        """Send the place of the model's engine, now and later."""

        def moved(where: EngineMoved | EngineEnded) -> None:
            self._where[model] = where
            self._send_all(where)

        def ended(error: EngineError) -> None:
            moved(EngineEnded(model, str(error)))

        engine = self._state.models.get(model).engine
        moved(EngineMoved(model, engine.share(lambda directory: moved(EngineMoved(model, directory)), ended)))
