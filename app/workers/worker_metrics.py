"""Counts of a worker, sent to the primary in few and small messages.

Counts that decide about others (arrivals, ends, the queue) go at once, with all that was gathered; the times between
tokens wait for a moment. Knows nothing of sockets.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from app.observability.metrics import Goals, RequestWatch
from app.workers.worker_protocol import WorkerEvents

GATHER_S = 0.05


class RemoteMetrics:
    """`app.observability.Counting`, and the other events of requests for the primary. `send` gets each batch."""

    def __init__(self, goals: Goals, send: Callable[[WorkerEvents], None]) -> None:
        self.goals = goals
        self._send = send
        self._works = itertools.count()
        self._batch = WorkerEvents()
        self._due: asyncio.Handle | None = None
        self._soon = False

    def watch(self, endpoint: str) -> RequestWatch:
        return RequestWatch(self, endpoint)

    def came(self, endpoint: str) -> None:
        self.at_once().came.append(endpoint)

    def admit(self, model: str, tenant: str, prompt: int, limit: int, answers: int) -> RemoteWork:
        number = next(self._works)
        self.at_once().worked.append((number, model, tenant, prompt, limit, answers))
        return RemoteWork(self, number)

    def first(self, endpoint: str, seconds: float) -> None:
        self.at_once().first.append((endpoint, seconds))

    def gap(self, endpoint: str, seconds: float) -> None:
        self.gathered().gaps.append((endpoint, seconds))

    def left(self, endpoint: str, outcome: str, seconds: float, met: bool | None) -> None:
        self.at_once().ended.append((endpoint, outcome, seconds, met))

    def gathered(self) -> WorkerEvents:
        """The batch for events that can wait."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(GATHER_S, self._flush)
        return self._batch

    def at_once(self) -> WorkerEvents:
        """The batch for events that go at once."""
        if not self._soon:
            self._soon = True
            if self._due is not None:
                self._due.cancel()
            self._due = asyncio.get_running_loop().call_soon(self._flush)
        return self._batch

    def _flush(self) -> None:
        batch, self._batch = self._batch, WorkerEvents()
        self._due, self._soon = None, False
        self._send(batch)


class RemoteWork:
    """Waiting and done work of one request, as sent to the primary: its first tokens, and at the end how many more."""

    def __init__(self, remote_metrics: RemoteMetrics, number: int) -> None:
        self._remote_metrics = remote_metrics
        self._number = number
        self._first = True
        self._more = 0

    def got(self, tokens: int, cached: int) -> None:
        if self._first and tokens:
            self._first = False
            self._remote_metrics.at_once().got.append((self._number, tokens, cached))
        else:
            self._more += tokens

    def end(self, *, whole: bool) -> None:
        batch = self._remote_metrics.at_once()
        if self._more:
            batch.got.append((self._number, self._more, 0))
        batch.done.append((self._number, whole))
