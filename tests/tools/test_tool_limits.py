"""Rates: how often a user may call, counted in every window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tools.limits import Rate, RateLimits


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(
    count=st.integers(1, 5),
    unit=st.sampled_from(["s", "min"]),
    waits=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 20.0, 59.9, 60.0]), max_size=60),
)
def test_no_window_holds_more_calls_than_the_rate(count: int, unit: str, waits: list[float]) -> None:
    clock = Clock()
    limits, rate = RateLimits(clock), Rate.parse(f"{count}/{unit}")
    taken = list[float]()
    for wait in waits:
        clock.now += wait
        inside = sum(1 for time in taken if clock.now - time < rate.period_s)
        refused_for = limits.take("ana", "weather", rate)
        assert (refused_for > 0) == (inside >= count), "refused exactly when the window is full"
        if refused_for == 0:
            taken.append(clock.now)


def test_after_the_wait_that_was_told_a_call_goes_through() -> None:
    clock = Clock()
    limits, rate = RateLimits(clock), Rate.parse("2/min")
    assert [limits.take("ana", "weather", rate) for _ in range(2)] == [0, 0]
    clock.now += 10
    wait = limits.take("ana", "weather", rate)
    assert wait == 50
    clock.now += wait
    assert limits.take("ana", "weather", rate) == 0


def test_users_and_tools_do_not_share_a_rate() -> None:
    limits, rate = RateLimits(Clock()), Rate.parse("1/day")
    assert limits.take("ana", "weather", rate) == 0
    assert limits.take("ben", "weather", rate) == 0
    assert limits.take("ana", "news", rate) == 0
    assert limits.take("ana", "weather", rate) > 0


def test_a_reload_with_a_lower_rate_counts_what_was_called() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    for _ in range(5):
        limits.take("ana", "weather", Rate.parse("5/min"))
        clock.now += 1
    wait = limits.take("ana", "weather", Rate.parse("2/min"))
    clock.now += wait
    assert limits.take("ana", "weather", Rate.parse("2/min")) == 0


def test_windows_that_are_over_take_no_memory() -> None:
    clock = Clock()
    limits, rate = RateLimits(clock), Rate.parse("5/s")
    for number in range(5000):
        clock.now += 1
        limits.take(f"user {number}", "weather", rate)
    assert len(limits) <= 1001


def test_a_rate_is_written_as_it_was_read() -> None:
    for text in ("1/s", "20/min", "300/hour", "10000/day"):
        assert str(Rate.parse(text)) == text
