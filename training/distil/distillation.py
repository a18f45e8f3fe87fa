"""Trains a drafter on the base's answers: the loop, its checkpoints and its log.

The rows of a step depend on (seed, step) and on the rows that there are, so a run that was stopped and resumed ends
with the same bits as one that never stopped. Knows nothing of the drafters: a student gives a loss for a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from training.trainer import Optimizer, forget_later, wsd

Row = TypeVar("Row")
Module_co = TypeVar("Module_co", bound=nn.Module, covariant=True)


@dataclass(frozen=True, slots=True)
class DistilPlan:
    """`batch` rows a step; the rates fall over the last `fall` of the steps."""

    steps: int
    batch: int
    matrix_lr: float
    adam_lr: float
    fall: float = 0.6
    seed: int = 1
    bfloat16: bool = False  # products in bfloat16, sums and weights in float32
    checkpoint_every_s: float = 60.0
    log_every: int = 20  # steps


class Student(Protocol[Module_co]):
    """A module in training. `backward` adds a step's gradients and returns its mean loss."""

    @property
    def module(self) -> Module_co: ...

    def backward(self, step: int) -> float: ...


class RateOptimizer(Protocol):
    """Applies gradients at a share of its peak rates."""

    def step(self, share: float) -> None: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...  # Any: as torch has it


def rows_of(rows: Sequence[Row], step: int, batch: int, seed: int) -> list[Row]:
    """Returns the rows of a step: all come once in an order of their own before any comes again."""
    found = []
    orders = dict[int, list[int]]()
    for place in range(step * batch, (step + 1) * batch):
        epoch, at = divmod(place, len(rows))
        if epoch not in orders:
            orders[epoch] = Random(f"{seed}-{epoch}").sample(range(len(rows)), len(rows))
        found.append(rows[orders[epoch][at]])
    return found


class Distillation(Generic[Module_co]):
    """Holds a student, its optimiser and the number of steps done.

    Without an `optimizer` Muon learns the matrices, and Adam all else.
    """

    def __init__(
        self, plan: DistilPlan, student: Student[Module_co], work: Path, optimizer: RateOptimizer | None = None
    ) -> None:
        self.plan = plan
        self.student = student
        self.work = work
        self.optimizer: RateOptimizer = optimizer or Optimizer(
            student.module, plan.matrix_lr, plan.adam_lr, bfloat16=plan.bfloat16
        )
        self.done = 0
        self.seconds = 0.0

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    def save(self) -> None:
        """Writes the checkpoint whole or not at all."""
        self.work.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        state = {"model": self.student.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "done": self.done, "seconds": self.seconds}, partial)
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        """Goes back to the last checkpoint, where there is one."""
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, weights_only=True)
            self.student.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.done, self.seconds = state["done"], state["seconds"]

    def run(self, until: int | None = None) -> None:
        """Trains to the end of the plan (or to step `until`), with a line of log every `log_every` of them."""
        self.work.mkdir(parents=True, exist_ok=True)
        end = min(until or self.plan.steps, self.plan.steps)
        began = saved = time.monotonic()
        losses = list[float]()
        forget_later(self.work / "losses.jsonl", self.done)
        with (self.work / "losses.jsonl").open("a") as log:
            while self.done < end:
                losses.append(self.student.backward(self.done))
                self.optimizer.step(wsd(self.done / self.plan.steps, fall=self.plan.fall))
                self.done += 1
                now = time.monotonic()
                self.seconds, began = self.seconds + now - began, now
                if self.done % self.plan.log_every == 0:
                    line = {"step": self.done, "loss": round(sum(losses) / len(losses), 4)}
                    losses.clear()
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                    left = self.seconds / self.done * (end - self.done)
                    print(f"step {self.done}/{end}  loss {line['loss']}  {left / 60:.1f} min left", flush=True)
                if now - saved > self.plan.checkpoint_every_s:
                    self.save()
                    saved = now
        self.save()
