"""Steps on their way through the device: told, run, drawn, taken. Knows nothing of commands or of who is told.

Where a device does what it is told one thing after the other, it is told of a step before the tokens of the one before
are known here (`follow`): it finds them by itself, and never waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.answers import Answers, Begun
from engine.device import Device
from engine.kv.tiers import Tiers
from engine.masking import Masking
from engine.pace import Pace
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.step import Step


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that the device was told of, at `began`. It has drawn nothing yet where it is a thread's to run."""

    step: Step
    began: float
    result: tuple[Tensor, Begun] | None


class Flights:
    """Of one core: at most one step is under way between calls. `device`, if given, runs steps in a thread."""

    def __init__(
        self,
        runner: Runner,
        device: Device | None,
        scheduler: Scheduler,
        tiers: Tiers | None,
        masking: Masking,
        answers: Answers,
        pace: Pace,
        clock: Callable[[], float],
    ) -> None:
        self.runner = runner
        self._device = device
        self._scheduler = scheduler
        self._tiers = tiers
        self._masking = masking
        self._answers = answers
        self._pace = pace
        self._clock = clock
        self._flight: _Flight | None = None

    @property
    def under_way(self) -> bool:
        return self._flight is not None

    @torch.inference_mode()
    def start(self) -> None:
        """Tell the device of the next step; of nothing, where none can run before a block has come up from a tier."""
        if not self._scheduler.has_work:
            return
        began, step = self._clock(), self._scheduler.schedule()
        if not step.rows and (step.saves or self._scheduler.stalled):  # blocks go down or come up, and nobody can run
            self._save(step)
            self._scheduler.complete(step)
            return
        assert step.rows, "there is work but no row: a sequence was admitted that can never fit"
        self._flight = self._told(step, began)

    @torch.inference_mode()
    def follow(self) -> bool:
        """Tell the device what comes after the step that is under way, and land that one. False, and nothing has
        changed, where what comes after it depends on what it draws, or on who waits."""
        flight = self._flight
        if flight is None or flight.result is None:
            return False
        _, begun = flight.result
        if begun.drawing is None or not begun.only_draws:
            return False
        began, step = self._clock(), self._scheduler.follow(flight.step)
        if step is None:
            return False
        step.drawn = begun.drawing.token_ids
        self._flight = self._told(step, began)
        self._take(flight, *flight.result)
        return True

    @torch.inference_mode()
    def land(self) -> None:
        """Wait for the step that is under way, and take what it drew. Of which nothing was drawn is not waited for."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        result = flight.result
        if result is None:
            assert self._device is not None
            logits = self._device.wait()
            result = logits, self._answers.begin(flight.step.rows, logits)
        self._scheduler.complete(flight.step)
        self._take(flight, *result)

    def close(self) -> None:
        """No step may follow."""
        if self._device is not None:
            self._device.close()

    def _told(self, step: Step, began: float) -> _Flight:
        self._save(step)
        self._masking.start(step.rows)
        if self._device is not None:
            self._device.start(step)
            return _Flight(step, began, None)
        logits = self.runner.run(step)
        return _Flight(step, began, (logits, self._answers.begin(step.rows, logits)))

    def _take(self, flight: _Flight, logits: Tensor, begun: Begun) -> None:
        self._answers.read(flight.step.rows, logits, begun)
        self._pace.ended(flight.step, flight.began, begun.done)

    def _save(self, step: Step) -> None:
        if step.saves and self._tiers is not None:
            self._tiers.save(step.saves)
