"""Async scheduling: launches a step before the tokens of the one before it are known.

At most one step is in flight between calls. On a CPU the device is a thread: the model's operations let other threads
run, so the host works meanwhile. Policies learn from the times measured here. A step that samples nothing gives the
host nothing to wait for, so the end of such a step is waited for by its event: otherwise it would seem to be over when
it was launched, and the next one to take as long as both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.core.output_processor import OutputProcessor, SamplingInFlight
from engine.core.scheduler import Scheduler
from engine.core.step import Step
from engine.core.token_tree import NO_DRAFTS, Tree
from engine.kv_cache.kv_connector import KVConnector
from engine.model.runner import Runner, TreeRunner
from engine.speculation.speculator import Speculator
from engine.structured_output.bitmask import Masking


class StepTimer:
    """Times the steps of one core. `learn` takes each step and its seconds, once the device has finished it."""

    def __init__(self, clock: Callable[[], float], learn: Callable[[Step, float], None]) -> None:
        self.steps = 0
        self.tokens = 0
        self.seconds = 0.0
        self.last_batch = 0
        self.decode_s = 0.0  # of a step of decodes alone, smoothed
        self._decodes: list[tuple[int, int, float]] = []  # see `Stats.decodes`
        self._clock = clock
        self._learn = learn
        self._done_at = float("-inf")
        self._running: tuple[Step, float, torch.cuda.Event] | None = None

    def stats(self) -> dict[str, Any]:  # Any: keyword arguments of another class
        """Returns its fields of `Stats`."""
        counts = {"steps": self.steps, "step_tokens": self.tokens, "step_seconds": self.seconds}
        return {**counts, "last_batch": self.last_batch, "decodes": tuple(self._decodes)}

    def ended(self, step: Step, began: float, done: torch.cuda.Event | None) -> None:
        """Counts a step whose results the host has. `done`: the event of its end on the device, if that may still be
        ahead; then `wait` must follow, before the next `ended`."""
        self.steps += 1
        self.tokens += step.tokens
        self.last_batch = len(step.rows)
        if done is None:
            self._done(step, began)
        else:
            self._running = step, began, done

    def wait(self) -> None:
        """Waits for the step that ended last. The next one is launched before, so that the device does not idle."""
        if self._running is not None:
            (step, began, done), self._running = self._running, None
            done.synchronize()
            self._done(step, began)

    def _count_decode(self, rows: int, seconds: float) -> None:
        size = rows.bit_length() - 1
        self._decodes += [(0, 0, 0.0)] * (size + 1 - len(self._decodes))
        steps, total, spent = self._decodes[size]
        self._decodes[size] = steps + 1, total + rows, spent + seconds

    def _done(self, step: Step, began: float) -> None:
        """Times a step from its launch, or from the end of the step before if that was later."""
        now = self._clock()
        seconds = now - max(began, self._done_at)
        self._done_at = now
        self.seconds += seconds
        if step.tokens == len(step.rows):
            self.decode_s += (seconds - self.decode_s) * (0.1 if self.decode_s else 1.0)
        if sum(row.count for row in step.rows) == len(step.rows):
            self._count_decode(len(step.rows), seconds)
        self._learn(step, seconds)


class DeviceThread:
    """Runs one step at a time in a thread. `begin` runs first there: it sets torch's settings that are kept by
    thread."""

    def __init__(self, runner: Runner, begin: Callable[[], None]) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device", initializer=begin)
        self._logits: Future[Tensor] | None = None

    def launch(self, step: Step) -> None:
        """Runs the step; nothing that it reads may change until `wait` has returned."""
        self._logits = self._thread.submit(self._run, step)

    def wait(self) -> Tensor:
        """Returns the logits of the launched step, or raises its error."""
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
    """A step launched at `began`. `result` is None where it runs in a thread and nothing is sampled yet."""

    step: Step
    began: float
    result: tuple[Tensor, SamplingInFlight] | None


class InFlightSteps:
    """In-flight steps of one core: at most one between calls. `device`, if given, runs steps in a thread."""

    def __init__(
        self,
        runner: Runner,
        device: DeviceThread | None,
        scheduler: Scheduler,
        masking: Masking,
        processor: OutputProcessor,
        timer: StepTimer,
        clock: Callable[[], float],
        speculator: Speculator,
        connector: KVConnector | None = None,
    ) -> None:
        self.runner = runner
        self._connector = connector
        self._device = device
        self._scheduler = scheduler
        self._masking = masking
        self._processor = processor
        self._timer = timer
        self._clock = clock
        self._speculator = speculator
        self._in_flight: _InFlightStep | None = None

    @property
    def in_flight(self) -> bool:
        return self._in_flight is not None

    @torch.inference_mode()
    def launch(self) -> None:
        """Launches the next step; none where nothing can run before a block is loaded from a tier, or an image is
        encoded. Encodes for a moment first, where images wait."""
        if self._scheduler.images.pending:
            self._processor.emit_outputs()
            decodes = any(seq.remaining == 1 for seq in self._scheduler.running.values())
            self._scheduler.images.advance(self._timer.decode_s if decodes else None)
        if not self._scheduler.has_work:
            return
        drafts = self._drafts()
        began, step = self._clock(), self._scheduler.schedule(drafts)
        waits = step.saves or step.state_saves or self._scheduler.stalled or self._scheduler.images.pending
        idle = waits or not self._scheduler.has_work
        if not step.rows and idle:  # blocks are offloaded or loaded, or there was nothing left to warm
            self._scheduler.save(step)
            self._scheduler.complete(step)
            return
        assert step.rows, "there is work but no row: a sequence was admitted that can never fit"
        self._in_flight = self._launch(step, began)

    @torch.inference_mode()
    def schedule_ahead(self) -> bool:
        """Launches the step after the one in flight (async scheduling), then collects the latter. False, and nothing
        has changed, where the next step depends on the sampled tokens, or on waiting sequences."""
        in_flight = self._in_flight
        if in_flight is None or in_flight.result is None or self._scheduler.images.pending:
            return False
        _, begun = in_flight.result
        if begun.samples is None or not begun.only_samples:
            return False
        began, step = self._clock(), self._scheduler.schedule_ahead(in_flight.step)
        if step is None:
            return False
        step.sampled = begun.samples.token_ids
        self._in_flight = self._launch(step, began)
        self._take(in_flight, *in_flight.result)
        return True

    @torch.inference_mode()
    def collect(self) -> None:
        """Waits for the step in flight, and takes its samples. A step without samples is not waited for."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        result = in_flight.result
        if result is None:
            assert self._device is not None
            logits = self._device.wait()
            result = logits, self._processor.sample(in_flight.step.rows, logits)
        self._scheduler.complete(in_flight.step)
        self._take(in_flight, *result)

    def close(self) -> None:
        """Ends the device's thread. No step may follow."""
        if self._device is not None:
            self._device.close()

    def _drafts(self) -> Mapping[int, Tree]:
        """Returns the drafts to verify in the next step; none while others wait to run."""
        if self._scheduler.waiting:
            return NO_DRAFTS
        return self._speculator.drafts(self._scheduler.running.values())

    def _launch(self, step: Step, began: float) -> _InFlightStep:
        self._scheduler.save(step)
        if self._connector is not None:
            step.save_kv_layer = self._connector.bind_connector_metadata(step.rows)
        self._masking.start(step.rows)
        if self._device is not None:
            self._device.launch(step)
            return _InFlightStep(step, began, None)
        logits = self.runner.run(step)
        return _InFlightStep(step, began, (logits, self._processor.sample(step.rows, logits)))

    def _take(self, in_flight: _InFlightStep, logits: Tensor, begun: SamplingInFlight) -> None:
        self._processor.collect(in_flight.step.rows, logits, begun)
        if moves := self._scheduler.draft_rows.take_moves():  # before any later reader of the K/V
            assert isinstance(self.runner, TreeRunner), "a tree was verified"
            self.runner.move_kv(moves)
        self._timer.ended(in_flight.step, in_flight.began, begun.done)
