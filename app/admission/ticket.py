"""One request's leave to be answered: what it may still cost, and what of it was cut because many wait.

There is one from the moment that a request is let in until all that answers it has ended. It is found by `current`
wherever the answer is made, for a run also after the request. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

from reasoning.budget import ThinkingBudget

if TYPE_CHECKING:
    from app.admission.admission import Deciding
    from app.admission.rates import KeyLimits
    from app.auto import Prompted
    from app.manner import Manner
    from app.served import Served

_SPENT_AT_ONCE = 64  # tokens that are counted together

_current: ContextVar[Ticket | None] = ContextVar("_current", default=None)


class Ticket:
    """Of the key `key`, or of everybody where there are none; `strict`: its client would rather be refused than get
    less. `tokens` were read and written so far."""

    def __init__(
        self, admission: Deciding, key: str, limits: KeyLimits, *, counted: bool = False, strict: bool = False
    ) -> None:
        """`counted`: what it uses is noted for the key."""
        self.key = key
        self.counted = counted
        self.strict = strict
        self.tokens = 0
        self.began = time.monotonic()
        self._limits = limits
        self._admission = admission
        self._holders = 1
        self._spent = 0
        self._thinking: dict[str, int] = {}  # what is left of it, by model
        self._models: list[str] = []  # that `auto` may ask, where that is not all

    @staticmethod
    def current() -> Ticket | None:
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

    # -- what it may cost

    def enter(self, *among: Served) -> None:
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

    # -- what is made less

    @property
    def cut(self) -> dict[str, str]:
        """What was made less, and what is left of it."""
        thinking = {"thinking": str(min(self._thinking.values()))} if self._thinking else {}
        return {**thinking, "models": " ".join(self._models)} if self._models else thinking

    def manner(self, manner: Manner, served: Served) -> Manner:
        """`manner`, with less thinking where many wait for the model."""
        most = self._admission.thinking_left(served)
        if self.strict or most is None or served.markers is None or manner.strategy is not None:
            return manner
        if manner.unthinking or manner.thinks is False:
            return manner
        budget = manner.budget
        if budget is not None and budget.max_tokens is not None and budget.max_tokens <= most:
            return manner
        kept = budget or ThinkingBudget()
        less = replace(kept, max_tokens=most, min_tokens=min(kept.min_tokens, most), waits=0)
        self._thinking[served.name] = most
        return replace(manner, budget=less, thinks=manner.thinks if budget is None else True, reduced=True)

    def rungs(self, asked: Sequence[Prompted]) -> list[Prompted]:
        """Of the models that `auto` would ask, in order, those before the first that many wait for; one at least."""
        kept = list(asked)
        if self.strict:
            return kept
        busy = [at for at, each in enumerate(kept) if at and self._admission.thinking_left(each.served) is not None]
        if busy:
            kept = kept[: busy[0]]
            self._models = [each.served.name for each in kept]
            self._thinking = {name: most for name, most in self._thinking.items() if name in self._models}
        return kept


def enter(*among: Served) -> None:
    """One of these models is to answer the current request.

    Raises:
        ApiError: 429: all of them have too much to do.
    """
    if (ticket := Ticket.current()) is not None:
        ticket.enter(*among)


def charge(tokens: int) -> None:
    """The current request makes a model read so many tokens.

    Raises:
        ApiError: 429: its key has too few left for now.
    """
    if (ticket := Ticket.current()) is not None:
        ticket.charge(tokens)


def with_room(manner: Manner, served: Served) -> Manner:
    """`manner`, as much of it as the current request is given."""
    return manner if (ticket := Ticket.current()) is None else ticket.manner(manner, served)


def rungs(asked: Sequence[Prompted]) -> list[Prompted]:
    """The models that the current request may ask, of those that `auto` would."""
    return list(asked) if (ticket := Ticket.current()) is None else ticket.rungs(asked)
