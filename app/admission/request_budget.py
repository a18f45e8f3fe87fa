"""One request's budget: the tokens it may still cost, and the reductions because many wait.

There is one from the moment that a request is admitted until all that answers it has ended. It is found by `current`
wherever the answer is made, for a run also after the request. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypedDict

from app.db.quotas import MAX_DEADLINE_S, MAX_PRIORITY
from app.errors import ApiError, invalid

if TYPE_CHECKING:
    from app.admission.rate_limits import KeyLimits
    from app.answering.served_model import ServedModel

PRIORITY = f"an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}: lower runs first; 0 unless the key says otherwise"
DEADLINE = f"seconds above 0, up to {MAX_DEADLINE_S}, after which the answer ends as it is"

_SPENT_AT_ONCE = 64  # tokens that are counted together

_current: ContextVar[RequestBudget | None] = ContextVar("_current", default=None)


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """A request's scheduling class (lower runs first), the seconds that its answer may take, and the tokens of it."""

    priority: int = 0
    deadline_s: float | None = None
    max_output_tokens: int | None = None
    priority_is_a_limit: bool = False  # of the key: no request of it has a better one


class Admitter(Protocol):
    """Decides an admitted request's further demands: admission here, or a worker's client of it."""

    def left(self, request_budget: RequestBudget) -> None: ...

    def check(self, among: Iterable[ServedModel]) -> None: ...

    def check_priority(self, priority: int | None) -> None: ...

    def charge(self, key: str, most: int, tokens: int) -> None: ...

    def spend(self, key: str, tokens: int) -> None: ...

    def thinking_left(self, served: ServedModel) -> int | None: ...


class RequestBudget:
    """Of the key `key`, or of everybody where there are none; `strict`: its client would rather be refused than get
    less. `tokens` were read and written so far."""

    def __init__(
        self,
        admission: Admitter,
        key: str,
        limits: KeyLimits,
        terms: RequestTerms | None = None,
        *,
        counted: bool = False,
        strict: bool = False,
    ) -> None:
        """`terms` are the best that its key may have. `counted`: its tokens are counted for the key."""
        self.key = key
        self.counted = counted
        self.strict = strict
        self.terms = terms or RequestTerms()
        self.tokens = 0
        self.began = time.monotonic()
        self._limits = limits
        self._admission = admission
        self._holders = 1
        self._spent = 0
        self._thinking: dict[str, int] = {}  # the thinking limit, by model
        self._models: list[str] = []  # that `auto` may ask, where that is not all

    @staticmethod
    def current() -> RequestBudget | None:
        """That of the request being answered here; None of work that nobody asked for just now."""
        return _current.get()

    def use(self) -> None:
        """Make it the current one."""
        _current.set(self)

    # -- how long it lasts

    def hold(self) -> None:
        """Something more answers it."""
        self._holders += 1

    def leave(self) -> None:
        """Something that answers it has ended; with the last of them, so has the request."""
        self._holders -= 1
        if not self._holders:
            self.spend(0)
            self._admission.left(self)

    # -- its class, its deadline and its length

    def narrow(self, priority: int | None, deadline_s: float | None) -> None:
        """Give the request the class and deadline that it names.

        Raises:
            ApiError: 400: they are better than its key may have, or the server's policy knows no classes.
        """
        self._admission.check_priority(priority)
        mine = self.terms
        if priority is not None and priority < mine.priority and mine.priority_is_a_limit:
            raise invalid(
                "priority", f"priority is {priority}; accepted: {mine.priority} (the best class of this key) to "
                f"{MAX_PRIORITY}; lower runs first.",
            )  # fmt: skip
        if deadline_s is not None and mine.deadline_s is not None and deadline_s > mine.deadline_s:
            message = f"deadline_s is {deadline_s:g}; accepted: at most {mine.deadline_s:g} seconds for this request."
            raise invalid("deadline_s", message)
        self.terms = replace(
            mine, priority=mine.priority if priority is None else priority,
            deadline_s=mine.deadline_s if deadline_s is None else deadline_s,
        )  # fmt: skip

    @property
    def left_s(self) -> float | None:
        """Seconds until its deadline, counted from its arrival.

        Raises:
            ApiError: 408: it has passed.
        """
        if self.terms.deadline_s is None:
            return None
        left = self.terms.deadline_s - (time.monotonic() - self.began)
        if left <= 0:
            raise too_late(self.terms.deadline_s)
        return left

    # -- cost

    def enter(self, *among: ServedModel) -> None:
        """One of these models is to answer.

        Raises:
            ApiError: 429: all of them have too much to do.
        """
        self._admission.check(among)

    def charge(self, tokens: int) -> None:
        """A prompt of so many tokens is to be read.

        Raises:
            ApiError: 429: the key has too few left for now.
        """
        if self._limits.tokens is not None:
            self._admission.charge(self.key, self._limits.tokens, tokens)
        self.tokens += tokens

    def spend(self, tokens: int) -> None:
        """So many tokens were written."""
        self.tokens += tokens
        if self._limits.tokens is None:
            return
        self._spent += tokens
        if self._spent >= _SPENT_AT_ONCE or (self._spent and not self._holders):
            self._admission.spend(self.key, self._spent)
            self._spent = 0

    # -- reductions

    @property
    def cut(self) -> dict[str, str]:
        """The reduced parts of the request, and the rest of each."""
        thinking = {"thinking": str(min(self._thinking.values()))} if self._thinking else {}
        return {**thinking, "models": " ".join(self._models)} if self._models else thinking

    def thinking_limit(self, served: ServedModel) -> int | None:
        """The most tokens that an answer may think while many wait for the model; None: no limit."""
        return None if self.strict else self._admission.thinking_left(served)

    def reduce_thinking(self, model: str, max_tokens: int) -> None:
        """Records that the model's thinking was cut to so many tokens."""
        self._thinking[model] = max_tokens

    def reduce_models(self, models: Sequence[str]) -> None:
        """Records that only these models of a cascade may be asked."""
        self._models = list(models)
        self._thinking = {name: most for name, most in self._thinking.items() if name in self._models}


