"""Decides which requests enter the engine, and which wait, get less, or are refused.

A request is refused because its key asks for too much (requests or tokens in a minute, requests at once, a quota) or
because the requests before it would keep it waiting for too long; the refusal says when to try again. Under load short
of that, answers get less thinking, and `auto` asks fewer models. `AdmissionGate` stands before the routes that cost
something, so a request is refused before its body is read.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.admission.rate_limits import Counts, KeyLimits, RateWindows, Window
from app.admission.request_budget import RequestBudget, RequestTerms
from app.auth import LOCAL, WHO, Principal, is_metered
from app.db.quotas import exhausted
from app.errors import ApiError, invalid, note

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel
    from app.config import Settings


T = TypeVar("T", int, float)
CLASSLESS = ("fcfs", "shortest-first")  # policies that go by something else alone
_LEARN = 0.1  # weight of a new observation


class QueuedWork(Protocol):
    """Work left for a model: a `QueueEstimate`, or the last news of one."""

    def wait_s(self) -> float: ...

    def __len__(self) -> int: ...


class AdmissionDecisions(ABC):
    """Decisions on an admitted request's further demands, by `queue_estimates` (of each model) and `rates` as this
    process knows them."""

    def __init__(
        self,
        settings: Settings,
        queue_estimates: Mapping[str, QueuedWork],
        rates: RateWindows,
        refused: Callable[[str], None],
    ) -> None:
        """`refused` hears the reason of each refusal."""
        self._max_wait_s = settings.max_wait_s
        self._reduce_from_s = settings.reduce_from_s if settings.reduce else math.inf
        self._thinking = settings.reduced_thinking
        self._queue = settings.max_running + settings.max_waiting
        self._policy = settings.policy
        self._queue_estimates = queue_estimates
        self._rates = rates
        self._refused = refused

    @abstractmethod
    def left(self, request_budget: RequestBudget) -> None:
        """All that answered a request has ended."""

    def check(self, among: Iterable[ServedModel]) -> None:
        """
        Raises:
            ApiError: 429: all of these models have too much to do.
        """
        self._check([self._queue_estimates[served.base] for served in among])

    def check_priority(self, priority: int | None) -> None:
        """
        Raises:
            ApiError: 400: the policy goes by no class, and one is named.
        """
        if priority and self._policy in CLASSLESS:
            message = f"priority is {priority}; accepted: 0, as the server's policy {self._policy!r} knows no classes."
            raise invalid("priority", message)

    def charge(self, key: str, most: int, tokens: int) -> None:
        """Tokens are to be read for a key, which may use at most `most` in a minute.

        Raises:
            ApiError: 429: it has fewer left.
        """
        if tokens > most:
            message = f"The prompt has {tokens} tokens; accepted: at most {most}, which this key may use in a minute."
            self._refused("tokens")
            raise ApiError(429, message, code="request_too_large", kind="rate_limit_error")
        if wait_s := self._rates.wait_s(key, most, tokens):
            raise self._no_tokens(most, wait_s, tokens)
        self._rates.spend(key, tokens)

    def spend(self, key: str, tokens: int) -> None:
        """Tokens were written for a key, which may be more than it has left."""
        self._rates.spend(key, tokens)

    def thinking_left(self, served: ServedModel) -> int | None:
        """Returns the most tokens that an answer may think where many wait. None: as many as were asked for."""
        return self._thinking if self._queue_estimates[served.base].wait_s() >= self._reduce_from_s else None

    def refusal(self, reason: str, message: str, wait_s: float, code: str) -> ApiError:
        """A 429 that says when to come again; it is counted."""
        self._refused(reason)
        seconds = max(1, math.ceil(wait_s))
        return ApiError(
            429, f"{message} Try again in {seconds} s.", code=code, kind="rate_limit_error",
            headers={"Retry-After": str(seconds)},
        )  # fmt: skip

    def _check(self, among: Iterable[QueuedWork]) -> None:
        least = min(among, key=lambda queue_estimate: queue_estimate.wait_s())
        wait_s = least.wait_s()
        if len(least) >= self._queue:
            message = f"{len(least)} answers are written or wait already; accepted: at most {self._queue}."
            raise self.refusal("queue", message, wait_s / max(1, len(least)), "queue_full")
        if wait_s > self._max_wait_s and len(least):
            raise self.refusal(
                "overload", f"The server has too much to do: this would have to wait for {math.ceil(wait_s)} s; "
                f"accepted: at most {self._max_wait_s:g} s.", wait_s - self._max_wait_s, "overloaded",
            )  # fmt: skip

    def _no_tokens(self, most: int, wait_s: float, wanted: int = 1) -> ApiError:
        message = f"This key may use {most} tokens in a minute, and has fewer than {wanted} of them left."
        return self.refusal("tokens", message, wait_s, "rate_limit_exceeded")


class Admission(AdmissionDecisions):
    """Of one server; `refused` hears the reason of each refusal."""

    def __init__(
        self,
        settings: Settings,
        queue_estimates: Mapping[str, QueuedWork],
        refused: Callable[[str], None] = lambda reason: None,
        used: Callable[[str, int], None] = lambda key_id, tokens: None,
    ) -> None:
        """`queue_estimates` are those of the served models, by name. `used` is called for each request that ended with
        its key and its tokens."""
        super().__init__(settings, queue_estimates, RateWindows(), refused)
        self._used = used
        self._limits = KeyLimits(settings.requests_per_minute, settings.tokens_per_minute, settings.concurrent_requests)
        self._deadline_s, self._longest = settings.deadline_s, settings.max_output_tokens
        self._tickets = set[RequestBudget]()
        self._lasts_s = 1.0  # a request, lately

    def begin(self, who: Principal, *, strict: bool = False) -> RequestBudget:
        """Let a request in, before anything of it is read.

        Raises:
            ApiError: 429, saying which limit, and when to come again.
        """
        key, limits = who.key_id or who.id, self.limits_of(who)
        if (over := exhausted(who.quota, who.used, time.time())) is not None:
            name, most, wait_s = over
            unit, _, span = name.partition("_per_")
            raise self.refusal(
                "quota", f"This key has used the {most} {unit} that it may in a {span} (UTC).", wait_s,
                "insufficient_quota",
            )  # fmt: skip
        self._check(self._queue_estimates.values())
        if (under_way := self._rates.enter(key, limits.concurrent)) is not None and limits.concurrent is not None:
            raise self.refusal(
                "concurrency", f"This key has {under_way} requests under way; accepted: at most "
                f"{limits.concurrent} at the same time.", self._lasts_s / limits.concurrent,
                "concurrency_limit_exceeded",
            )  # fmt: skip
        try:
            self._count(key, limits)
        except ApiError:
            self._rates.leave(key)
            raise
        request_budget = RequestBudget(
            self, key, limits, self.terms_of(who), counted=who.key_id is not None, strict=strict
        )
        self._tickets.add(request_budget)
        return request_budget

    def _count(self, key: str, limits: KeyLimits) -> None:
        """Counts a request among those of its key in the last minute.

        Raises:
            ApiError: as `begin`.
        """
        if limits.tokens is not None and (wait_s := self._rates.wait_s(key, limits.tokens, 1)):
            raise self._no_tokens(limits.tokens, wait_s)
        if limits.requests is not None and (wait_s := self._rates.request(key, limits.requests)):
            raise self.refusal(
                "requests", f"This key has made {limits.requests} requests in the last minute; accepted: at most "
                f"{limits.requests} a minute.", wait_s, "rate_limit_exceeded",
            )  # fmt: skip

    def share(self, rates: RateWindows) -> None:
        """From now on counts by `rates`, which other servers do, too; before any request."""
        self._rates = rates

    @property
    def by_priority(self) -> dict[int, int]:
        """Requests that were let in and have not ended, by class; of an API worker's, the class of its key."""
        return dict(sorted(Counter(request_budget.terms.priority for request_budget in self._tickets).items()))

    def left(self, request_budget: RequestBudget) -> None:
        self._tickets.discard(request_budget)
        self._rates.leave(request_budget.key)
        self._lasts_s += _LEARN * (time.monotonic() - request_budget.began - self._lasts_s)
        if request_budget.counted:
            self._used(request_budget.key, request_budget.tokens)

    def limits_of(self, who: Principal) -> KeyLimits:
        """The key's own, or else the server's for every key."""
        own, all_keys = who.quota, self._limits
        return KeyLimits(
            own.requests_per_minute or all_keys.requests, own.tokens_per_minute or all_keys.tokens,
            own.concurrent_requests or all_keys.concurrent,
        )  # fmt: skip

    def terms_of(self, who: Principal) -> RequestTerms:
        """Of the key or of its user, and within the server's for all."""
        own = who.quota
        return RequestTerms(
            own.priority or 0, _least(own.deadline_s, self._deadline_s), _least(own.max_output_tokens, self._longest),
            own.priority is not None,
        )  # fmt: skip

    def counts(self, key: str) -> Counts:
        """Returns the token counts of a key."""
        return self._rates.counts(key)

    def windows(self, who: Principal) -> list[Window]:
        """Returns the state of a key's limits."""
        return self._rates.windows(who.key_id or who.id, self.limits_of(who))


