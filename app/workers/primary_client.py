"""A worker's client of the primary: asks for admission, reports usage, and follows the engines' places.

A worker asks the primary once for each request, and goes by that answer. It does not see what other workers do for the
same key meanwhile, so a key may pass its token limit by one request of each other worker. Requests, requests at once
and quotas are counted in the primary, and are exact.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.admission.admission import AdmissionDecisions, answered, is_strict
from app.admission.rate_limits import Counts, KeyLimits, RateWindows, Window
from app.admission.request_budget import RequestBudget, RequestTerms
from app.auth import WHO, Principal, address_of, limited_to
from app.errors import note
from app.workers.worker_protocol import (
    AdmissionDenied,
    AdmissionRequest,
    Admitted,
    Draining,
    End,
    EngineEnded,
    EngineMoved,
    FromPrimary,
    FromWorker,
    framed,
    from_primary,
    heard,
)
from engine.errors import EngineStopped

if TYPE_CHECKING:
    from app.config import Settings
    from app.workers.worker_metrics import RemoteMetrics


class PrimaryLink:
    """Link to the primary. `ended` is done when the primary says so, or is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._asked: dict[int, asyncio.Future[Admitted | AdmissionDenied]] = {}
        self._places: defaultdict[str, asyncio.Queue[EngineMoved | EngineEnded]] = defaultdict(asyncio.Queue)
        self.on_draining: Callable[[], None] = lambda: None
        self.ended = asyncio.create_task(self._listen(), name="primary")

    @classmethod
    async def open(cls, path: str) -> PrimaryLink:
        return cls(*await asyncio.open_unix_connection(path))

    def say(self, message: FromWorker) -> None:
        self._writer.write(framed(message))

    async def ask(self, question: AdmissionRequest) -> Admitted | AdmissionDenied:
        self._asked[question.number] = future = asyncio.get_running_loop().create_future()
        self.say(question)
        try:
            return await future
        finally:
            del self._asked[question.number]

    async def places(self, model: str) -> AsyncIterator[str | None]:
        """Yields where the model's engine is, now and later.

        Raises:
            EngineStopped: it is gone for good.
        """
        while True:
            where = await self._places[model].get()
            if isinstance(where, EngineEnded):
                raise EngineStopped(where.message)
            yield where.directory

    async def _listen(self) -> None:
        while (message := await heard(self._reader, from_primary)) is not None and not isinstance(message, End):
            self._hear(message)

    def _hear(self, message: FromPrimary) -> None:
        match message:
            case Admitted(number=number) | AdmissionDenied(number=number):
                if (future := self._asked.get(number)) is not None and not future.done():
                    future.set_result(message)
            case EngineMoved(model=model) | EngineEnded(model=model):
                self._places[model].put_nowait(message)
            case Draining():
                self.on_draining()


_ASKED = frozenset({b"authorization", b"x-api-key", b"cookie", b"prefer"})  # headers that the primary decides by

Question = Callable[[AdmissionRequest], Awaitable[Admitted | AdmissionDenied]]


class PrimaryClient:
    """ASGI middleware: denies requests that the primary denies; answers the rest within the budget it gave."""

    def __init__(self, app: ASGIApp, *, settings: Settings, remote_metrics: RemoteMetrics, ask: Question) -> None:
        self.app = app
        self._settings = settings
        self._remote_metrics = remote_metrics
        self._ask = ask
        self._numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        wanted = AdmissionRequest(
            next(self._numbers), scope["method"], scope["path"],
            [(name, value) for name, value in scope["headers"] if name in _ASKED], address_of(scope),
        )  # fmt: skip
        try:
            admitted = await self._ask(wanted)
        except asyncio.CancelledError:  # it may have been let in by now
            self._remote_metrics.at_once().left.append((wanted.number, 0))
            raise
        if isinstance(admitted, AdmissionDenied):
            await note(scope, admitted.error()).response()(scope, receive, send)
            return
        scope = {**scope, WHO: Principal(admitted.id, admitted.name, admitted.role, admitted.key_id)}  # type: ignore[arg-type]  # of a Who
        with limited_to(None if admitted.models is None else frozenset(admitted.models)):
            await self._answer(admitted, scope, receive, send)

    async def _answer(self, admitted: Admitted, scope: Scope, receive: Receive, send: Send) -> None:
        if not admitted.metered:
            await self.app(scope, receive, send)
            return
        admission = RemoteAdmission(self._settings, admitted, self._remote_metrics)
        request_budget = RequestBudget(
            admission,
            admitted.key,
            KeyLimits(*admitted.limits),
            RequestTerms(*admitted.terms),
            strict=is_strict(Headers(scope=scope)),
        )
        await answered(self.app, request_budget, admission.windows, scope, receive, send)


class RemoteAdmission(AdmissionDecisions):
    """Admission of one request that the primary admitted."""

    def __init__(self, settings: Settings, admitted: Admitted, remote_metrics: RemoteMetrics) -> None:
        queue_estimates = {model: RemoteWait(*wait) for model, wait in admitted.waits.items()}
        self._remote_rates = RemoteRates(admitted.counts or (0, 0.0, 0, 0.0), lambda tokens: self._spent(tokens))
        super().__init__(
            settings, queue_estimates, self._remote_rates,
            lambda reason: remote_metrics.at_once().refused.append(reason),
        )  # fmt: skip
        self._windows = [Window(what, *rest) for what, *rest in admitted.windows]  # type: ignore[arg-type]  # of a Window
        self._number = admitted.number
        self._remote_metrics = remote_metrics

    def left(self, request_budget: RequestBudget) -> None:
        self._remote_metrics.at_once().left.append((self._number, request_budget.tokens))

    def windows(self) -> list[Window]:
        """Returns the state of the key's limits, as far as is known here."""
        spent = self._remote_rates.spent
        return [
            replace(each, remaining=max(0, each.remaining - spent)) if each.what == "tokens" else each
            for each in self._windows
        ]

    def _spent(self, tokens: int) -> None:
        self._remote_metrics.at_once().spent.append((self._number, tokens))


@dataclass(frozen=True, slots=True)
class RemoteWait:
    """The work that a model had when the request was let in."""

    seconds: float
    answers: int

    def wait_s(self) -> float:
        return self.seconds

    def __len__(self) -> int:
        return self.answers


class RemoteRates(RateWindows):
    """The tokens of one key at admission, and those spent since."""

    def __init__(self, counts: Counts, on_spent: Callable[[int], None]) -> None:
        self._counts = counts
        self._on_spent = on_spent
        self.spent = 0

    def counts(self, key: str) -> Counts:
        before, before_s, now, now_s = self._counts
        return before, before_s, now + self.spent, now_s

    def spend(self, key: str, tokens: int) -> None:
        self.spent += tokens
        self._on_spent(tokens)
