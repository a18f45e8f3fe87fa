"""One request's clock, and who hears what it shows.

Knows nothing of where that is counted: in this process, or in another one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from app.admission.request_budget import RequestBudget
from app.observability import tracing

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel
    from app.config import Settings


@dataclass(frozen=True, slots=True)
class Goals:
    """Goals of a request that counts as goodput: the wait for its first token, and then for each further one on
    average. Also the cost of an hour of the machine, if that is known."""

    ttft_s: float = 2.0
    inter_token_s: float = 0.2
    price_per_hour: float | None = None

    @classmethod
    def of_settings(cls, settings: Settings) -> Self:
        return cls(settings.slo_ttft_ms / 1000, settings.slo_itl_ms / 1000, settings.price_per_hour)


class WatchedWork(Protocol):
    """A request that was let in and has not ended: `app.admission.queue_estimate.Work`, wherever that is."""

    def got(self, tokens: int, cached: int) -> None: ...

    def end(self, *, whole: bool) -> None: ...


class Counting(Protocol):
    """Listener to requests as they pass."""

    goals: Goals

    def watch(self, endpoint: str) -> RequestWatch:
        """Of one answer that begins now."""
        ...

    def came(self, endpoint: str) -> None: ...

    def admit(self, model: str, tenant: str, prompt: int, limit: int, answers: int) -> WatchedWork:
        """Prompts of so many tokens are to be read, and for each of the answers at most `limit` written."""
        ...

    def first(self, endpoint: str, seconds: float) -> None:
        """An answer's first token came so long after the request."""
        ...

    def gap(self, endpoint: str, seconds: float) -> None:
        """A further token came so long after the one before."""
        ...

    def left(self, endpoint: str, outcome: str, seconds: float, met: bool | None) -> None:
        """It has ended; `met`: whether it kept to the goals, where that matters."""
        ...


class RequestWatch:
    """One request's clock: `tokens` for each arrival of an answer (of several, by index), then `end` once."""

    def __init__(self, counting: Counting, endpoint: str) -> None:
        self._counting = counting
        self._endpoint = endpoint
        self._began = time.perf_counter()
        self._latest: dict[int, float] = {}
        self._first: dict[int, float] = {}
        self._count: dict[int, int] = {}
        self._ended = False
        self._works: list[WatchedWork] = []
        self._trace = tracing.here()
        self._phases = [("queue and prefill", time.time_ns())]  # of the first answer, where somebody traces it
        self._ticket = RequestBudget.current()
        if self._ticket is not None:
            self._ticket.hold()
        counting.came(endpoint)

    def admit(self, among: Sequence[ServedModel], tenant: str, prompt: int, limit: int, answers: int = 1) -> None:
        """Prompts of so many tokens are to be read by one of these models, or by one after another, and for each of
        the answers at most `limit` tokens written.

        Raises:
            ApiError: 429: the request's key may not use so many now.
        """
        if self._ticket is not None:
            self._ticket.charge(prompt)
        self._works += [self._counting.admit(each.name, tenant, prompt, limit, answers) for each in among]

    def reading(self) -> None:
        """Its prompt is being read, as is heard of those that take several steps."""
        if self._trace is not None and len(self._phases) == 1:
            self._phases = [("queue", self._phases[0][1]), ("prefill", time.time_ns())]

    def tokens(self, index: int, count: int, cached: int = 0, part: str = "answer") -> None:
        """`count` more of an answer, or of another `part`; of its prompt, `cached` needed no reading."""
        if not count:
            return
        if self._trace is not None and index == 0 and self._phases[-1][0] != part:
            self._phases.append((part, time.time_ns()))
        for work in self._works:
            work.got(count, cached)
        if self._ticket is not None:
            self._ticket.spend(count)
        now = time.perf_counter()
        latest = self._latest.get(index)
        self._count[index] = self._count.get(index, 0) + count
        if latest is None:
            self._first[index] = now
            self._counting.first(self._endpoint, now - self._began)
        else:
            self._counting.gap(self._endpoint, (now - latest) / count)
        self._latest[index] = now

    def end(self, outcome: str) -> None:
        if self._ended:
            return
        self._ended = True
        lasted = time.perf_counter() - self._began
        for work in self._works:
            work.end(whole=outcome == "completed" and len(self._works) == 1)
        if self._ticket is not None:
            self._ticket.leave()
        written = sum(self._count.values())
        attributes: tracing.Attributes = {"ponder.outcome": outcome, "gen_ai.usage.output_tokens": written}
        tracing.answer(self._endpoint, self._phases[0][1], self._phases, self._trace, attributes)
        met = None
        if outcome in ("completed", "failed"):
            met = outcome == "completed" and self._kept_to(self._counting.goals)
        self._counting.left(self._endpoint, outcome, lasted, met)

    def _kept_to(self, goals: Goals) -> bool:
        """Tells whether every answer came in time."""
        for index, first in self._first.items():
            further = max(1, self._count[index] - 1)
            if first - self._began > goals.ttft_s or (self._latest[index] - first) / further > goals.inter_token_s:
                return False
        return True
