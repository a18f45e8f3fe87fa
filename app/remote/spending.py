"""Tokens and money that a remote model has used, by UTC day, and its budgets.

A request reserves what it may cost at most before it is sent, and is settled by what it did cost: requests at the same
time cannot go over a budget together. Knows nothing of where the counts are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from app.config.remote_settings import RemoteSettings
from app.db.quotas import RemoteUse, day_of, resets
from app.remote.wire_formats import RemoteError


class Spending:
    """Of one remote model. `listeners` hear the use of each request that has ended."""

    def __init__(self, settings: RemoteSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._days: dict[str, tuple[int, float]] = {}  # tokens and cost
        self._reserved = (0, 0.0)
        self.listeners: list[Callable[[RemoteUse], None]] = []

    def load(self, uses: Iterable[RemoteUse]) -> None:
        """Takes up what was used before this server started."""
        for use in uses:
            self._add(use)

    def reserve(self, prompt: int, completion: int) -> tuple[int, float]:
        """Reserves so many tokens and their cost; `settle` gives them back. Raises as `check`."""
        wanted = self.check(prompt, completion)
        self._reserved = (self._reserved[0] + wanted[0], self._reserved[1] + wanted[1])
        return wanted

    def check(self, prompt: int, completion: int) -> tuple[int, float]:
        """Returns the tokens that a request may take, and their cost.

        Raises:
            RemoteError: 429 `remote_budget_exhausted`: a budget would be passed. The message has the limit and when it
                begins anew.
        """
        settings, now = self._settings, self._clock()
        wanted = (prompt + completion, settings.cost(prompt, completion))
        tomorrow, next_month = resets(now)
        for span, anew, tokens, money in (
            ("day", tomorrow, settings.tokens_per_day, settings.cost_per_day),
            ("month", next_month, settings.tokens_per_month, settings.cost_per_month),
        ):
            used = self._used(now, span)
            for at, unit, most in ((0, " tokens", tokens), (1, "", money)):
                if most is not None and used[at] + self._reserved[at] + wanted[at] > most:
                    left = max(0, most - used[at] - self._reserved[at])
                    raise RemoteError(
                        429, f"The budget of the remote model {settings.name!r} is {most:g}{unit} in a {span} (UTC), "
                        f"of which {left:g} are left, and this request may take {wanted[at]:g}; accepted: a smaller "
                        f"max_tokens, or another model until {anew:%Y-%m-%d}.", "remote_budget_exhausted",
                        wait_s=anew.timestamp() - now,
                    )  # fmt: skip
        return wanted

    def settle(self, reserved: tuple[int, float], prompt: int, completion: int) -> float:
        """Records what a request used in the place of what was `reserved` for it; returns its cost."""
        self._reserved = (self._reserved[0] - reserved[0], max(0.0, self._reserved[1] - reserved[1]))
        cost = self._settings.cost(prompt, completion)
        use = RemoteUse(day_of(self._clock()), 1, prompt, completion, cost)
        self._add(use)
        for hear in self.listeners:
            hear(use)
        return cost

    def _add(self, use: RemoteUse) -> None:
        tokens, cost = self._days.get(use.day, (0, 0.0))
        self._days[use.day] = tokens + use.tokens, cost + use.cost

    def _used(self, now: float, span: str) -> tuple[int, float]:
        prefix = day_of(now)[: 10 if span == "day" else 7]
        found = [used for day, used in self._days.items() if day.startswith(prefix)]
        return sum(tokens for tokens, _ in found), sum(cost for _, cost in found)
