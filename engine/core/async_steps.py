"""Async scheduling: launches a step before the tokens of the one before it are known.

At most one step is in flight between calls. On a CPU the device is a thread: the model's operations let other threads
run, so the host works meanwhile. Policies learn from the times measured here. A step that samples nothing gives the
host nothing to wait for, so the end of such a step is waited for by its event: otherwise it would seem to be over when
it was launched, and the next one to take as long as both.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.output_processor import OutputProcessor, SamplingInFlight
from engine.core.scheduler import Scheduler
from engine.core.step import Step
from engine.kv_cache.offload import OffloadTiers
from engine.model.runner import Runner
from engine.structured_output.bitmask import Masking


class StepTimer:
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


class DeviceThread:
    """One step at a time. `begin` runs first in the device's thread: what torch keeps by thread is set there."""

    def __init__(self, runner: Runner, begin: Callable[[], None]) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device", initializer=begin)
        self._logits: Future[Tensor] | None = None

    def start(self, step: Step) -> None:
        """Run it; nothing that it reads may change until `wait` has returned."""
        self._logits = self._thread.submit(self._run, step)

    def wait(self) -> Tensor:
        """The logits of the step that was started, or what went wrong in it."""
        assert self._logits is not None
        logits, self._logits = self._logits.result(), None
        return logits

    def close(self) -> None:
        self._thread.shutdown()

    @torch.inference_mode()
    def _run(self, step: Step) -> Tensor:
        return self._runner.run(step)


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A step that the device was told of, at `began`. It has drawn nothing yet where it is a thread's to run."""

    step: Step
    began: float
    result: tuple[Tensor, SamplingInFlight] | None


class InFlightSteps:
    """Of one core: at most one step is under way between calls. `device`, if given, runs steps in a thread."""

    def __init__(
        self,
        runner: Runner,
        device: DeviceThread | None,
        scheduler: Scheduler,
        tiers: OffloadTiers | None,
        masking: Masking,
        answers: OutputProcessor,
        pace: StepTimer,
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
        self._flight: _InFlightStep | None = None

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
    def schedule_ahead(self) -> bool:
        """Tell the device what comes after the step that is under way, and land that one. False, and nothing has
        changed, where what comes after it depends on what it draws, or on who waits."""
        flight = self._flight
        if flight is None or flight.result is None:
            return False
        _, begun = flight.result
        if begun.drawing is None or not begun.only_draws:
            return False
        began, step = self._clock(), self._scheduler.schedule_ahead(flight.step)
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

    def _told(self, step: Step, began: float) -> _InFlightStep:
        self._save(step)
        self._masking.start(step.rows)
        if self._device is not None:
            self._device.start(step)
            return _InFlightStep(step, began, None)
        logits = self.runner.run(step)
        return _InFlightStep(step, began, (logits, self._answers.begin(step.rows, logits)))

    def _take(self, flight: _InFlightStep, logits: Tensor, begun: SamplingInFlight) -> None:
        self._answers.read(flight.step.rows, logits, begun)
        self._pace.ended(flight.step, flight.began, begun.done)

    def _save(self, step: Step) -> None:
        if step.saves and self._tiers is not None:
            self._tiers.save(step.saves)
