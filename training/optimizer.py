"""Muon for the matrices, AdamW for the rest, and the schedule both follow.

Muon (Jordan et al., 2024) replaces a matrix's momentum by the nearest orthogonal matrix, found by a few steps of
Newton–Schulz, so that every direction learns at the same speed. Matrices of one shape are orthogonalised in one
batch. The embedding and the norms take AdamW. Knows nothing of the model beyond its parameters' shapes and names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from training.team import ALONE, Team

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of (count, rows, columns) towards 1 (the quintic of the Muon write-up)."""
    a, b, c = QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


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
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})
        self.team = team

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever used
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                shapes[weight.shape].append(weight)
            updated = [torch.stack([self._momentum(w, group["momentum"]) for w in ws]) for ws in shapes.values()]
            for updates in updated:
                share = updates[self.team.rank :: self.team.size].clone()
                updates.zero_()[self.team.rank :: self.team.size] = orthogonalise(share)
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
        self, model: torch.nn.Module, matrix_lr: float = 0.02, adam_lr: float = 3e-3, team: Team = ALONE
    ) -> None:
        named = list(model.named_parameters())
        matrices = [w for name, w in named if w.ndim == 2 and "embed" not in name]
        others = [w for name, w in named if w.ndim != 2 or "embed" in name]
        self.muon = Muon(matrices, lr=matrix_lr, team=team)
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
