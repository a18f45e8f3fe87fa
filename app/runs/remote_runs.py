"""Runs of other servers of the same database: their logs, commands to them, and the runs of servers that are lost.

A log is read from the database, and its tail from a stream (`app/cluster/run_streams.py`); the numbers of its events
say what is missing, so nothing is read twice or left out. What a person decides goes to the server that makes the run,
which finds out itself whether the run is theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from app.cluster.commands import ServerSilent
from app.db.run_store import LoggedEvent, RunRows
from app.db.sqlite import NotThere
from app.errors import ApiError, from_exception
from app.runs.event_log import status_of
from app.runs.events import TERMINAL

if TYPE_CHECKING:
    from app.cluster import Cluster
    from app.cluster.run_streams import RunStreams

_IDLE_S = 0.2  # between two looks that find nothing, at least


class RemoteRunLog:
    """The log of a run that another server makes, as `RunLog` shows one: `events` are those that there were."""

    def __init__(
        self,
        user: str,
        run_id: str,
        rows: RunRows,
        streams: RunStreams,
        events: Sequence[LoggedEvent],
        cut: LoggedEvent,
        closing: Callable[[], bool] = lambda: False,
    ) -> None:
        """`cut` ends a log that has no end, of a run that has ended. `closing`: readers are to go elsewhere."""
        self._closing = closing
        self.run_id = run_id
        self.events = list(events)
        self._user = user
        self._rows = rows
        self._streams = streams
        self._cut = cut

    @property
    def status(self) -> str:
        """ "running", or how the run ended."""
        return status_of(self.events)

    @property
    def last_seq(self) -> int:
        """The number of the last event of `events`."""
        return self.events[-1].seq if self.events else 0

    async def there(self, after: int = 0) -> AsyncGenerator[LoggedEvent, None]:
        """Events with a number above `after` that are there now."""
        for event in self.events:
            if event.seq > after:
                yield event

    async def follow(self, after: int = 0) -> AsyncGenerator[LoggedEvent, None]:
        """Events with a number above `after`, waiting for new ones until the log ends, or the run is erased, or this
        server stops."""
        while not self._closing():
            found = await self._rows.events(self.run_id, after)
            for event in found:
                after = event.seq
                yield event
                if event.type in TERMINAL:
                    return
            if not found:
                try:
                    row = await self._rows.get(self._user, self.run_id)
                except NotThere:
                    return
                if row["status"] != "running" and not await self._rows.events(self.run_id, after):
                    if self._cut.seq > after:
                        yield self._cut
                    return
                await asyncio.sleep(_IDLE_S)
            async for event in self._streams.tail(self.run_id, after):
                after = event.seq
                yield event
                if event.type in TERMINAL or self._closing():
                    return


class RunCommand(BaseModel):
    """A person's wish, on its way to the server that makes the run."""

    kind: Literal["cancel", "decide", "answer"]
    user: str
    run_id: str
    number: str = ""  # of the approval or the question
    decision: Literal["once", "no", "always", "never"] = "no"
    scope: Literal["arguments", "tool"] = "arguments"
    expires_s: float | None = None
    text: str = ""


class RunReply(BaseModel):
    """The outcome of a command; `status` is an error's, None where it was carried out."""

    status: int | None = None
    message: str = ""
    code: str | None = None
    kind: str = ""
    param: str | None = None


class RemoteRuns:
    """The runs of the other servers, for those of this one."""

    def __init__(self, cluster: Cluster, rows: RunRows, ended: BaseModel) -> None:
        """`ended` ends a log that has no end."""
        self._cluster = cluster
        self._rows = rows
        self.closing = False
        kind: str = getattr(ended, "type")  # noqa: B009  # every event has one, BaseModel has not
        self.terminal = LoggedEvent(0, kind, ended.model_dump_json())

    def log(self, user: str, run_id: str, events: Sequence[LoggedEvent]) -> RemoteRunLog:
        """Returns the log of a run that has `events` so far."""
        cut = LoggedEvent((events[-1].seq if events else 0) + 1, self.terminal.type, self.terminal.data)
        return RemoteRunLog(user, run_id, self._rows, self._cluster.streams, events, cut, lambda: self.closing)

    async def send(self, command: RunCommand) -> bool:
        """Has the run's server carry out a command; returns False where no server makes the run any more.

        Raises:
            NotThere: the user has no such run.
            ApiError: as that server refuses it; 503 where it does not answer.
        """
        row = await self._rows.get(command.user, command.run_id)
        return row["status"] == "running" and await self.pass_on(row["server"], command)

    async def pass_on(self, server: str | None, command: RunCommand) -> bool:
        """Has a server carry out a command on a run, whose chat may be deleted. Returns and raises as `send`."""
        if server in (None, self._cluster.name):
            return False
        try:
            reply = RunReply.model_validate_json(await self._cluster.commands.call(server, command.model_dump_json()))
        except ServerSilent:
            message = (
                "The server that makes this answer does not reply; if it is lost, another ends the answer shortly."
            )
            raise ApiError(
                503, message, code="server_silent", kind="server_error", headers={"Retry-After": "5"}
            ) from None
        if reply.status is not None:
            raise ApiError(reply.status, reply.message, code=reply.code, kind=reply.kind, param=reply.param)
        return True


async def outcome(work: Awaitable[None]) -> str:
    """Awaits what a command asks for; returns the reply that says how it went."""
    try:
        await work
    except Exception as error:
        told = from_exception(error)
        reply = RunReply(status=told.status, message=told.message, code=told.code, kind=told.kind, param=told.param)
        return reply.model_dump_json()
    return RunReply().model_dump_json()


def not_waiting(run_id: str) -> ApiError:
    return ApiError(404, f"There is no run {run_id!r:.60} that waits for anybody.", code="not_waiting")
