"""What steps take, counted and timed, by a host that may be a step ahead of its device. Knows nothing of what they do.

Policies learn from these times. A step that draws nothing gives the host nothing to wait for, so that it would be over
as soon as the device was told of it, and the next one would seem to take as long as both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.step import Step


class Pace:
    """Of one core. `learn` is told of each step, and the seconds that it took, once the device is done with it."""

    def __init__(self, clock: Callable[[], float], learn: Callable[[Step, float], None]) -> None:
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0
        self.last_batch = 0
        self._clock = clock
        self._learn = learn
        self._done_at = float("-inf")
        self._running: tuple[Step, float, torch.cuda.Event] | None = None

    def ended(self, step: Step, began: float, done: torch.cuda.Event | None) -> None:
        """The host has all that it needs of a step. `done`: what tells that the device is done with it, if it may not
        be; then `wait` must follow, before the next `ended`.
        """
        self.steps += 1
        self.tokens += step.tokens
        self.last_batch = len(step.rows)
        if done is None:
            self._done(step, began)
        else:
            self._running = step, began, done

    def wait(self) -> None:
        """Wait for the step that ended last. The device is told of the next one before, so that it does not idle."""
        if self._running is not None:
            (step, began, done), self._running = self._running, None
            done.synchronize()
            self._done(step, began)

    def _done(self, step: Step, began: float) -> None:
        """The device began with a step when it was told of it, or when it was done with the one before."""
        now = self._clock()
        seconds = now - max(began, self._done_at)
        self._done_at = now
        self.seconds += seconds
        self._learn(step, seconds)
