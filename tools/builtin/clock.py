"""The time, and what calendars make of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ponder import Retry, tool
from tools.calculation import CalculationError, dates

Text = Annotated[str, Field(max_length=100)]


@tool(permission="none", timeout=5, idempotent=True)
def current_time(zone: Text = "UTC") -> str:
    """The current date and time.

    Args:
        zone: a time zone like Europe/Berlin.
    """
    try:
        return str(dates.now(zone))
    except CalculationError as error:
        raise Retry(str(error)) from None


@tool(permission="none", timeout=5, idempotent=True)
def date_arithmetic(start: Text, add: Text = "", until: Text = "", zone: Text = "UTC") -> str:
    """Add a duration to a date, tell the time between two dates, or tell a date's weekday and week.

    Args:
        start: a date or time like 2026-03-29 or 2026-03-29T14:30, or now, today, tomorrow, yesterday.
        add: a duration like 3 days, -2 weeks, 1 year 2 months, 10 workdays, P1DT4H.
        until: another date or time; the answer is how long it is from start.
        zone: the time zone of times without one.
    """
    if add and until:
        raise Retry("Give add for a later or earlier date, or until for the time between two dates; not both.")
    try:
        first = dates.moment(start, zone)
        if until:
            last = dates.moment(until, zone)
            notes = " ".join((*first.notes, *last.notes))
            return f"{dates.difference(first, last)} {notes}".strip()
        return str(dates.add(first, dates.duration(add)) if add else first)
    except CalculationError as error:
        raise Retry(str(error)) from None