def _least(one: T | None, other: T | None) -> T | None:
    return min((each for each in (one, other) if each is not None), default=None)


REDUCED = "X-Ponder-Reduced"


class AdmissionGate:
    """ASGI middleware: 429, or a `RequestBudget` for the answer made inside."""

    def __init__(self, app: ASGIApp, *, admission: Callable[[], Admission]) -> None:
        self.app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_metered(scope["method"], scope["path"]):
            await self.app(scope, receive, send)
            return
        admission = self._admission()
        who: Principal = scope.get(WHO, LOCAL)

        def windows() -> list[Window]:
            return admission.windows(who)

        try:
            request_budget = admission.begin(who, strict=is_strict(Headers(scope=scope)))
        except ApiError as refusal:
            await note(scope, refusal).response()(scope, receive, _with_limits(send, windows))
            return
        await answered(self.app, request_budget, windows, scope, receive, send)


async def answered(
    app: ASGIApp,
    request_budget: RequestBudget,
    windows: Callable[[], list[Window]],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answer an admitted request, with its key's limits in the headers."""
    request_budget.use()
    try:
        await app(scope, receive, _with_limits(send, windows, request_budget))
    finally:
        request_budget.leave()


def _with_limits(send: Send, windows: Callable[[], list[Window]], request_budget: RequestBudget | None = None) -> Send:
    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            out = MutableHeaders(scope=message)
            for window in windows():
                out[f"x-ratelimit-limit-{window.what}"] = str(window.limit)
                out[f"x-ratelimit-remaining-{window.what}"] = str(window.remaining)
                out[f"x-ratelimit-reset-{window.what}"] = duration(window.reset_s)
            if request_budget is not None and request_budget.cut:
                out[REDUCED] = ", ".join(f'{what}="{value}"' for what, value in request_budget.cut.items())
        await send(message)

    return send_with_limits


def duration(seconds: float) -> str:
    """As OpenAI writes it: `350ms`, `12s`, `6m0s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def is_strict(headers: Headers) -> bool:
    """Returns whether the client prefers a refusal to less than it asks for (RFC 7240, 4.4)."""
    given = [part.strip().lower() for value in headers.getlist("prefer") for part in value.split(",")]
    return "handling=strict" in given
