"""One measured figure beside its floor and goal. Plain data, and how it is written as JSON."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]  # Any: plain JSON


def write(file: Path, figures: Json | list[Json]) -> None:
    """At once or not at all, whenever this process is ended."""
    beside = file.with_name(file.name + ".new")
    beside.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, file)


class Missing(Exception):
    """A part needs kernels, a package or memory that are not here; says which."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`value` (the median) and the least and largest of its repeats, in `unit`.

    `floor` is the limit or the peer that it stands beside, in the same unit, and `share` the one over the other, so
    that 1 is as good as the floor. `goal` is the target of the share: at least, or at most where `most` is set.
    """

    what: str
    value: float
    unit: str
    least: float
    largest: float
    floor: float | None = None
    share: float | None = None
    goal: float | None = None
    most: bool = False
    more: Json = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Returns whether the goal is reached; None where there is none."""
        if self.goal is None or self.share is None:
            return None
        return self.share <= self.goal if self.most else self.share >= self.goal

    def json(self) -> Json:
        return asdict(self) | {"met": self.met}


def time_of(
    what: str, seconds: Sequence[float], *, floor_s: float | None = None, goal: float | None = None, **more: Any
) -> Figure:
    """A time in ms; its share is the floor over it. Any: plain JSON that is kept beside it."""
    ms = [1e3 * each for each in seconds]
    middle = statistics.median(ms)
    floor = None if floor_s is None else 1e3 * floor_s
    share = None if floor is None else floor / middle
    return Figure(what, middle, "ms", min(ms), max(ms), floor, share, goal, more=more)


def rate_of(
    what: str,
    amount: float,
    seconds: Sequence[float],
    unit: str,
    *,
    limit: float | None = None,
    goal: float | None = None,
    **more: Any,
) -> Figure:
    """`amount` in units, each second; its share is of `limit`."""
    rates = [amount / each for each in seconds]
    middle = amount / statistics.median(seconds)
    share = None if limit is None else middle / limit
    return Figure(what, middle, unit, min(rates), max(rates), limit, share, goal, more=more)


def times_faster(
    what: str, base_s: Sequence[float], seconds: Sequence[float], *, goal: float | None = None, **more: Any
) -> Figure:
    """A time in ms beside another one; its share is how many times as fast."""
    base, middle = statistics.median(base_s), statistics.median(seconds)
    ms = [1e3 * each for each in seconds]
    return Figure(what, 1e3 * middle, "ms", min(ms), max(ms), 1e3 * base, base / middle, goal, more=more)
