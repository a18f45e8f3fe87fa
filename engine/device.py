"""A device that a step is handed to and fetched from later, so that what is to be done meanwhile can be done.

On a CPU that is a thread: the model's operations let other threads run. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from engine.runner import Runner
from engine.step import Step


class Device:
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
