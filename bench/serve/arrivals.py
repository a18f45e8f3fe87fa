"""When requests come: seconds from the start, drawn from a seed. Knows nothing of what they ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random


def poisson(rate: float, seconds: float, rng: Random) -> list[float]:
    """Independent arrivals, `rate` a second on average."""
    return bursty(rate, seconds, 1.0, rng)


def bursty(rate: float, seconds: float, variation: float, rng: Random) -> list[float]:
    """Gamma-distributed gaps. `variation` is their standard deviation over their mean: 1 is Poisson's, more comes in
    bursts, less is evener.
    """
    shape = 1 / variation**2
    return list(_until(seconds, lambda: rng.gammavariate(shape, 1 / (rate * shape))))


def ramp(first: float, last: float, seconds: float, rng: Random) -> list[float]:
    """Poisson arrivals whose rate goes evenly from `first` to `last`."""
    most = max(first, last)
    candidates = _until(seconds, lambda: rng.expovariate(most))
    return [at for at in candidates if rng.random() * most < first + (last - first) * at / seconds]


def _until(seconds: float, gap: Callable[[], float]) -> Iterator[float]:
    at = gap()
    while at < seconds:
        yield at
        at += gap()
