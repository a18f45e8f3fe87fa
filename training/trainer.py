"""The training loop: batches in, checkpoints and a log of losses out.

A run is a function of its `Plan`: the data of a step depend on (seed, step) alone, so a run that is killed and resumed
from its checkpoint ends with the same bits as one that never stopped. On a CPU it computes in float32; on CUDA under
bfloat16 autocast. Knows nothing of tasks: it asks `training.mixture` for batches.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer

from training import mixture
from training.model import Model, ModelConfig
from training.optimizer import Optimizer, wsd


@dataclass(frozen=True, slots=True)
class Plan:
    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 1200
    batch_tokens: int = 4096
    chunks: int = 4  # batches of one length a step
    matrix_lr: float = 0.02
    adam_lr: float = 3e-3
    seed: int = 1
    checkpoint_every_s: float = 120.0
    device: str = "cpu"


class Trainer:
    """Holds the model, the optimiser and the number of steps done; `run` goes on to the end of the plan."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, work: Path) -> None:
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.tokenizer = tokenizer
        self.work = work
        self.model = Model(plan.model).to(plan.device)
        self.optimizer = Optimizer(self.model, plan.matrix_lr, plan.adam_lr)
        self.done = 0
        self.tokens = 0
        self.seconds = 0.0

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint whole or not at all."""
        self.work.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(
            {
                "plan": asdict(self.plan),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "done": self.done,
                "tokens": self.tokens,
                "seconds": self.seconds,
            },
            partial,
        )
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        """Go back to the checkpoint. Raises FileNotFoundError when there is none."""
        state = torch.load(self.checkpoint, map_location=self.plan.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.tokens, self.seconds = state["done"], state["tokens"], state["seconds"]

    def step(self) -> float:
        """One step; returns the mean loss of a token, weighted as it was trained."""
        progress = self.done / self.plan.steps
        batches = mixture.batch(
            self.plan.seed, self.done, progress, self.tokenizer, self.plan.batch_tokens, self.plan.chunks
        )
        weight = sum(float(batch.weights[:, 1:].sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            with torch.autocast(self.plan.device, torch.bfloat16, enabled=self.plan.device == "cuda"):
                loss = self.model.loss(batch.tokens.to(self.plan.device), batch.weights.to(self.plan.device)) / weight
            loss.backward()
            total += float(loss.detach())
            self.tokens += batch.tokens.numel()
        self.optimizer.step(wsd(progress))
        self.done += 1
        return total

    def run(self, until: int | None = None) -> None:
        """Train to the end of the plan (or to step `until`), with a line of log every ten steps."""
        self.work.mkdir(parents=True, exist_ok=True)
        end = min(until or self.plan.steps, self.plan.steps)
        saved = time.monotonic()
        with (self.work / "losses.jsonl").open("a") as log:
            while self.done < end:
                began = time.monotonic()
                loss = self.step()
                self.seconds += time.monotonic() - began
                if self.done % 10 == 0:
                    log.write(json.dumps({"step": self.done, "tokens": self.tokens, "loss": round(loss, 4)}) + "\n")
                    log.flush()
                    left = self.seconds / self.done * (end - self.done)
                    rate = self.tokens / self.seconds
                    print(
                        f"step {self.done}/{end}  loss {loss:.4f}  {rate:.0f} tokens/s  {left / 60:.1f} min left",
                        flush=True,
                    )
                if time.monotonic() - saved > self.plan.checkpoint_every_s:
                    self.save()
                    saved = time.monotonic()
        self.save()
