"""Trains: the training loop with its checkpoints and log of losses, the optimizer and its schedule.

A run is a function of its `Plan`: the data of a step depend on (seed, step) alone, so a run that is killed and resumed
from its checkpoint ends with the same bits as one that never stopped. It computes in float32, or under bfloat16
autocast where the device has units for that. The last checkpoint before the learning rate falls is kept, so a longer
run can go on from there. Knows nothing of tasks: it asks `training.mixture` for batches. Muon (Jordan et al., 2024)
replaces a matrix's momentum by the nearest orthogonal matrix, found by a few steps of Newton–Schulz, so that every
direction learns at the same speed. The embedding and the norms take AdamW.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from training.alignment import ROLES
from training.mixture import Reader
from training.team import ALONE, Team
from training.torch_model import Model, ModelConfig, TrainingBatch

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Pushes the singular values of (count, rows, columns) towards 1 (the quintic of the Muon write-up), by products
    in `dtype`: five steps forgive bfloat16."""
    a, b, c = QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, scaled so that an update's size does not depend on the shape.

    Each member of the team orthogonalises its share of the matrices.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        decay: float = 0.01,
        team: Team = ALONE,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is that of the products of the orthogonalisation."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})
        self.team = team
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever used
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                shapes[weight.shape].append(weight)
            updated = [torch.stack([self._momentum(w, group["momentum"]) for w in ws]) for ws in shapes.values()]
            for updates in updated:
                share = updates[self.team.rank :: self.team.size].clone()
                updates.zero_()[self.team.rank :: self.team.size] = orthogonalise(share, dtype=self.dtype)
            self.team.add(updated)
            for (shape, weights), updates in zip(shapes.items(), updated, strict=True):
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["decay"])
                    weight.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, weight: Tensor, momentum: float) -> Tensor:
        assert weight.grad is not None, "every matrix takes part in every step"
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(weight.grad, 1 - momentum)
        return weight.grad.lerp(state["momentum"], momentum)


def wsd(progress: float, warmup: float = 0.02, fall: float = 0.4) -> float:
    """Warm-up, stable, decay: the share of the peak rate when `progress` (0 to 1) of the training is done."""
    if progress < warmup:
        return max(progress, 1e-3) / warmup
    return min(1.0, max(0.0, 1 - progress) / fall)