def too_late(deadline_s: float) -> ApiError:
    message = f"The answer was not begun within {deadline_s:g} s, the request's deadline."
    return ApiError(408, message, code="deadline_exceeded", kind="server_error")


def narrow(priority: int | None, deadline_s: float | None) -> None:
    """Give the current request the class and deadline that it names.

    Raises:
        ApiError: 400: its key may not have them.
    """
    if (request_budget := RequestBudget.current()) is not None:
        request_budget.narrow(priority, deadline_s)


class Scheduling(TypedDict):
    """Arguments of `Engine.open`."""

    priority: int
    deadline_s: float | None


def scheduling() -> Scheduling:
    """The current request's class, and the seconds that are left of its deadline.

    Raises:
        ApiError: 408: none are.
    """
    if (request_budget := RequestBudget.current()) is None:
        return {"priority": 0, "deadline_s": None}
    return {"priority": request_budget.terms.priority, "deadline_s": request_budget.left_s}


def priority() -> int:
    """The current request's class."""
    return 0 if (request_budget := RequestBudget.current()) is None else request_budget.terms.priority


def output_limit(asked: int | None, param: str = "max_tokens") -> int | None:
    """The most tokens that an answer to the current request may have; None: as many as the context has.

    Raises:
        ApiError: 400: more are asked for.
    """
    most = None if (request_budget := RequestBudget.current()) is None else request_budget.terms.max_output_tokens
    if most is not None and asked is not None and asked > most:
        message = f"{param} is {asked}; accepted: at most {most}, the longest answer of this key or server."
        raise invalid(param, message)
    return most


def enter(*among: ServedModel) -> None:
    """One of these models is to answer the current request.

    Raises:
        ApiError: 429: all of them have too much to do.
    """
    if (request_budget := RequestBudget.current()) is not None:
        request_budget.enter(*among)


def charge(tokens: int) -> None:
    """The current request makes a model read so many tokens.

    Raises:
        ApiError: 429: its key has too few left for now.
    """
    if (request_budget := RequestBudget.current()) is not None:
        request_budget.charge(tokens)
