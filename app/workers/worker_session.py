"""One worker's requests as the primary sees them: admission, usage, and clean-up when it dies.

Knows nothing of processes or sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from app.admission.admission import is_strict
from app.auth import LOCAL, is_metered, is_open
from app.errors import from_exception
from app.workers.worker_protocol import (
    AdmissionDenied,
    AdmissionRequest,
    Admitted,
    FromPrimary,
    WorkerEvents,
    WorkerHello,
    WorkerReady,
)

if TYPE_CHECKING:
    from app.admission import AdmittedWork, RequestBudget
    from app.state import State


class WorkerSession:
    """From a worker's first word to its last. `send` says something to it."""

    def __init__(self, state: State, send: Callable[[FromPrimary], None]) -> None:
        self.send = send
        self._state = state
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._budgets: dict[int, RequestBudget] = {}
        self._works: dict[int, AdmittedWork] = {}
        self._open = defaultdict[str, deque[float]](deque)  # answers under way, by endpoint: since when, about

    def __len__(self) -> int:
        """Requests that it answers."""
        return len(self._asking) + len(self._budgets)

    def hear(self, message: WorkerHello | WorkerReady | AdmissionRequest | WorkerEvents) -> None:
        match message:
            case AdmissionRequest(number):
                task = asyncio.create_task(self._answer(message), name="may it")
                self._asking[number] = task
                task.add_done_callback(lambda _: self._asking.pop(number, None))
            case WorkerEvents():
                self._count(message)

    def end(self) -> None:
        """The worker is gone: its open answers have failed."""
        for task in list(self._asking.values()):
            task.cancel()
        for work in self._works.values():
            work.end(whole=False)
        for endpoint, since in self._open.items():
            for began in since:
                self._state.meter.left(endpoint, "failed", time.monotonic() - began, False)
        for request_budget in self._budgets.values():
            request_budget.leave()
        self._works.clear()
        self._open.clear()
        self._budgets.clear()

    async def _answer(self, asked: AdmissionRequest) -> None:
        try:
            self.send(await self._decided(asked))
        except Exception as error:  # of any kind: somebody waits
            self.send(AdmissionDenied.of(asked.number, from_exception(error)))

    async def _decided(self, asked: AdmissionRequest) -> Admitted:
        """
        Raises:
            ApiError: 401, 403 or 429.
        """
        state, headers, who = self._state, Headers(raw=asked.headers), LOCAL
        if state.settings.auth == "keys" and not is_open(asked.method, asked.path):
            who = await state.auth.required(asked.path, headers, asked.address)
        told = Admitted(asked.number, who.id, who.name, who.role, who.key_id)
        told.models = None if who.models is None else sorted(who.models)
        if not is_metered(asked.method, asked.path):
            return told
        request_budget = state.admission.begin(who, strict=is_strict(headers))
        self._budgets[asked.number] = request_budget
        told.metered, told.key = True, request_budget.key
        limits = state.admission.limits_of(who)
        told.limits = limits.requests, limits.tokens, limits.concurrent
        terms = request_budget.terms
        told.terms = terms.priority, terms.deadline_s, terms.max_output_tokens, terms.priority_is_a_limit
        if limits.tokens is not None:
            told.counts = state.admission.counts(request_budget.key)
        told.windows = [(each.what, each.limit, each.remaining, each.reset_s) for each in state.admission.windows(who)]
        told.waits = {model: (log.wait_s(), len(log)) for model, log in state.meter.queue_estimates.items()}
        return told

    def _count(self, told: WorkerEvents) -> None:
        meter = self._state.meter
        for endpoint in told.came:
            self._open[endpoint].append(time.monotonic())
            meter.came(endpoint)
        for number, model, tenant, prompt, limit, answers in told.worked:
            self._works[number] = meter.admit(model, tenant, prompt, limit, answers)
        for endpoint, seconds in told.first:
            meter.first(endpoint, seconds)
        for endpoint, seconds in told.gaps:
            meter.gap(endpoint, seconds)
        for number, tokens, cached in told.got:
            self._works[number].got(tokens, cached)
        for number, whole in told.done:
            self._works.pop(number).end(whole=whole)
        for endpoint, outcome, seconds, met in told.ended:
            self._open[endpoint].popleft()
            meter.left(endpoint, outcome, seconds, met)
        for number, tokens in told.spent:
            self._budgets[number].spend(tokens)
        for number, tokens in told.left:
            self._left(number, tokens)
        for reason in told.refused:
            meter.refusal(reason)
        for code in told.errors:
            meter.windows.error(code)
        if (auto := self._state.models.auto) is not None:
            for model, given in told.routed:
                auto.counts[model, given] += 1

    def _left(self, number: int, tokens: int) -> None:
        if (asking := self._asking.get(number)) is not None:  # its client left before it was let in
            asking.cancel()
        if (request_budget := self._budgets.pop(number, None)) is not None:
            request_budget.spend(max(0, tokens - request_budget.tokens))
            request_budget.leave()
