"""Finds what limits an engine: memory for K/V, the batch, the host, reading of prompts, or decoding.

Looks at the engine's own counters over the last minute. Memory bandwidth and compute are distinguished by measurement:
a decode step that reads all weights for few sequences takes about as long for twice as many, and one that computes
takes twice as long (the roofline model, Williams et al. 2009). Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from engine.outputs import Stats

Limit = Literal["idle", "kv_memory", "max_running", "host", "prefill", "bandwidth", "compute", "decode"]

# Settings that help, the one to try first before the others.
SETTINGS: dict[Limit, tuple[str, ...]] = {
    "idle": (),
    "kv_memory": ("kv_blocks", "kv_dtype", "max_running"),
    "max_running": ("max_running",),
    "host": ("engine", "api_workers", "threads"),
    "prefill": ("quantization", "threads", "max_batch_tokens"),
    "bandwidth": ("quantization", "speculation"),
    "compute": ("threads", "quantization"),
    "decode": ("quantization", "speculation", "threads"),
}

_MIN_S = 2.0  # with work, in the last minute, below which an engine is idle
_MIN_STEPS = 20  # of a size, for its time to count
_QUEUED = 0.5  # sequences that wait, on average: one in admission is no queue
_FULL, _BUSY, _PROMPTS = 0.9, 0.6, 0.5
_READS, _COMPUTES = 0.4, 0.7  # growth of a step's time with its rows, as an exponent


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """Shares are of 1. `growth`: exponent by which a decode step's time grows with its sequences; None while unknown.

    `settings`: names of settings that would help, the first one first.
    """

    limit: Limit
    busy: float  # of the time with work, in steps
    prompts: float  # of the steps' time, in steps that read prompts
    rows: float  # sequences of a decode step, on average
    step_s: float | None  # of a decode step, on average
    growth: float | None
    kv_used: float  # of the blocks, at most
    waiting: float  # sequences, on average
    preemptions: int
    settings: tuple[str, ...]


def bottleneck(looks: Sequence[tuple[float, Stats]], max_running: int) -> Bottleneck | None:
    """Returns what limits an engine, by its counters at some moments (seconds), the oldest first.

    None of less than two moments. `max_running`: sequences that a step may have.
    """
    if len(looks) < 2:
        return None
    (_, first), (_, last) = looks[0], looks[-1]
    stats = [each for _, each in looks]
    at_work = [
        (after - before, new.step_seconds - old.step_seconds)
        for (before, old), (after, new) in pairwise(looks)
        if new.running or new.step_seconds > old.step_seconds
    ]
    worked_s, steps_s = (sum(column) for column in zip(*at_work, strict=True)) if at_work else (0.0, 0.0)
    decodes = _since(first.decodes, last.decodes)
    steps, rows, decode_s = (sum(column) for column in zip(*decodes, strict=True)) if decodes else (0, 0, 0.0)
    busy = min(1.0, steps_s / worked_s) if worked_s else 0.0
    prompts = max(0.0, 1 - decode_s / steps_s) if steps_s else 0.0
    growth = growth_of(last.decodes)
    kv_used = max(each.blocks_in_use / max(1, each.blocks_total) for each in stats)
    waiting = sum(each.waiting for each in stats) / len(stats)
    preemptions = last.preemptions - first.preemptions
    limit: Limit
    queued = waiting >= _QUEUED
    if steps_s < _MIN_S and not queued:
        limit = "idle"
    elif preemptions or (queued and kv_used > _FULL):
        limit = "kv_memory"
    elif queued and max(each.running for each in stats) >= max_running:
        limit = "max_running"
    elif busy < _BUSY:
        limit = "host"
    elif prompts > _PROMPTS:
        limit = "prefill"
    elif growth is None or _READS < growth < _COMPUTES:
        limit = "decode"
    else:
        limit = "bandwidth" if growth <= _READS else "compute"
    step_s = decode_s / steps if steps else None
    mean_rows = rows / steps if steps else 0.0
    return Bottleneck(limit, busy, prompts, mean_rows, step_s, growth, kv_used, waiting, preemptions, SETTINGS[limit])


def growth_of(decodes: Sequence[tuple[int, int, float]]) -> float | None:
    """Returns the exponent by which a decode step's time grows with its rows, by least squares over the logarithms.

    None where there are not enough steps of two sizes.
    """
    points = [(log(rows / steps), log(seconds / steps)) for steps, rows, seconds in decodes
              if steps >= _MIN_STEPS and seconds > 0]  # fmt: skip
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def _since(
    before: Sequence[tuple[int, int, float]], after: Sequence[tuple[int, int, float]]
) -> list[tuple[int, int, float]]:
    earlier = [*before, *[(0, 0, 0.0)] * (len(after) - len(before))]
    return [(a[0] - b[0], a[1] - b[1], a[2] - b[2]) for a, b in zip(after, earlier, strict=True)]
