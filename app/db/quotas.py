"""Quotas of a key and its usage: limits of a minute, a day and a month, and counts by day, also of a remote model.

Days and months are UTC's. Knows nothing of who holds to them.
"""

from __future__ import annotations

import json
from calendar import monthrange
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a key, or of all keys of a user that say nothing themselves.

    None: the server's own limit for a minute and at once, none for a day and a month. `priority` is the best class that
    requests may have, and the one of those that name none; lower runs first.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    requests_per_day: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    priority: int | None = None
    deadline_s: int | None = None  # seconds that an answer may take
    max_output_tokens: int | None = None  # of one answer

    def stored(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @classmethod
    def read(cls, stored: str | None) -> Quota:
        return cls(**json.loads(stored or "{}"))

    def over(self, other: Quota) -> Quota:
        """These limits, and where they say nothing those of `other`."""
        return Quota(**{name: mine if (mine := getattr(self, name)) is not None else getattr(other, name)
                        for name in QUOTAS})  # fmt: skip


QUOTAS: tuple[str, ...] = tuple(field.name for field in fields(Quota))
USER_QUOTAS = ("priority", "deadline_s", "max_output_tokens")  # which a user may have, for all their keys
MAX_PRIORITY = 100  # classes are from its negative to it
MAX_DEADLINE_S = 86_400


@dataclass(frozen=True, slots=True)
class Used:
    """By a key, so far."""

    requests_today: int = 0
    tokens_today: int = 0
    tokens_this_month: int = 0


@dataclass(frozen=True, slots=True)
class RemoteUse:
    """Use of a day: `prompt` and `completion` in tokens, `cost` in the currency of the remote's prices."""

    day: str
    requests: int = 0
    prompt: int = 0
    completion: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion


def exhausted(quota: Quota, so_far: Used, now: float) -> tuple[str, int, float] | None:
    """The first quota that is used up, by its name, its value, and the seconds until it begins anew."""
    tomorrow, next_month = resets(now)
    for name, spent, anew in (
        ("tokens_per_month", so_far.tokens_this_month, next_month),
        ("tokens_per_day", so_far.tokens_today, tomorrow),
        ("requests_per_day", so_far.requests_today, tomorrow),
    ):
        most: int | None = getattr(quota, name)
        if most is not None and spent >= most:
            return name, most, anew.timestamp() - now
    return None


def resets(now: float) -> tuple[datetime, datetime]:
    """Returns the beginnings of the next day and of the next month."""
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    next_month = today.replace(day=1) + timedelta(days=monthrange(today.year, today.month)[1])
    return today + timedelta(days=1), next_month


def day_of(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d")
