"""Limits of a key that several servers count together, on a real Redis; time passes by making what it has older."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from app.admission.admission import Admission
from app.admission.queue_estimate import QueueEstimate
from app.admission.rate_limits import KeyLimits, RateWindows
from app.admission.shared_rates import SharedRates
from app.auth import Principal
from app.cluster.redis_client import blocking_client
from app.config import Settings
from app.errors import ApiError
from tests.app.cluster.redis_server import RedisServer, redis_server

ANA = Principal("ana", "Ana", "user", "key_a")
_numbers = itertools.count()

Servers = list[SharedRates]


@pytest.fixture
def two(redis: RedisServer) -> Iterator[Servers]:
    """The counts of two servers of a database of their own."""
    namespace = f"rates-{next(_numbers)}"
    made = [SharedRates(blocking_client(redis.address), namespace, name) for name in ("a", "b")]
    yield made
    for each in made:
        each.close()


def pass_time(rates: SharedRates, key: str, seconds: float) -> None:
    name = f"{rates._prefix}requests:{key}"
    found: list[tuple[str, float]] = rates._redis.zrange(name, 0, -1, withscores=True)  # type: ignore[assignment]  # redis-py's is of all its replies
    rates._redis.zadd(name, {member: at - seconds for member, at in found})


def test_requests_of_a_minute_are_counted_by_all(two: Servers) -> None:
    first, second = two
    assert [each.request("k", 3) for each in (first, second, first)] == [0.0, 0.0, 0.0]
    for each in two:
        assert 59 < each.request("k", 3) <= 60.01
        (window,) = each.windows("k", KeyLimits(requests=3))
        assert (window.what, window.limit, window.remaining) == ("requests", 3, 0) and 59 < window.reset_s <= 60
        assert each.request("another", 3) == 0.0
    pass_time(first, "k", 59.8)
    wait_s = second.request("k", 3)
    assert 0 < wait_s < 0.3
    time.sleep(wait_s)
    assert second.request("k", 3) == 0.0 and first.windows("k", KeyLimits(requests=3))[0].remaining >= 0


def test_windows_are_those_of_one_server(two: Servers) -> None:
    """Without any time between, all of them say what the counts in memory say."""
    alone, limits = RateWindows(), KeyLimits(requests=5, tokens=1000)
    for each in (alone, two[0]):
        assert each.windows("k", limits)[0].reset_s == 0.0
        assert [each.request("k", 5) for _ in range(3)] == [0.0] * 3
        each.spend("k", 400)
    told = [each.windows("k", limits) for each in (alone, *two)]
    assert {tuple((window.what, window.limit, window.remaining) for window in each) for each in told} == {
        (("requests", 5, 2), ("tokens", 1000, 600))
    }
    for other in told[1:]:
        assert [window.reset_s for window in other] == pytest.approx([window.reset_s for window in told[0]], abs=0.5)
    assert [each.wait_s("k", 1000, 600) for each in (alone, *two)] == [0.0] * 3
    waits = [each.wait_s("k", 1000, 601) for each in (alone, *two)]
    assert waits[0] > 0 and waits[1:] == pytest.approx([waits[0]] * 2, abs=0.5)


def test_tokens_of_the_minute_before_count_less_and_less(two: Servers) -> None:
    first, second = two
    first.spend("k", 600)
    redis, minute = first._redis, int(time.time() // 60)
    redis.rename(f"{first._prefix}tokens:k:{minute}", f"{first._prefix}tokens:k:{minute - 1}")
    before, before_s, now, now_s = second.counts("k")
    assert (before, now) == (600, 0) and 0 < before_s == pytest.approx(now_s)
    second.spend("k", 50)
    assert first.counts("k")[2] == 50
    used = 600 * before_s / 60 + 50
    assert first.windows("k", KeyLimits(tokens=1000))[0].remaining == pytest.approx(1000 - used, abs=2)


def test_of_requests_at_the_same_time_as_many_are_let_in_as_may_be(redis: RedisServer) -> None:
    namespace = f"rates-{next(_numbers)}"
    let_in = list[float]()

    def ask(name: str) -> None:
        rates = SharedRates(blocking_client(redis.address), namespace, name)
        let_in.extend(rates.request("k", 20) for _ in range(20))
        rates.close()

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(let_in) == 60 and let_in.count(0.0) == 20


def test_requests_under_way_are_counted_by_all_and_go_with_their_server(two: Servers) -> None:
    first, second = two
    assert first.enter("k", 2) is None and second.enter("k", 2) is None
    assert first.enter("k", 2) == 2 and second.enter("k", 2) == 2
    assert first.enter("another", 2) is None
    first.leave("k")
    assert second.enter("k", 2) is None and first.enter("k", 2) == 2
    # The second dies: nothing says that it lives any more.
    second._redis.zadd(f"{second._prefix}servers", {"b": time.time() - 11})
    assert first.enter("k", 2) is None and first.enter("k", 2) is None and first.enter("k", 2) == 2
    second._note("k", -1)  # it lived after all
    first.leave("k")
    assert first.enter("k", 2) == 3, "two of the second's, and one here"


def test_without_redis_each_server_counts_alone(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server() as redis:
        rates = SharedRates(blocking_client(redis.address), "rates", "a")
        assert rates.request("k", 1) == 0.0
        redis.stop()
        with caplog.at_level(logging.WARNING):
            began = time.monotonic()
            assert rates.request("k", 1) == 0.0 and rates.request("k", 1) > 0
            assert rates.enter("k", 1) is None and rates.enter("k", 1) == 1
            rates.spend("k", 5)
            assert rates.counts("k")[2] == 5 and rates.windows("k", KeyLimits(requests=1))[0].remaining == 0
            assert time.monotonic() - began < 2
        assert len([each for each in caplog.messages if "Redis does not count" in each]) == 1
        redis.start()
        rates._away_until = 0.0
        assert rates.request("k", 1) == 0.0
        rates.close()


REFUSALS: dict[str, tuple[Settings, Callable[[Admission], object]]] = {
    "rate_limit_exceeded": (Settings(requests_per_minute=2), lambda admission: admission.begin(ANA).leave()),
    "concurrency_limit_exceeded": (Settings(concurrent_requests=2), lambda admission: admission.begin(ANA)),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_is_that_of_one_server(two: Servers, code: str) -> None:
    settings, ask = REFUSALS[code]
    alone = Admission(settings, {"m": QueueEstimate(4)})
    shared = [Admission(settings, {"m": QueueEstimate(4)}) for _ in two]
    for admission, rates in zip(shared, two, strict=True):
        admission.share(rates)
    told = []
    for several in ([alone], shared):
        for turn in range(2):
            ask(several[turn % len(several)])
        with pytest.raises(ApiError) as refused:
            ask(several[0])
        assert refused.value.code == code and refused.value.status == 429
        said, _, wait = refused.value.message.partition(" Try again in ")
        assert wait == f"{refused.value.headers['Retry-After']} s."
        told.append((said, int(refused.value.headers["Retry-After"])))
    assert told[0][0] == told[1][0] and abs(told[0][1] - told[1][1]) <= 1