class Optimizer:
    """The two optimisers as one: `step(share)` applies the gradients at `share` of the peak rates."""

    def __init__(
        self,
        model: torch.nn.Module,
        matrix_lr: float = 0.02,
        adam_lr: float = 3e-3,
        team: Team = ALONE,
        *,
        bfloat16: bool = False,
    ) -> None:
        named = list(model.named_parameters())
        matrices = [w for name, w in named if w.ndim == 2 and "embed" not in name]
        others = [w for name, w in named if w.ndim != 2 or "embed" in name]
        self.muon = Muon(matrices, matrix_lr, team=team, dtype=torch.bfloat16 if bfloat16 else torch.float32)
        self.adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._peaks = (matrix_lr, adam_lr)

    def step(self, share: float) -> None:
        for optimizer, peak in zip((self.muon, self.adam), self._peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def save_whole(state: dict[str, object], checkpoint: Path) -> None:
    """Writes a checkpoint whole or not at all."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    partial = checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(checkpoint)


def forget_later(log: Path, step: int) -> None:
    """Removes from a log of steps those after `step`, which come again."""
    lines = log.read_text("utf-8").splitlines(keepends=True) if log.exists() else []
    log.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), "utf-8")


Begin = Literal["start", "resume", "extend"]  # anew, from the last checkpoint, or from before the rate fell


@dataclass(frozen=True, slots=True)
class Plan:
    """`ramp_steps` is the step at which the curriculum reaches full difficulty; the rate falls over the last `fall`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 2400
    ramp_steps: int = 1800
    batch_tokens: int = 6144
    guidance: tuple[float, ...] = (0.05, 0.3, 0.3, 0.3, 0.3)  # weight in the loss of each role of `training.alignment`
    largest_batch: int = 2048  # tokens of rows of about one length
    spread: float = 1.25  # of their lengths
    repeat_after: int = 0  # steps, once each step's data are read twice; 0 for once
    together: bool = False  # whether a step's batches go through the model at once, or one after the other
    fall: float = 0.3
    matrix_lr: float = 0.02
    adam_lr: float = 3e-3
    seed: int = 1
    checkpoint_every_s: float = 120.0
    device: str = "cpu"
    bfloat16: bool = False  # products in bfloat16, sums and weights in float32
    start: str | None = None  # the folder of a published model whose weights the run begins with
    compile: bool = False  # takes a C++ compiler and two minutes; gives about a quarter more tokens a second on a CPU
    workers: int = 0  # processes that write batches ahead
    members: int = 1  # processes that train together
    tasks: tuple[str, ...] = ()  # of the mixture, alone and without procedural sequences; () for all of it


class Trainer:
    """Holds the model, the optimiser and the number of steps done; `run` goes on to the end of the plan.

    In a team every member holds the same weights; the first one writes the checkpoints and the log.
    """

    def __init__(self, plan: Plan, tokenizer: Tokenizer, work: Path, team: Team = ALONE) -> None:
        torch.manual_seed(plan.seed)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape, which takes longer than a step
        self.plan = plan
        self.tokenizer = tokenizer
        self.work = work
        self.team = team
        self.model = Model(plan.model)
        if plan.start is not None:
            published = load_file(Path(plan.start) / "model.safetensors")
            self.model.load_state_dict({name: weight.float() for name, weight in published.items()})
        self.model.to(plan.device)
        self.optimizer = Optimizer(self.model, plan.matrix_lr, plan.adam_lr, team, bfloat16=plan.bfloat16)
        self.reader = Reader(
            plan.seed,
            plan.batch_tokens,
            plan.largest_batch,
            plan.ramp_steps,
            tokenizer,
            plan.workers,
            team,
            plan.spread,
            plan.repeat_after,
            plan.tasks,
        )
        if plan.compile:
            self.model.compile_hidden() if plan.device == "cpu" else self.model.compile_parts()
        self.done = 0
        self.looks = [0.0] * len(ROLES)  # −log of the attention that fell where it should, of the last step
        self.tokens = 0
        self.seconds = 0.0

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    @property
    def stable(self) -> Path:
        """The last state at the full learning rate."""
        return self.work / "stable.pt"

    def save(self) -> None:
        """Writes the checkpoint whole or not at all."""
        if self.team.rank:
            return
        state = {
            "plan": asdict(self.plan),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": self.done,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        save_whole(state, self.checkpoint)

    def resume(self, path: Path | None = None) -> None:
        """Goes back to a checkpoint, the last one by default. Raises FileNotFoundError when there is none."""
        state = torch.load(path or self.checkpoint, map_location=self.plan.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.tokens, self.seconds = state["done"], state["tokens"], state["seconds"]

    def step(self, batches: list[TrainingBatch]) -> float:
        """One step on this member's batches; returns the team's mean loss of a token, weighted as it was trained."""
        device = self.plan.device
        guidance = torch.tensor(self.plan.guidance, device=device)
        lost = torch.zeros(1 + len(ROLES), dtype=torch.float64, device=device)  # loss, and what each role missed
        counts = torch.zeros(2 + len(ROLES), dtype=torch.float64)  # loss weight, tokens, and how many look in each role
        for together in [batches] if self.plan.together else [[batch] for batch in batches]:
            with torch.autocast(device, torch.bfloat16, enabled=self.plan.bfloat16):
                loss, missed = self.model.loss(together)
            (loss + guidance @ missed).backward()
            lost += torch.cat([loss.detach()[None], missed.detach()])
            for batch in together:
                looking = torch.bincount(batch.looks // batch.tokens.numel(), minlength=len(ROLES))
                counts += torch.tensor([float(batch.shares.sum()), batch.tokens.numel(), *looking])
        weights = list(self.model.parameters())
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        self.team.add(gradients)
        self.team.add([counts])
        weight_sum, tokens = counts[:2].tolist()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.div_(weight_sum)
        self.tokens += int(tokens)
        self.optimizer.step(wsd(self.done / self.plan.steps, fall=self.plan.fall))
        self.done += 1
        lost = lost.cpu()  # waits for a GPU, which has all of the step by now
        self.team.add([lost])
        self.looks = (lost[1:] / counts[2:].clamp(min=1)).tolist()
        return float(lost[0] / weight_sum)

    def run(self, until: int | None = None) -> None:
        """Trains to the end of the plan (or to step `until`), with a line of log every ten steps."""
        self.work.mkdir(parents=True, exist_ok=True)
        end = min(until or self.plan.steps, self.plan.steps)
        falls = int(self.plan.steps * (1 - self.plan.fall))
        began = saved = time.monotonic()
        if not self.team.rank:
            forget_later(self.work / "losses.jsonl", self.done)
        with (self.work / "losses.jsonl").open("a") as log:
            for batches in self.reader.read(self.done, end):
                loss = self.step(batches)
                now = time.monotonic()
                self.seconds, began = self.seconds + now - began, now
                if self.done % 10 == 0 and not self.team.rank:
                    looks = {role: round(missed, 3) for role, missed in zip(ROLES, self.looks, strict=True)}
                    line = {"step": self.done, "tokens": self.tokens, "loss": round(loss, 4), **looks}
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                    left = self.seconds / self.done * (end - self.done)
                    rate = self.tokens / self.seconds
                    print(
                        f"step {self.done}/{end}  loss {loss:.4f}  missed {list(looks.values())}  {rate:.0f} tokens/s  "
                        f"{left / 60:.1f} min left",
                        flush=True,
                    )
                if now - saved > self.plan.checkpoint_every_s or self.done == falls:
                    self.save()
                    saved = now
                if self.done == falls and not self.team.rank:
                    shutil.copy(self.checkpoint, self.stable)
        self.save()


def train(team: Team, plan: Plan, tokenizer: Path, work: Path, begin: Begin) -> None:
    """Carries out a plan as one member of a team."""
    trainer = Trainer(plan, Tokenizer.from_file(str(tokenizer)), work, team)
    if begin == "resume" and trainer.checkpoint.exists():
        trainer.resume()
    elif begin == "extend":
        trainer.resume(trainer.stable)
    trainer.run()
