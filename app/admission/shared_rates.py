"""Rate limits of one key across the servers of one database, counted in Redis.

The windows are those of `rate_limits.py`: requests by a sorted set of their moments, tokens by a counter for each
minute of the clock, requests under way by a hash of each server, which is gone some seconds after its server. All
moments are of Redis's clock, so the servers' own need not agree. A script decides and counts in one step, so two
servers cannot both take the last place. Without Redis each server counts alone, and tries it again after some seconds.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.admission.rate_limits import JUST_AFTER_S, MINUTE_S, Counts, RateWindows

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger("ponder")

_AWAY_S = 5.0  # without a look at a Redis that did not answer
_UNDER_WAY_S = 10  # that the counts of a server stand without a change or a renewal

_NOW = "local t = redis.call('TIME') local now = t[1] + t[2] / 1e6 "
# KEYS: the set; ARGV: limit, a new member, or '' to look. Returns the count, seconds until one counts less, until none
# counts, and 1 where the request was counted.
_REQUEST = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - 60)
local limit, count, taken, wait = tonumber(ARGV[1]), redis.call('ZCARD', KEYS[1]), 0, 0
if ARGV[2] ~= '' and count < limit then
  redis.call('ZADD', KEYS[1], now, ARGV[2])
  redis.call('PEXPIRE', KEYS[1], 61000)
  count, taken = count + 1, 1
end
if count >= limit then
  local at = redis.call('ZRANGE', KEYS[1], count - limit, count - limit, 'WITHSCORES')
  wait = at[2] + 60 - now
end
local newest = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
return {count, tostring(wait), tostring(newest[2] and newest[2] + 60 - now or 0), taken}
"""
)
# KEYS: how the counters begin; ARGV: tokens, 0 to look. Returns those of the minute before and of this one, and the
# seconds that are left of it.
_TOKENS = (
    _NOW
    + """
local minute = math.floor(now / 60)
local before = redis.call('GET', KEYS[1] .. (minute - 1)) or 0
local count = redis.call('GET', KEYS[1] .. minute) or 0
if tonumber(ARGV[1]) > 0 then
  count = redis.call('INCRBY', KEYS[1] .. minute, ARGV[1])
  redis.call('EXPIRE', KEYS[1] .. minute, 180)
end
return {tonumber(before), tonumber(count), tostring((minute + 1) * 60 - now)}
"""
)
# KEYS: the set of servers, and how their hashes begin; ARGV: this server, the key, its requests here, the limit, or -1
# to note them. Returns those of the other servers, and 1 where one more was noted.
_UNDER_WAY = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[5])
local others, here, limit, taken = 0, tonumber(ARGV[3]), tonumber(ARGV[4]), 0
for _, server in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if server ~= ARGV[1] then others = others + (redis.call('HGET', KEYS[2] .. server, ARGV[2]) or 0) end
end
if limit >= 0 and others + here < limit then here, taken = here + 1, 1 end
if here > 0 then redis.call('HSET', KEYS[2] .. ARGV[1], ARGV[2], here)
else redis.call('HDEL', KEYS[2] .. ARGV[1], ARGV[2]) end
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('EXPIRE', KEYS[2] .. ARGV[1], ARGV[5])
return {others, taken}
"""
)


class SharedRates(RateWindows):
    """The windows of all keys of several servers. A call blocks for half a second at most, and then none for some."""

    def __init__(self, redis: Redis, namespace: str, name: str) -> None:
        super().__init__()
        self._redis = redis
        self._prefix = f"{namespace}:rate:"
        self._name = name
        self._away_until = float("-inf")
        self._limited = set[str]()  # keys whose requests under way the others count
        self._scripts = {text: redis.register_script(text) for text in (_REQUEST, _TOKENS, _UNDER_WAY)}

    def close(self) -> None:
        self._redis.close()

    def _ask(self, script: str, keys: Sequence[str], *arguments: str | int) -> list[Any] | None:
        """Returns a script's reply, of numbers and texts; None where Redis does not answer."""
        from redis.exceptions import RedisError

        if time.monotonic() < self._away_until:
            return None
        try:
            return self._scripts[script](keys=[self._prefix + key for key in keys], args=list(arguments))
        except (RedisError, OSError) as error:
            self._away_until = time.monotonic() + _AWAY_S
            log.warning("Redis does not count: for %g s limits are this server's alone (%s)", _AWAY_S, error)
            return None

    def request(self, key: str, limit: int) -> float:
        found = self._ask(_REQUEST, [f"requests:{key}"], limit, secrets.token_hex(8))
        if found is None:
            return super().request(key, limit)
        return 0.0 if found[3] else max(0.0, float(found[1])) + JUST_AFTER_S

    def requests(self, key: str, limit: int) -> tuple[int, float]:
        found = self._ask(_REQUEST, [f"requests:{key}"], limit, "")
        return super().requests(key, limit) if found is None else (found[0], max(0.0, float(found[2])))

    def spend(self, key: str, tokens: int) -> None:
        if self._ask(_TOKENS, [f"tokens:{key}:"], tokens) is None:
            super().spend(key, tokens)

    def counts(self, key: str) -> Counts:
        found = self._ask(_TOKENS, [f"tokens:{key}:"], 0)
        if found is None:
            return super().counts(key)
        before, now, left_s = found[0], found[1], min(MINUTE_S, float(found[2]))
        return before, left_s if before else 0.0, now, left_s

    def enter(self, key: str, most: int | None) -> int | None:
        if most is not None and (found := self._note(key, most)) is not None:
            others, taken = found
            return super().enter(key, None) if taken else others + self._under_way[key]
        return super().enter(key, most)

    def leave(self, key: str) -> None:
        super().leave(key)
        if key in self._limited:
            self._note(key, -1)
            if not self._under_way[key]:
                self._limited.discard(key)

    def _note(self, key: str, most: int) -> tuple[int, bool] | None:
        """Tells the others the requests of a key that are under way here, and one more where fewer than `most` are
        anywhere. Returns the others' count, and whether there is one more."""
        self._limited.add(key)
        found = self._ask(
            _UNDER_WAY, ["servers", "under_way:"], self._name, key, self._under_way[key], most, _UNDER_WAY_S
        )
        return None if found is None else (found[0], bool(found[1]))

    async def keep(self) -> None:
        """Has the counts of what is under way stand, for ever."""
        while True:
            await asyncio.sleep(_UNDER_WAY_S / 4)
            for key in list(self._limited):
                self._note(key, -1)
