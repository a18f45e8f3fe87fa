"""Dates and times: what calendars and changing clocks make of them."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.calculation import CalculationError
from tools.calculation.dates import Duration, Moment, add, difference, duration, moment, now


def _clock() -> datetime:
    return datetime(2026, 7, 26, 22, 30, 15, 999, tzinfo=UTC)


def test_now_is_told_in_a_zone() -> None:
    assert str(now("Europe/Berlin", _clock)) == (
        "2026-07-27 00:30:15+02:00 Europe/Berlin (Monday, ISO week 2026-W31, day 208 of the year)"
    )
    assert now("America/New_York", _clock).day == date(2026, 7, 26)
    assert moment("tomorrow", "Asia/Tokyo", _clock).day == date(2026, 7, 28)


def test_zones_are_known_where_the_system_has_none() -> None:
    code = "import zoneinfo, tools.calculation.dates as dates; print(zoneinfo.TZPATH, dates.now('Europe/Berlin'))"
    bare = {"PYTHONTZPATH": ""}  # where the system's zones would be looked for
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=bare)
    assert done.stdout.startswith("() ") and "Europe/Berlin" in done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [("Berlin", "did you mean Europe/Berlin"), ("Nowhere", "names like"), ("../etc/passwd", "names like")],
)
def test_an_unknown_zone_is_refused(name: str, said: str) -> None:
    with pytest.raises(CalculationError, match=said):
        now(name)


@pytest.mark.parametrize(
    ("start", "change", "result"),
    [
        ("2026-01-31", "1 month", "2026-02-28"),
        ("2024-01-31", "P1M", "2024-02-29"),
        ("2024-02-29", "1 year", "2025-02-28"),
        ("2026-03-01", "-1 day", "2026-02-28"),
        ("2026-12-31", "2 weeks and 1 day", "2027-01-15"),
        ("2026-11-20", "3 workdays", "2026-11-25"),
        ("2026-11-22", "-1 workday", "2026-11-20"),
        ("2026-01-01", "1 year 2 months, 3 days", "2027-03-04"),
        ("2026-01-01", "36 hours", "2026-01-02 12:00:00+00:00"),
        ("2026-03-28T12:00", "1 day", "2026-03-29 12:00:00+02:00"),
        ("2026-03-28T12:00", "24 hours", "2026-03-29 13:00:00+02:00"),
        ("2026-10-24T12:00", "24 hours", "2026-10-25 11:00:00+01:00"),
        ("2026-01-01T10:00+05:30", "90 minutes", "2026-01-01 11:30:00+05:30"),
    ],
)
def test_durations_are_added_as_calendars_and_clocks_do(start: str, change: str, result: str) -> None:
    assert str(add(moment(start, "Europe/Berlin"), duration(change))).startswith(result)


def test_a_shorter_month_is_said() -> None:
    assert "2026-02 has 28 days" in str(add(moment("2026-01-31"), duration("1 month")))


def test_a_time_that_the_clocks_skip_is_moved_and_said() -> None:
    told = str(moment("2026-03-29T02:30", "Europe/Berlin"))
    assert told.startswith("2026-03-29 03:30:00+02:00") and "02:30 does not exist" in told
    assert "does not exist" in str(add(moment("2026-03-28T02:30", "Europe/Berlin"), duration("1 day")))


def test_a_time_that_comes_twice_is_the_first_and_said() -> None:
    told = str(moment("2026-10-25T02:30", "Europe/Berlin"))
    assert told.startswith("2026-10-25 02:30:00+02:00") and "then +0100" in told


@pytest.mark.parametrize(
    ("start", "end", "result"),
    [
        ("2026-01-01", "2026-12-25", "358 days; 11 months 24 days; 256 workdays"),
        ("2026-12-25", "2026-01-01", "-358 days"),
        ("2000-02-29", "2026-02-28", "9,496 days; 25 years 11 months 30 days"),
        ("2026-01-01", "2026-01-01", "0 days; the same day"),
        ("2026-03-28T12:00", "2026-03-29T12:00", "0 days 23:00:00 elapsed; 82,800 seconds"),
        ("2026-01-01T00:00+00:00", "2026-01-01T00:00+01:00", "-0 days 01:00:00"),
        ("2026-01-01T10:00", "2026-01-03", "2 days"),
    ],
)
def test_differences(start: str, end: str, result: str) -> None:
    assert difference(moment(start, "Europe/Berlin"), moment(end, "Europe/Berlin")).startswith(result)


@pytest.mark.parametrize(
    "text", ["2026-02-30", "2026-13-01", "31.12.2026", "soon", "", "2026-01-01T25:00", "0000-01-01"]
)
def test_what_is_no_date_is_refused(text: str) -> None:
    with pytest.raises(CalculationError, match="is no date"):
        moment(text)


@pytest.mark.parametrize(
    "text", ["", "3", "3 fortnights", "P", "PT", "a day", "1.5 days", "3 days ago", "9999999999 days"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(CalculationError, match="duration"):
        duration(text)


@pytest.mark.parametrize(
    "change", ["9000 years", "-3000 years", "999999999 days", "999999999 hours", "-999999999 weeks"]
)
def test_a_date_beyond_the_calendar_is_refused(change: str) -> None:
    with pytest.raises(CalculationError, match="9999"):
        add(moment("2026-01-01"), duration(change))


def test_too_many_workdays_are_refused() -> None:
    with pytest.raises(CalculationError, match="At most 20,000"):
        add(moment("2026-01-01"), duration("999999999 workdays"))


@given(st.dates(date(1900, 1, 1), date(2100, 1, 1)), st.integers(-20000, 20000))
def test_adding_days_and_taking_them_away_again_changes_nothing(day: date, days: int) -> None:
    there = add(Moment(day, None), Duration(days=days))
    assert there.day == day + timedelta(days=days)
    assert add(there, Duration(days=-days)).day == day


@given(st.datetimes(datetime(1980, 1, 1), datetime(2035, 1, 1)), st.integers(-10_000_000, 10_000_000))
def test_seconds_pass_alike_in_every_zone(wall: datetime, seconds: int) -> None:
    start = moment(wall.isoformat(sep="T", timespec="seconds"), "America/New_York")
    end = add(start, Duration(seconds=seconds))
    assert start.at is not None and end.at is not None
    assert end.at.astimezone(UTC) - start.at.astimezone(UTC) == timedelta(seconds=seconds)
