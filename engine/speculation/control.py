"""Decides how many drafted tokens are worth verifying: by how often such drafts were right, and by what steps cost.

A step of a few tokens more costs little where it is bound by reading weights, and much where it is bound by arithmetic.
So slots for drafted tokens compete, across sequences, for the largest number of expected tokens per second (Liu et al.
2024, TurboSpec's goodput). Under load the best number of them is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_BINS = 16  # of confidence
_DOUBT = 0.7  # of a confidence that was not tried yet: a first draft is short
_PRIOR = 2.0  # drafted tokens that a proposer's own confidence is worth
_FORGET = 0.99  # weight of what was learnt, for each later draft
_FASTER, _SLOWER = 0.3, 0.05  # weight of a new step's time
_KEPT_STEPS = 300  # since a size ran last, before its time is forgotten
_MIN_GAIN = 1.05  # goodput with drafts, over that without, from which on they are verified
_MARGINAL = 0.05  # of a step of one token: assumed cost of each further one, before any was measured
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # tokens of the steps that are timed


@dataclass(slots=True)
class Calibration:
    """Turns a proposer's confidence into the share of such tokens that were right. Forgets, so that a proposer that has
    failed is tried again now and then."""

    _right: list[float] = field(default_factory=lambda: [0.0] * _BINS)
    _drafted: list[float] = field(default_factory=lambda: [0.0] * _BINS)

    def probability(self, confidence: float) -> float:
        at = _bin(confidence)
        return (self._right[at] + _PRIOR * _DOUBT * confidence) / (self._drafted[at] + _PRIOR)

    def learn(self, confidence: float, right: bool) -> None:
        self.forget(confidence)
        at = _bin(confidence)
        self._right[at] += right
        self._drafted[at] += 1

    def forget(self, confidence: float) -> None:
        """Lets what was learnt count for a little less."""
        at = _bin(confidence)
        self._right[at] *= _FORGET
        self._drafted[at] *= _FORGET


def _bin(confidence: float) -> int:
    return min(_BINS - 1, max(0, int(confidence * _BINS)))


class StepTimes:
    """Seconds of steps that only decode, by their tokens: measured, smoothed, and between the measured sizes
    interpolated. A size that has not run for long is forgotten, so that one slow step does not rule it out for ever."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._ran: dict[int, int] = {}  # of each size, the newest step
        self._steps = 0

    def ran(self, tokens: int, seconds: float) -> None:
        """Learns from a step. A faster one counts for more: a slow one is more likely the machine's doing."""
        if seconds <= 0:
            return  # the clock stood still
        size = min(_SIZES, key=lambda each: (abs(each - tokens), each))
        self._steps += 1
        self._ran[size] = self._steps
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + (_FASTER if seconds < known else _SLOWER) * (min(seconds, 4 * known) - known)
        for each in [each for each, at in self._ran.items() if self._steps - at > _KEPT_STEPS and len(self._ran) > 1]:
            del self._ran[each], self._seconds[each]

    def seconds(self, tokens: int) -> float:
        """Returns the expected time; it never falls with more tokens. In steps of one token where nothing was
        measured."""
        return float(self.curve(tokens, 1)[0])

    def curve(self, first: int, count: int) -> NDArray[np.float64]:
        """Returns the expected times of steps of `first` tokens and of each number beyond, (count,)."""
        sizes, measured = zip(*sorted(self._seconds.items()), strict=True) if self._seconds else ((1,), (1.0,))
        tokens, times = np.arange(first, first + count), np.maximum.accumulate(measured)
        beyond = np.maximum(tokens - sizes[-1], 0) * _MARGINAL * times[0]
        return np.interp(tokens, sizes, times) + beyond


def chosen_lengths(survival: Mapping[int, Sequence[float]], rows: int, times: StepTimes) -> dict[int, int]:
    """Returns how many drafted tokens of each sequence to verify in a step of `rows` decodes.

    `survival[id][i]` is the probability that the sequence's first i + 1 drafted tokens are all right. Each verified
    token that is right makes one more token of the step.
    """
    slots = sorted(
        ((probability, -at, id) for id, each in survival.items() for at, probability in enumerate(each)), reverse=True
    )
    expected = rows + np.cumsum([0.0, *(probability for probability, _, _ in slots)])
    goodput = expected / times.curve(rows, len(expected))
    goodput[1:] /= _MIN_GAIN
    chosen = int(goodput.argmax())
    lengths: dict[int, int] = {}
    for _, _, id in slots[:chosen]:
        lengths[id] = lengths.get(id, 0) + 1
    return lengths
