"""Rate limits of one key, in a minute and at the same time, by the `limits` library, in memory.

Requests are a moving window: each counts for exactly a minute. Tokens are a sliding window counter, which costs the
same for any number of them: the minute before counts by the share of it that is less than a minute ago. An answer's
tokens count when they are written, also beyond the limit. The library counts by the wall clock; where that is set, all
counts begin anew, or a clock set back a day would refuse for a day. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

MINUTE_S = 60.0
_JUMP_S = 2.0  # of the wall clock against the monotonic one, since the last look
JUST_AFTER_S = 0.001  # a window still counts a request exactly as old as it is long

_TOKENS = RateLimitItemPerMinute(1, namespace="tokens")  # its amount is each key's own: only its name is used

What = Literal["requests", "tokens"]
Counts = tuple[int, float, int, float]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Of one key; None: none."""

    requests: int | None = None  # in a minute
    tokens: int | None = None  # in a minute
    concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """State of a limit: how much of it is left, and in how many seconds all of it will be."""

    what: What
    limit: int
    remaining: int
    reset_s: float


class RateWindows:
    """The windows of all keys of one server."""

    def __init__(self) -> None:
        self._storage = MemoryStorage()
        self._requests = MovingWindowRateLimiter(self._storage)
        self._ahead_s = time.time() - monotonic()  # of the wall clock
        self._under_way = Counter[str]()

    def enter(self, key: str, most: int | None) -> int | None:
        """Counts a request as under way; or returns the number of those that are, where they are `most` already."""
        if most is not None and self._under_way[key] >= most:
            return self._under_way[key]
        self._under_way[key] += 1
        return None

    def leave(self, key: str) -> None:
        """Counts a request as ended."""
        self._under_way[key] -= 1
        if not self._under_way[key]:
            del self._under_way[key]

    def _heed_clock(self) -> None:
        """Begin anew where the wall clock was set."""
        ahead_s = time.time() - monotonic()
        if abs(ahead_s - self._ahead_s) > _JUMP_S:
            self._storage.reset()
        self._ahead_s = ahead_s

    def request(self, key: str, limit: int) -> float:
        """Count a request. Seconds until the limit allows one more, where it does not now; else 0."""
        self._heed_clock()
        item = RateLimitItemPerMinute(limit, namespace="requests")
        if self._requests.hit(item, key):
            return 0.0
        return max(0.0, self._requests.get_window_stats(item, key).reset_time - time.time()) + JUST_AFTER_S

    def wait_s(self, key: str, limit: int, tokens: int) -> float:
        """Seconds until the limit allows `tokens`, at most `limit`; 0 where it does now."""
        before, before_s, now, now_s = self.counts(key)
        allowed = limit - tokens
        if before * before_s / MINUTE_S + now <= allowed:
            return 0.0
        if now <= allowed:
            return max(0.0, before_s - _counting_s(before, allowed - now)) + JUST_AFTER_S
        # Not in this minute of the clock: its tokens count less and less in the next.
        return now_s + MINUTE_S - _counting_s(now, allowed) + JUST_AFTER_S

    def spend(self, key: str, tokens: int) -> None:
        """Count tokens, also beyond the limit."""
        self._heed_clock()
        _, current = self._storage.sliding_window_keys(_TOKENS.key_for(key), _TOKENS.get_expiry(), time.time())
        self._storage.incr(current, 2 * _TOKENS.get_expiry(), amount=tokens)

    def windows(self, key: str, limits: KeyLimits) -> list[Window]:
        """Returns the state of a key's limits."""
        found: list[Window] = []
        if limits.requests is not None:
            count, reset_s = self.requests(key, limits.requests)
            found.append(Window("requests", limits.requests, max(0, limits.requests - count), reset_s))
        if limits.tokens is not None:
            before, before_s, now, now_s = self.counts(key)
            used = before * before_s / MINUTE_S + now
            reset_s = now_s + MINUTE_S if now else before_s if before else 0.0
            found.append(Window("tokens", limits.tokens, max(0, int(limits.tokens - used)), reset_s))
        return found

    def requests(self, key: str, limit: int) -> tuple[int, float]:
        """Requests of the last minute, `limit` at most, and the seconds until none of them counts any more."""
        self._heed_clock()
        item = RateLimitItemPerMinute(limit, namespace="requests")
        began, count = self._storage.get_moving_window(item.key_for(key), limit, item.get_expiry())
        if not count:
            return 0, 0.0
        return count, max(0.0, MINUTE_S - (time.time() - self._newest(item.key_for(key), began)))

    def counts(self, key: str) -> Counts:
        """Tokens of the minute of the clock before this one, and for how long the first of them counts still; those of
        this one, and how long it lasts."""
        self._heed_clock()
        before, before_s, now, now_s = self._storage.get_sliding_window(_TOKENS.key_for(key), _TOKENS.get_expiry())
        return before, before_s, now, now_s - MINUTE_S

    def _newest(self, key: str, began: float) -> float:
        events = self._storage.events.get(key)
        return events[0].atime if events else began


def _counting_s(counted: int, allowed: int) -> float:
    """Seconds of a minute in which the weight of the `counted` before is `allowed` or less."""
    return MINUTE_S if not counted else min(MINUTE_S, MINUTE_S * allowed / counted)
