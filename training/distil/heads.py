"""Medusa heads (Cai et al., 2024): each guesses a token further ahead from the base's last normed state.

    head i:  h + silu(W_i h + b_i), then the base's tied embedding: the token at t + 2 + i, of the state at t

The base is frozen and no part of the heads' file. Weights have the names of published Medusa checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training import export
from training.distil import answers
from training.distil.distillation import Distillation, DistilPlan

COUNT = 3
PLAN = DistilPlan(steps=1000, batch=1024, matrix_lr=0.06, adam_lr=6e-3)

CARD = """\
---
license: apache-2.0
language: en
---

# Pebble's Medusa heads

{count} heads (Cai et al., 2024) of {parameters:,} parameters together, which guess ahead for Pebble (speculative
decoding): from the state that Pebble samples a token from, head i guesses the token i further on. A head is
`h + silu(W h + b)`, then Pebble's own tied embedding, which is no part of this file. They fit the weights whose SHA-256
is in `config.json`, and no others.

## Acceptance

{acceptance}

## How they were made

- **Data**: Pebble's own answers, greedy and at temperature 0.7, to prompts of its training mixture
  (`training/distil/answers.py`).
- **Recipe**: {steps:,} steps of {batch:,} states; the cross-entropy of the token that each head is to guess, Pebble
  frozen. Muon at {matrix_lr} for the matrices and AdamW at {adam_lr} for the biases; a linear fall over the
  last {fall:.0%}.
- **Time**: {minutes} minutes on {hardware}, beside the writing of the answers.

Remake them with `python -m training --only pebble-medusa`.
"""


class HeadStack(nn.Module):
    """`forward` takes states (…, hidden_size) and gives (…, heads, hidden_size), for the base's embedding."""

    def __init__(self, hidden_size: int, count: int = COUNT) -> None:
        super().__init__()
        self.count = count
        self.linears = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)  # a head begins as the base's own: it guesses the next token again

    def forward(self, states: Tensor) -> Tensor:
        return torch.stack([states + F.silu(linear(states)) for linear in self.linears], dim=-2)


def examples(tokens: Sequence[Sequence[int]], states: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Returns the states of all answers, (states, hidden_size), and the token that each head is to guess from them,
    (states, heads): −1 behind the end. Token t of an answer is sampled from state t."""
    targets = []
    for answer in tokens:
        padded = torch.tensor([*answer, *[-1] * count])
        targets.append(torch.stack([padded[1 + j : 1 + j + len(answer)] for j in range(count)], dim=1))
    return torch.cat(list(states)), torch.cat(targets)


class HeadsStudent:
    """Learns from `batch` states a step: all come once in an order of their own before any comes again."""

    def __init__(self, heads: HeadStack, embedding: Tensor, states: Tensor, targets: Tensor, plan: DistilPlan) -> None:
        self.module = heads
        self.plan = plan
        self._embedding = embedding.detach()
        self._states, self._targets = states, targets

    def backward(self, step: int) -> float:
        batch = min(self.plan.batch, len(self._states))
        epoch, place = divmod(step, len(self._states) // batch)
        order = torch.randperm(len(self._states), generator=torch.Generator().manual_seed(self.plan.seed + epoch))
        chosen = order[place * batch : (place + 1) * batch]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.plan.bfloat16):
            logits = F.linear(self.module(self._states[chosen].float()), self._embedding)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self._targets[chosen].flatten(), ignore_index=-1)
        loss.backward()
        return loss.item()


def train(base: Path, learned: Path, work: Path, plan: DistilPlan, *, resume: bool) -> Distillation[HeadStack]:
    """Trains heads on the answers in the folder `learned`."""
    model = export.load(base)
    read = list(answers.read(learned))
    states, targets = examples([each.tokens for each, _ in read], [found for _, found in read], COUNT)
    heads = HeadStack(model.config.hidden_size)
    run = Distillation(plan, HeadsStudent(heads, model.model.embed_tokens.weight, states, targets, plan), work)
    if resume:
        run.resume()
    run.run()
    return run


def save(heads: HeadStack, base: Path, out: Path) -> None:
    """Writes the folder: configuration and weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    shape = json.loads((base / "config.json").read_text("utf-8"))
    config = {
        "architectures": ["MedusaHeads"],
        "model_type": "medusa",
        "medusa_num_heads": heads.count,
        "medusa_num_layers": 1,
        "hidden_size": shape["hidden_size"],
        "vocab_size": shape["vocab_size"],
        "torch_dtype": "bfloat16",
        "base_model": base.name,
        "base_sha256": answers.digest(base),
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {
        f"{at}.0.linear.{name}": weight.detach().bfloat16().contiguous()
        for at, linear in enumerate(heads.linears)
        for name, weight in linear.named_parameters()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def load(path: Path) -> HeadStack:
    """Reads back what `save` wrote, in float32."""
    config = json.loads((path / "config.json").read_text("utf-8"))
    heads = HeadStack(config["hidden_size"], config["medusa_num_heads"])
    weights = load_file(path / "model.safetensors")
    names = (f"linears.{at}.{name}" for at in range(heads.count) for name in ("weight", "bias"))
    heads.load_state_dict({name: weights[f"{name[8]}.0.linear.{name[10:]}"].float() for name in names})
    return heads


def describe(run: Distillation[HeadStack], acceptance: str, hardware: str, out: Path) -> None:
    """Writes the card."""
    parameters = sum(weight.numel() for weight in run.student.module.parameters())
    text = CARD.format(
        count=COUNT,
        parameters=parameters,
        acceptance=acceptance,
        steps=run.plan.steps,
        batch=run.plan.batch,
        matrix_lr=run.plan.matrix_lr,
        adam_lr=run.plan.adam_lr,
        fall=run.plan.fall,
        minutes=max(1, round(run.seconds / 60)),
        hardware=hardware,
    )
    (out / "README.md").write_text(text, encoding="utf-8")
