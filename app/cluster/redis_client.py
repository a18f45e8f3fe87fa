"""Connections to Redis: how its address is read, what it is refused for, and how long anybody waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.config import BadSetting

if TYPE_CHECKING:
    from redis import Redis as BlockingRedis
    from redis.asyncio import Redis

MIN_VERSION = (6, 2)
CALL_S = 2.0  # for a call that waits for nothing
BLOCK_S = 2.0  # for one that waits for something to come
_CONNECT_S = 2.0
_REPLY_S = 30.0  # beyond every wait: what is silent for longer is lost
_DECISION_S = 0.25  # for a limit's count, which a request waits for


def redis_client(address: str) -> Redis:
    """Returns a client for an event loop, without connecting.

    Raises:
        BadSetting: the client's package is not installed, or the address has options that it does not know.
    """
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise _not_installed(error) from None
    retry = Retry(NoBackoff(), 1)  # one more, on a new connection: Redis may have closed an idle one
    return _made(Redis, address, retry=retry, socket_timeout=_REPLY_S)


def blocking_client(address: str) -> BlockingRedis:
    """Returns a client whose calls block the thread, for a moment at most. Raises as `redis_client`."""
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise _not_installed(error) from None
    return _made(Redis, address, retry=Retry(NoBackoff(), 1), socket_timeout=_DECISION_S)


def _made(kind: Any, address: str, *, retry: Any, socket_timeout: float) -> Any:  # Any: of either kind
    tcp = {} if address.startswith("unix:") else {"socket_keepalive": True}
    try:
        # Replies in one shape whatever the package's version.
        return kind.from_url(
            address, decode_responses=True, protocol=2, retry=retry, socket_timeout=socket_timeout,
            socket_connect_timeout=min(socket_timeout, _CONNECT_S), **tcp,
        )  # fmt: skip
    except (TypeError, ValueError):  # its words may have a part of the password
        raise BadSetting("The address of redis cannot be read; accepted: redis://HOST:PORT/NUMBER.") from None


def entries_of(reply: Any, stream: str) -> list[tuple[str, dict[str, str]]]:  # Any: redis-py's is of all shapes
    """Returns the entries of a stream in a reply of XREAD, each its id and fields."""
    found: dict[str, list[tuple[str, dict[str, str]]]] = dict(reply or ())
    return found.get(stream, [])


def _not_installed(error: ImportError) -> BadSetting:
    return BadSetting(
        f"The client of Redis cannot be loaded ({error}); accepted: a Ponder that is installed with it, by "
        "`pip install 'ponder[redis]'`, or no --redis: one server needs none."
    )


async def check_redis(address: str) -> None:
    """
    Raises:
        BadSetting: the client's package is not installed, no Redis answers there, or it is too old.
    """
    client = redis_client(address)
    try:
        async with client:
            version = str((await client.info("server"))["redis_version"])
    except _errors() as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise BadSetting(
            f"No Redis answers at the address of --redis: {reason}. Accepted: the address of a Redis server of version "
            f"{MIN_VERSION[0]}.{MIN_VERSION[1]} or newer that is running, such as redis://localhost:6379/0."
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise BadSetting(f"Redis is {version}; accepted: {MIN_VERSION[0]}.{MIN_VERSION[1]} or newer.")


def _errors() -> tuple[type[Exception], ...]:
    from redis.exceptions import RedisError

    return RedisError, OSError, TimeoutError
