"""The last quarter of an hour of a server, in bins of a few seconds: latencies, tokens, requests, errors.

Of latencies a bin keeps a uniform sample (Vitter's algorithm R), so a percentile is that of real observations, exact
while a bin has few, and the memory is bounded at any rate. Knows nothing of where observations come from.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from engine.outputs import Stats

BIN_S = 5.0
BINS = 180
SAMPLE = 128  # observations of one kind that a bin keeps
COUNTED_S = 60.0  # for which an engine's counters are kept
POINT_BINS = 3  # bins that make a point of the series

Floats = npt.NDArray[np.float64]
Kind = Literal["ttft", "inter_token", "duration"]


class WindowSample:
    """Some of the values, each with the same chance to be among them, and how many there were."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.count = 0
        self._array: tuple[int, Floats] | None = None

    def add(self, value: float) -> None:
        self.count += 1
        if len(self.values) < SAMPLE:
            self.values.append(value)
        elif (place := random.randrange(self.count)) < SAMPLE:
            self.values[place] = value

    def array(self) -> Floats:
        """The values, made into an array once after they have changed."""
        if self._array is None or self._array[0] != self.count:
            self._array = self.count, np.array(self.values)
        return self._array[1]


@dataclass(slots=True)
class Bin:
    number: int
    latencies: dict[Kind, WindowSample] = field(
        default_factory=lambda: {"ttft": WindowSample(), "inter_token": WindowSample(), "duration": WindowSample()}
    )
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0  # at most
    blocks_share: float = 0.0  # of a model's KV blocks that were used, at most
    prompt_tokens: float = 0
    generated_tokens: float = 0
    query_tokens: float = 0  # looked up in the prefix cache
    hit_tokens: float = 0


_COUNTED = {
    "prompt_tokens": "prompt_tokens", "generated_tokens": "generated_tokens", "query_tokens": "prefix_query_tokens",
    "hit_tokens": "prefix_hit_tokens",
}  # fmt: skip


class TimeWindows:
    """Filled as things pass; read when somebody looks."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._bins = deque[Bin](maxlen=BINS)
        self._counted: dict[str, deque[tuple[float, Stats]]] = {}  # by model, those of the last minute, and one before
        self._points: dict[int, dict[str, Any]] = {}  # of the series, by their first bins: those that are over

    @property
    def uptime_s(self) -> float:
        return self._now() - self._began

    def observed(self, kind: Kind, seconds: float) -> None:
        self._bin().latencies[kind].add(seconds)

    def busy(self, in_flight: int) -> None:
        now = self._bin()
        now.in_flight = max(now.in_flight, in_flight)

    def ended(self, outcome: str) -> None:
        self._bin().outcomes[outcome] += 1

    def error(self, code: str) -> None:
        self._bin().errors[code] += 1

    def counted(self, model: str, stats: Stats) -> None:
        """An engine's counters at this moment. Counts since the last time are attributed half-way between."""
        now = self._now()
        counted = self._counted.setdefault(model, deque())
        at, before = counted[-1] if counted else (now, stats)
        counted.append((now, stats))
        while len(counted) > 2 and counted[1][0] <= now - COUNTED_S:
            counted.popleft()
        current = self._bin()
        current.blocks_share = max(current.blocks_share, stats.blocks_in_use / max(1, stats.blocks_total))
        middle = int((at + now) / 2 / BIN_S)
        if (found := next((each for each in reversed(self._bins) if each.number <= middle), None)) is not None:
            for name, counter in _COUNTED.items():
                grown = getattr(stats, counter) - getattr(before, counter)
                setattr(found, name, getattr(found, name) + grown)

    def last_minute(self, model: str) -> list[tuple[float, Stats]]:
        """An engine's counters at moments of the last minute, the oldest first."""
        return list(self._counted.get(model, ()))

    def window(self, seconds: float) -> dict[str, Any]:
        """The last `seconds`, as JSON. Rates are those of the time that the server has run."""
        bins = self._since(seconds)
        lasted = max(BIN_S, min(seconds, self.uptime_s))
        query = sum(each.query_tokens for each in bins)
        return {
            "seconds": seconds,
            **{f"{kind}_s": percentiles(each.latencies[kind] for each in bins) for kind in Bin(0).latencies},
            "requests": dict(_summed(each.outcomes for each in bins)),
            "errors": dict(_summed(each.errors for each in bins).most_common()),
            "prompt_tokens_per_s": sum(each.prompt_tokens for each in bins) / lasted,
            "generated_tokens_per_s": sum(each.generated_tokens for each in bins) / lasted,
            "prefix_hit_rate": sum(each.hit_tokens for each in bins) / query if query else None,
        }

    def series(self) -> dict[str, Any]:
        """All bins as points of equal length, the oldest first; None where nothing was observed."""
        by_number = {each.number: each for each in self._since(BINS * BIN_S)}
        # A point is always made of the same bins: it does not change any more once it and the next are over.
        current = int(self._now() / BIN_S) // POINT_BINS * POINT_BINS
        firsts = range(current + POINT_BINS - BINS, current + POINT_BINS, POINT_BINS)
        step_s, points = POINT_BINS * BIN_S, dict[int, dict[str, Any]]()
        for first in firsts:
            bins = [by_number[n] for n in range(first, first + POINT_BINS) if n in by_number]
            points[first] = self._points.get(first) or _point(bins, step_s)
        self._points = {first: points[first] for first in firsts if first < current - POINT_BINS}
        return {"step_s": step_s, "points": list(points.values())}

    def _bin(self) -> Bin:
        number = int(self._now() / BIN_S)
        if not self._bins or self._bins[-1].number < number:
            self._bins.append(Bin(number))
        return self._bins[-1]

    def _since(self, seconds: float) -> list[Bin]:
        first = int((self._now() - seconds) / BIN_S) + 1
        return [each for each in self._bins if each.number >= first]


def percentiles(samples: Iterable[WindowSample]) -> dict[str, float] | None:
    """p50, p95 and p99 (nearest rank) of all that the samples stand for, and how many that is; None of nothing."""
    parts = [each for each in samples if each.count]
    if not parts:
        return None
    values = np.concatenate([each.array() for each in parts])
    weights = np.repeat([each.count / len(each.values) for each in parts], [len(each.values) for each in parts])
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    ranks = np.searchsorted(reached, np.array([0.50, 0.95, 0.99]) * reached[-1] * (1 - 1e-9))
    p50, p95, p99 = (float(values[order[rank]]) for rank in ranks)
    return {"count": sum(each.count for each in parts), "p50": p50, "p95": p95, "p99": p99}


def _point(bins: Sequence[Bin], step_s: float) -> dict[str, Any]:
    ttft, inter_token = (percentiles(each.latencies[kind] for each in bins) for kind in ("ttft", "inter_token"))
    return {
        "ttft_p50_s": ttft and ttft["p50"],
        "inter_token_p50_s": inter_token and inter_token["p50"],
        "generated_tokens_per_s": sum(each.generated_tokens for each in bins) / step_s,
        "prompt_tokens_per_s": sum(each.prompt_tokens for each in bins) / step_s,
        "in_flight": max((each.in_flight for each in bins), default=0),
        "blocks_share": max((each.blocks_share for each in bins), default=0.0),
        "errors": sum(sum(each.errors.values()) for each in bins),
    }


def _summed(counters: Iterable[Counter[str]]) -> Counter[str]:
    total = Counter[str]()
    for each in counters:
        total.update(each)
    return total
