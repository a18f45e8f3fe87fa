"""Dates and times as calendars and clocks have them: added to, taken apart, and shown in a zone.

Years, months, weeks and days move the calendar and keep the clock's time; hours, minutes and seconds pass as they do. A
local time that a change of clocks skips or repeats is taken as the zone's rules say, and the result says so.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from tools.calculation.number import CalculationError

Clock = Callable[[], datetime]
"""The time now, with a zone."""

_DURATION = re.compile(
    r"(?P<sign>[-+−])?\s*(?P<count>\d{1,9})\s*(?P<unit>[a-z]+)(?:\s*,\s*|\s+and\s+|\s+|\Z)?", re.IGNORECASE
)
_ISO = re.compile(
    r"(?P<sign>[-+])?P(?:(?P<years>\d{1,9})Y)?(?:(?P<months>\d{1,9})M)?(?:(?P<weeks>\d{1,9})W)?(?:(?P<days>\d{1,9})D)?"
    r"(?:T(?:(?P<hours>\d{1,9})H)?(?:(?P<minutes>\d{1,9})M)?(?:(?P<seconds>\d{1,9})S)?)?"
)
_UNITS = {
    "years": ("year", "years", "yr", "yrs", "y"),
    "months": ("month", "months", "mo"),
    "weeks": ("week", "weeks", "wk", "w"),
    "days": ("day", "days", "d"),
    "workdays": ("workday", "workdays", "weekday", "weekdays"),
    "hours": ("hour", "hours", "hr", "hrs", "h"),
    "minutes": ("minute", "minutes", "min", "mins"),
    "seconds": ("second", "seconds", "sec", "secs", "s"),
}
_NAMES = {name: unit for unit, names in _UNITS.items() for name in names}
_MAX_WORKDAYS = 20_000
_RANGE = "Dates are kept from the year 1 to the year 9999."


@dataclass(frozen=True, slots=True)
class Duration:
    years: int = 0
    months: int = 0
    weeks: int = 0
    days: int = 0
    workdays: int = 0  # Monday to Friday, holidays not known
    hours: int = 0
    minutes: int = 0
    seconds: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """A date, or a time in a zone; `notes` say how an ambiguous clock time was read."""

    day: date
    at: datetime | None  # None for a date alone
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        year, week, _ = self.day.isocalendar()
        number = self.day.timetuple().tm_yday
        calendar_day = f"{self.day.strftime('%A')}, ISO week {year:04d}-W{week:02d}, day {number} of the year"
        if self.at is None:
            return " ".join((f"{self.day.isoformat()} ({calendar_day})", *self.notes))
        zone = getattr(self.at.tzinfo, "key", None) or self.at.tzname() or ""
        return " ".join((f"{self.at.isoformat(sep=' ', timespec='seconds')} {zone} ({calendar_day})", *self.notes))


def zone(name: str) -> tzinfo:
    """
    Raises:
        CalculationError: no time zone is called so.
    """
    if name.upper() in ("UTC", "Z", "GMT"):
        return ZoneInfo("UTC")
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        last = name.strip().replace(" ", "_").lower()
        near = sorted(each for each in available_timezones() if each.lower().rpartition("/")[2] == last)[:3]
        hint = f"did you mean {' or '.join(near)}?" if near else "accepted: names like Europe/Berlin, or UTC."
        raise CalculationError(f"There is no time zone {name[:60]!r}; {hint}") from None


def now(name: str = "UTC", clock: Clock = lambda: datetime.now(UTC)) -> Moment:
    """The present in a zone.

    Raises:
        CalculationError: no time zone is called so.
    """
    at = clock().astimezone(zone(name)).replace(microsecond=0)
    return Moment(at.date(), at)


def moment(text: str, name: str = "UTC", clock: Clock = lambda: datetime.now(UTC)) -> Moment:
    """A date or a time as ISO 8601 writes it, or now, today, tomorrow, yesterday. Without an offset it is local.

    Raises:
        CalculationError: it is none of these, or there is no such day.
    """
    word = text.strip().lower()
    if word == "now":
        return now(name, clock)
    if word in ("today", "tomorrow", "yesterday"):
        return Moment(now(name, clock).day + timedelta(days=("yesterday", "today", "tomorrow").index(word) - 1), None)
    try:
        if "T" in text or " " in text.strip() or ":" in text:
            read = datetime.fromisoformat(text.strip())
        else:
            return Moment(date.fromisoformat(text.strip()), None)
    except ValueError as error:
        reason = f": {error}" if "range" in str(error) or "must be in" in str(error) else ""
        accepted = "2026-03-29, 2026-03-29T14:30, 2026-03-29T14:30+02:00, now, today, tomorrow or yesterday"
        raise CalculationError(f"{text[:60]!r} is no date{reason}; accepted: {accepted}.") from None
    if read.tzinfo is None:
        return _local(read, zone(name))
    return Moment(read.date(), read)


def _local(wall: datetime, where: tzinfo) -> Moment:
    """A clock's time in a zone, by PEP 495: the first of two, and past a gap by as much as the clocks jumped."""
    first, second = wall.replace(tzinfo=where, fold=0), wall.replace(tzinfo=where, fold=1)
    try:
        real = first.astimezone(UTC).astimezone(where)
        offsets = first.utcoffset(), second.utcoffset()
    except OverflowError:
        raise CalculationError(_RANGE) from None
    if real.replace(tzinfo=None) != wall.replace(fold=0):
        note = f"[{wall:%H:%M} does not exist on that day, the clocks jump over it; taken as {real:%H:%M}.]"
        return Moment(real.date(), real, (note,))
    if offsets[0] != offsets[1]:
        note = f"[{wall:%H:%M} comes twice on that day, for the clocks go back; this is the first, then {second:%z}.]"
        return Moment(first.date(), first, (note,))
    return Moment(first.date(), first)


def duration(text: str) -> Duration:
    """`3 days`, `-2 weeks`, `1 year 2 months and 3 days`, `10 workdays`, or ISO 8601's `P1Y2M3DT4H`.

    A sign before a part counts for it and for those after it, until another one.

    Raises:
        CalculationError: it is none of these.
    """
    written = text.strip()
    if match := _ISO.fullmatch(written):
        factor = -1 if match["sign"] == "-" else 1
        given = {unit: factor * int(count) for unit, count in match.groupdict().items() if unit != "sign" and count}
        if given:
            return Duration(**given)
    at, factor, counts = 0, 1, dict[str, int]()
    while at < len(written):
        part = _DURATION.match(written, at)
        unit = _NAMES.get(part["unit"].lower()) if part else None
        if part is None or unit is None:
            accepted = "3 days, -2 weeks, 1 year 2 months and 3 days, 10 workdays, 90 minutes, P1Y2M3DT4H"
            raise CalculationError(f"{text[:60]!r} is no duration; accepted: {accepted}.")
        factor = {"-": -1, "−": -1, "+": 1}.get(part["sign"] or "", factor)
        counts[unit] = counts.get(unit, 0) + factor * int(part["count"])
        at = part.end()
    if not counts:
        raise CalculationError("The duration is empty; accepted: 3 days, -2 weeks, P1Y2M3DT4H and the like.")
    return Duration(**counts)


def add(start: Moment, change: Duration) -> Moment:
    """Years and months first (a day past the month's end becomes its last), then days, then hours.

    Raises:
        CalculationError: the result is beyond the years 1 to 9999.
    """
    try:
        return _added(start, change)
    except CalculationError:
        raise
    except (OverflowError, ValueError):
        raise CalculationError(_RANGE) from None


def _added(start: Moment, change: Duration) -> Moment:
    notes = list[str]()
    months = start.day.year * 12 + start.day.month - 1 + change.years * 12 + change.months
    year, month = divmod(months, 12)
    if not 1 <= year <= 9999:
        raise OverflowError
    last = calendar.monthrange(year, month + 1)[1]
    if start.day.day > last:
        notes.append(f"[{year:04d}-{month + 1:02d} has {last} days; its last is taken.]")
    day = date(year, month + 1, min(start.day.day, last)) + timedelta(days=7 * change.weeks + change.days)
    day = _workdays(day, change.workdays)
    elapsed = timedelta(hours=change.hours, minutes=change.minutes, seconds=change.seconds)
    if start.at is None:
        if not elapsed:
            return Moment(day, None, tuple(notes))
        begins = datetime.combine(day, time(), UTC) + elapsed  # a date has no zone, so its days have 24 hours
        return Moment(begins.date(), begins, tuple(notes))
    where = start.at.tzinfo or UTC
    moved = start if day == start.day else _local(datetime.combine(day, start.at.time()), where)
    at = moved.at or start.at
    if elapsed:
        at = (at.astimezone(UTC) + elapsed).astimezone(where)
    return Moment(at.date(), at, (*notes, *(moved.notes if moved is not start else ())))


def _workdays(day: date, count: int) -> date:
    if abs(count) > _MAX_WORKDAYS:
        raise CalculationError(f"At most {_MAX_WORKDAYS:,} workdays are counted.")
    step = timedelta(days=1 if count > 0 else -1)
    for _ in range(abs(count)):
        day += step
        while day.weekday() >= 5:
            day += step
    return day


def difference(start: Moment, end: Moment) -> str:
    """From one to the other, in days and in calendar parts, and to the second where both have a time."""
    sign, first, last = ("", start, end) if _order(start) <= _order(end) else ("-", end, start)
    if (first.at is None) != (last.at is None):
        first, last = replace(first, at=None), replace(last, at=None)
    days = (last.day - first.day).days
    if first.at is None or last.at is None:
        parts = [f"{sign}{days:,} days", _calendar(first.day, last.day)]
        if days < _MAX_WORKDAYS:
            work = sum((first.day + timedelta(days=n)).weekday() < 5 for n in range(1, days + 1))
            parts.append(f"{work:,} workdays (Monday to Friday, without the first day)")
        return "; ".join(dict.fromkeys(parts))
    # Times of one zone would be subtracted as clocks show them; in UTC the difference is the time passed.
    seconds = round((last.at.astimezone(UTC) - first.at.astimezone(UTC)).total_seconds())
    whole, rest = divmod(seconds, 86400)
    clock = f"{whole:,} days {rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{sign}{clock} elapsed; {sign}{seconds:,} seconds"


def _order(each: Moment) -> tuple[date, datetime]:
    at = each.at.astimezone(UTC) if each.at else datetime.combine(each.day, time(), UTC)
    return (at.date() if each.at else each.day), at


def _calendar(first: date, last: date) -> str:
    """Whole years and months, then days."""
    months = (last.year - first.year) * 12 + last.month - first.month - (last.day < first.day)
    at = _added(Moment(first, None), Duration(months=months)).day
    counts = ((months // 12, "years"), (months % 12, "months"), ((last - at).days, "days"))
    return " ".join(f"{count} {unit}" for count, unit in counts if count) or "the same day"
